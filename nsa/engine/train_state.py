"""The training state: everything that a resumed run needs beside weights and optimizer.

Nothing else is state: learning rate and evaluation are functions of the step, data of the samples
consumed, and the forward pass draws no random numbers. What a rank alone remembers, its place in a
stream and the losses that it judges new ones by, it is asked for when a checkpoint is saved.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class TrainState:
    """Saved with each checkpoint and restored as a unit."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # seen by all ranks
    samples: int = 0  # consumed to all ranks: where the order of the data stands
    data: str = ""  # fingerprint of that data and its order
    skipped: int = 0  # steps whose gradients were not finite and were not applied
    passed_over: list[int] = field(default_factory=list)  # `samples` at which a bad step began

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        return cls(**values)
