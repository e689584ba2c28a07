"""Known errors of public NSA implementations that a comparison with `naive` does not show."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ops import known_errors
from tests.ops.cases import one_thread as one_thread

BOTH = (
    known_errors.the_last_blocks_are_always_selected,
    known_errors.large_logits_neither_overflow_nor_underflow,
    known_errors.small_importances_are_still_ranked,
    known_errors.key_and_value_gradients_are_rounded_to_bf16_once,
    known_errors.five_runs_are_the_same_to_the_bit,
)


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
@pytest.mark.parametrize("check", BOTH)
def test_the_code_does_not_have_a_known_error(check: Callable[[str], None], backend: str) -> None:
    check(backend)


def test_block_and_row_do_not_overflow_32_bits() -> None:
    """`reference` would need a mask of T × T."""
    known_errors.block_and_row_do_not_overflow_32_bits("blockwise")
