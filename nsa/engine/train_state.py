"""TrainState: training state besides weights and optimizer, the same on all ranks.

The learning rate is a function of the step, the data order a function of the samples consumed, and
the forward pass uses no random numbers. State that differs by rank (loader position, RNG) is saved
separately, as rank state.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TrainState:
    """Saved in each checkpoint and restored as a unit."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # consumed by all ranks
    samples: int = 0  # consumed by all ranks: the position in the data order
    data: str = ""  # fingerprint of the dataset and its order
    skipped: int = 0  # steps not applied because gradients were not finite
