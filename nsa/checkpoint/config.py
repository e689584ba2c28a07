"""When a run saves itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    """Saving and resuming; the last step is always saved."""

    every: int = 5_000  # steps between two checkpoints; 0: only at the end

    def validate(self) -> None:
        """Raise a ValueError that names the first setting that cannot work."""
        if self.every < 0:
            raise ValueError(f"checkpoint.every = {self.every}: must be 0 or more")
