"""PyTorch profiler traces of the steps given by `--profile-steps`, for Perfetto."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from nsa.monitor.observer import warn

if TYPE_CHECKING:
    import torch


def parse_steps(text: str) -> tuple[int, int]:
    """Parse "10-12" or "10" into the first and the last step."""
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"--profile-steps {text!r}: not a range of steps; give the first and last, counted "
            "from 1: 10-12"
        )
    return first, last


class StepProfiler:
    """Traces `steps` into `<folder>/profile/`; None traces nothing.

    The training thread writes the trace after the last step, which delays the run.
    """

    def __init__(self, folder: Path, rank: int, steps: tuple[int, int] | None) -> None:
        self._folder = folder / "profile"
        self._rank = rank
        self._steps = steps
        self._profiler: torch.profiler.profile | None = None
        self._first = self._last = 0

    def step_start(self, step: int) -> None:
        """Step `step`, counted from 1, is about to run."""
        self._last = step
        if self._steps is None or self._profiler or not self._steps[0] <= step <= self._steps[1]:
            return
        import torch

        self._first = step
        try:
            # No shapes: collecting them blocks Python, and so the heartbeat, for seconds.
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        except Exception as error:
            self._profiler = self._steps = None
            warn(f"--profile-steps: the profiler did not start, the run continues: {error!r}")

    def step_end(self, step: int) -> None:
        """Step `step` is done."""
        if self._steps is not None and step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write what was traced, also if the run ends before the last step to trace."""
        profiler, self._profiler, self._steps = self._profiler, None, None
        if profiler is None:
            return
        path = self._folder / f"rank{self._rank}_steps{self._first}-{self._last}.json.gz"
        try:
            profiler.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))  # compressed, because of .gz
        except Exception as error:
            warn(f"the trace {path} was not written, the run continues: {error!r}")
