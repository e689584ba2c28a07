"""Student's t distribution against published tables."""

from __future__ import annotations

import pytest

from tests.bench.intervals import central_probability, margin, mean_and_range, t_quantile


@pytest.mark.parametrize(
    ("degrees", "one_in_twenty", "one_in_hundred", "four_fifths"),
    [(1, 12.706, 63.657, 1.376), (2, 4.303, 9.925, 1.061), (4, 2.776, 4.604, 0.941),
     (9, 2.262, 3.250, 0.883), (30, 2.042, 2.750, 0.854)],
)  # fmt: skip
def test_quantiles_and_p_values_are_those_of_the_table(
    degrees: int, one_in_twenty: float, one_in_hundred: float, four_fifths: float
) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(one_in_twenty, abs=6e-4)
    assert t_quantile(0.995, degrees) == pytest.approx(one_in_hundred, abs=6e-4)
    assert t_quantile(0.8, degrees) == pytest.approx(four_fifths, abs=6e-4)
    assert 1 - central_probability(one_in_hundred, degrees) == pytest.approx(0.01, rel=1e-3)


def test_a_textbook_example() -> None:
    """Gosset's: additional hours of sleep with one drug over the other, ten patients (1908)."""
    hours = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    assert margin(hours) == pytest.approx(0.8799, abs=1e-4)
    assert mean_and_range(hours, ".2f") == "1.58 (0.00 to 4.60)"
    assert margin([1.2]) == 0
    assert mean_and_range([1.2, 1.2], ".1f") == "1.2"
    assert mean_and_range([], ".1f") == "–"
