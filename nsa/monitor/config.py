"""What is written down about a run, and how often."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class MonitorConfig:
    """Observers of a run; none of them can change what it computes."""

    log_every: int = 10  # steps between two logged steps; the others cost nothing
    tensorboard: bool = True  # event files under <run>/tensorboard
    csv: bool = True  # <run>/metrics.csv
    progress: bool = True  # a bar on a terminal, plain lines elsewhere

    def validate(self) -> None:
        """Raise a ValueError that names the first setting that cannot work."""
        if self.log_every < 1:
            raise ValueError(f"monitor.log_every = {self.log_every}: must be 1 or more")
