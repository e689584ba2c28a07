"""Checkpoint settings: when to save, which checkpoints to keep."""

from __future__ import annotations

from dataclasses import dataclass

from nsa.validation import at_least


@dataclass
class CheckpointConfig:
    """The `checkpoint` section of a run's settings; the last step is always saved."""

    every: int = 5_000  # steps between two checkpoints; 0: only at the end
    keep: int = 0  # number of newest checkpoints to keep; 0: all
    keep_hours: float = 0.0  # remove checkpoints older than this, never the newest; 0: none
    background: bool = False  # copy to host memory, and write while training continues

    def validate(self) -> None:
        at_least(0, "checkpoint", self, "every", "keep", "keep_hours")
