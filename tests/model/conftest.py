"""One thread: the models of these tests are small."""

from tests.ops.cases import one_thread as one_thread
