"""The training state: everything that a resumed run needs beside weights and optimizer.

Nothing else is state: learning rate and evaluation are functions of the step, data of the samples
dealt, and the forward pass draws no random numbers. Only text that is streamed has more to
remember, on each rank, and is asked for it when a checkpoint is saved.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class TrainState:
    """Saved with each checkpoint and restored as a unit."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # seen by all ranks
    samples: int = 0  # dealt to all ranks: where the order of the data stands
    data: str = ""  # fingerprint of that data and its order
    skipped: int = 0  # steps whose gradients overflowed and were not applied

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        return cls(**values)
