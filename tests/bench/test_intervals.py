"""The confidence interval of a mean is that of a textbook."""

from __future__ import annotations

import pytest

from tests.bench.intervals import margin, mean_and_range


def test_a_textbook_example() -> None:
    """Gosset's: additional hours of sleep with one drug over the other, ten patients (1908)."""
    hours = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    assert margin(hours) == pytest.approx(0.8799, abs=1e-4)
    assert mean_and_range(hours, ".2f") == "1.58 (0.00 to 4.60)"
    assert margin([1.2]) == 0
    assert mean_and_range([1.2, 1.2], ".1f") == "1.2"
    assert mean_and_range([], ".1f") == "–"
