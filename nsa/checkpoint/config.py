"""When a run saves itself, and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    """Saving and resuming; the last step is always saved."""

    every: int = 5_000  # steps between two checkpoints; 0: only at the end
    keep: int = 0  # newest checkpoints that are kept; 0: all
    keep_hours: float = 0.0  # older ones are removed, the newest never; 0: all are kept
    background: bool = False  # copy the state, train on, and let a thread write it

    def validate(self) -> None:
        """Raise a ValueError that names the first setting that cannot work."""
        for name in ("every", "keep", "keep_hours"):
            if getattr(self, name) < 0:
                raise ValueError(f"checkpoint.{name} = {getattr(self, name)}: must be 0 or more")
