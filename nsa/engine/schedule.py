"""The learning rate as a function of the step alone, so that a resumed run needs no state."""

from __future__ import annotations

import math

from nsa.engine.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """The rate of step `step` (from 0): linear warm-up, then a cosine; never exactly 0."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    height = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return train.min_learning_rate + (train.learning_rate - train.min_learning_rate) * height
