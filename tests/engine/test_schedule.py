"""Learning-rate schedule: linear warmup, cosine, never 0."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from nsa.engine.config import TrainConfig, learning_rate

TRAIN = TrainConfig(steps=1_000, warmup_steps=100, learning_rate=1.0, min_learning_rate=0.1)


def test_warmup_is_linear_and_starts_above_0() -> None:
    rates = [learning_rate(step, TRAIN) for step in range(100)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[99] == pytest.approx(1.0)
    assert all(b - a == pytest.approx(0.01) for a, b in pairwise(rates))


def test_the_cosine_falls_from_the_peak_to_the_minimum() -> None:
    rates = [learning_rate(step, TRAIN) for step in range(99, 1_000)]
    assert all(b <= a for a, b in pairwise(rates))
    assert learning_rate(550, TRAIN) == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[-1] == pytest.approx(0.1, abs=1e-4)


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("steps", [1, 2, 7, 8])
def test_no_step_has_a_rate_of_0(warmup: int, steps: int) -> None:
    train = TrainConfig(steps=steps, warmup_steps=warmup, min_learning_rate=0.0)
    rates = [learning_rate(step, train) for step in range(steps)]
    assert min(rates) > 0
    assert all(math.isfinite(rate) for rate in rates)
