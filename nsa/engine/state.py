"""The training state: everything that a resumed run needs beside weights and optimizer.

Nothing else is state: data, learning rate and evaluation are functions of the step, and the
forward pass draws no random numbers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class TrainState:
    """Saved with each checkpoint and restored as a unit."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # seen by all ranks
    skipped: int = 0  # steps whose gradients overflowed and were not applied

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        return cls(**values)
