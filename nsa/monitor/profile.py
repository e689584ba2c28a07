"""PyTorch profiler traces of the steps of `--profile-steps`, for Perfetto."""

from __future__ import annotations

import contextlib
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
        due = self._steps is not None and self._steps[0] <= step <= self._steps[1]
        if due and self._profiler is None:
            self._start(step)
        self._last = step

    def step_end(self, step: int) -> None:
        """Step `step` is done."""
        if self._profiler is not None and self._steps is not None and step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write what was traced, also if the run ends before the last step to trace."""
        if self._profiler is None:
            return
        profiler, self._profiler, self._steps = self._profiler, None, None
        path = self._folder / f"rank{self._rank}_steps{self._first}-{self._last}.json.gz"
        draft = path.with_name(f".{path.name}")  # torch compresses files that end with .gz
        try:
            profiler.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(draft))
            draft.replace(path)
        except Exception as error:
            warn(f"the trace {path} was not written, the run continues: {error!r}")
            with contextlib.suppress(OSError):
                draft.unlink()

    def _start(self, step: int) -> None:
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        try:
            # No shapes: collecting them blocks Python, and so the heartbeat, for seconds.
            profiler = torch.profiler.profile(activities=activities)
            profiler.start()
        except Exception as error:
            self._steps = None
            warn(f"--profile-steps: the profiler did not start, the run continues: {error!r}")
            return
        self._profiler, self._first = profiler, step
