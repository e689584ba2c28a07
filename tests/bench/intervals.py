"""Confidence intervals of means, by Student's t distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95


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


def mean_and_range(values: Sequence[float], form: str) -> str:
    """Format measurements: their mean, and their range if they differ."""
    if not values:
        return "–"
    mean, low, high = (
        format(value, form) for value in (statistics.fmean(values), min(values), max(values))
    )
    return mean if low == high else f"{mean} ({low} to {high})"
