"""In every test of nsa.ops: uninitialised memory is NaN, so that reading it shows; one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ops.cases import one_thread as one_thread


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill `torch.empty` with NaN (the largest number for integers); deterministic mode does it."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
