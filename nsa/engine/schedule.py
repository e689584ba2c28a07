"""Learning-rate schedule: linear warm-up, then cosine; a function of the step, without state."""

from __future__ import annotations

import math

from nsa.engine.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the rate of step `step`, counted from 0; it is never exactly 0."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return train.min_learning_rate + (train.learning_rate - train.min_learning_rate) * cosine
