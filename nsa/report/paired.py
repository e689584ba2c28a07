"""Paired t test: do runs that differ in one setting differ by more than chance?

Runs are paired by seed. A seed sets initial weights and the order of the data, so its effect on
both runs of a pair cancels in their difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
POWER = 0.8


@dataclass(frozen=True)
class Paired:
    """Differences of pairs, tested against 0."""

    mean: float
    margin: float  # the 95% confidence interval is mean ± margin
    p: float  # two-sided
    detectable: float  # true difference that 80% of experiments this large would find, at p < 0.05


def paired_t(differences: Sequence[float]) -> Paired | None:
    """Test differences of at least two pairs; None for fewer, or if all are equal."""
    count = len(differences)
    if count < 2 or not (error := statistics.stdev(differences) / math.sqrt(count)):
        return None
    mean, interval, degrees = statistics.fmean(differences), margin(differences), count - 1
    detectable = interval + t_quantile(POWER, degrees) * error
    return Paired(mean, interval, 1 - central_probability(abs(mean) / error, degrees), detectable)


def margin(values: Sequence[float]) -> float:
    """Return m such that mean ± m is the 95% confidence interval of the mean; 0 for one value."""
    if len(values) < 2:
        return 0.0
    error = statistics.stdev(values) / math.sqrt(len(values))
    return t_quantile((1 + CONFIDENCE) / 2, len(values) - 1) * error


def central_probability(t: float, degrees: int) -> float:
    """Return P(-t < T < t) of Student's t distribution, exactly (Abramowitz and Stegun 26.7)."""
    angle = math.atan2(t, math.sqrt(degrees))
    odd = degrees % 2
    term = total = math.cos(angle) if odd and degrees > 1 else 1.0 - odd
    for k in range(2 + odd, degrees, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def t_quantile(probability: float, degrees: int) -> float:
    """Return the t with P(T < t) = `probability`, 0.5 or more, of Student's t distribution."""
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        below = (1 + central_probability(middle, degrees)) / 2
        low, high = (middle, high) if below < probability else (low, middle)
    return high
