"""Fixture for all model tests: one thread, because their models are small."""

from tests.ops.cases import one_thread as one_thread
