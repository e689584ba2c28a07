"""The models of these tests are small, so one thread computes them."""

from tests.ops.cases import one_thread as one_thread
