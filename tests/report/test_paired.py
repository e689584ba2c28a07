"""The paired t test against published tables and a simulation."""

from __future__ import annotations

import random

import pytest

from nsa.report.paired import central_probability, paired_t, t_quantile


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
    test = paired_t([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])
    assert test is not None
    assert test.mean == pytest.approx(1.58)
    assert test.p == pytest.approx(0.002833, rel=1e-3)
    assert (test.mean - test.margin, test.mean + test.margin) == pytest.approx(
        (0.7001, 2.4599), abs=1e-4
    )


def test_four_in_five_experiments_find_a_detectable_difference() -> None:
    """Of five seeds each; at no difference, one in twenty finds one."""
    numbers = random.Random(0)
    found = {0.0: 0, 1.6625: 0}  # in standard deviations: (2.776 + 0.941) / √5
    for effect in found:
        for _ in range(2_000):
            test = paired_t([numbers.gauss(effect, 1.0) for _ in range(5)])
            assert test is not None
            found[effect] += test.p < 0.05
    assert found[0.0] / 2_000 == pytest.approx(0.05, abs=0.02)
    assert found[1.6625] / 2_000 == pytest.approx(0.8, abs=0.03)
    test = paired_t([-1.0, -1.0, 0.0, 1.0, 1.0])  # a standard deviation of 1
    assert test is not None
    assert test.detectable == pytest.approx(1.6625, abs=1e-3)


def test_too_few_or_equal_differences_are_not_tested() -> None:
    assert paired_t([]) is paired_t([0.1]) is paired_t([0.1, 0.1]) is None
