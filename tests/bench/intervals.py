"""Confidence intervals of means, by Student's t distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# t with P(-t < T < t) = 95%, by degrees of freedom from 1 on; of more, the last is a little wide.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def margin(values: Sequence[float]) -> float:
    """Return m such that mean ± m is the 95% confidence interval of the mean; 0 for one value."""
    if len(values) < 2:
        return 0.0
    degrees = min(len(values) - 1, len(T_95))
    return T_95[degrees - 1] * statistics.stdev(values) / math.sqrt(len(values))


def mean_and_range(values: Sequence[float], form: str) -> str:
    """Format measurements: their mean, and their range if they differ."""
    if not values:
        return "–"
    mean, low, high = (
        format(value, form) for value in (statistics.fmean(values), min(values), max(values))
    )
    return mean if low == high else f"{mean} ({low} to {high})"
