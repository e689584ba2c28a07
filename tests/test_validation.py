"""Checks of settings and flags: boundaries, and one line with the name, the value and the rule."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from nsa.validation import (
    above_zero,
    at_least,
    at_most,
    positive_flags,
    whole_numbers,
)


def problem(check: object, *arguments: object, **fields: object) -> str:
    """Return the error of `check(*arguments, section, config, names)`, or ""."""
    config = SimpleNamespace(**fields)
    try:
        check(*arguments, "part", config, *fields)  # type: ignore[operator]
    except ValueError as error:
        return str(error)
    return ""


def test_bounds_are_inclusive_and_nan_is_below_each() -> None:
    assert problem(at_least, 3, a=3, b=4) == ""
    assert problem(at_least, 3, a=3, b=2) == "part.b = 2: must be 3 or more"
    assert problem(at_least, 3, a=math.nan) == "part.a = nan: must be 3 or more"
    assert problem(at_most, 5_000, a=5_000) == ""
    assert problem(at_most, 5_000, a=5_001) == "part.a = 5001: must be 5,000 or less"
    assert problem(above_zero, a=1e-9) == ""
    assert problem(above_zero, a=0.0) == "part.a = 0.0: must be above 0"
    assert problem(above_zero, a=math.nan) == "part.a = nan: must be above 0"


def test_a_whole_number_is_no_float_and_no_switch() -> None:
    assert problem(whole_numbers, 1, a=1) == ""
    for value in (0, 1.0, True, "1"):
        expected = f"part.a = {value!r}: must be a whole number, 1 or more"
        assert problem(whole_numbers, 1, a=value) == expected


def test_flags_that_count_are_1_or_more() -> None:
    positive_flags(
        SimpleNamespace(seq_len=1, ranks=None, steps=[1, 2]), "seq_len", "ranks", "steps"
    )
    for value in (0, [3, 0]):
        with pytest.raises(ValueError, match=r"--seq-len 0: must be 1 or more"):
            positive_flags(SimpleNamespace(seq_len=value), "seq_len")
