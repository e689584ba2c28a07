"""Throughput and MFU; profiler traces of the steps given by `--profile-steps`, for Perfetto."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nsa.monitor.observer import warn


class Throughput:
    """Measures speed between logged steps. The clock starts when it is created.

    The first step compiles, allocates and fills caches, so it never counts in tokens/s and MFU.
    """

    def __init__(
        self,
        *,
        flops_per_token: float,
        peak: float | None,
        world_size: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.flops_per_token = flops_per_token  # of the next steps: the loop changes it by phase
        self._peak = peak
        self._world_size = world_size
        self._clock = clock
        self._first_seconds: float | None = None  # of the first step
        self._steps = 0  # since the previous reading
        self._tokens = 0
        self._flops = 0.0
        self._start = self._now()

    def step(self, tokens: int) -> None:
        """Count a step of `tokens` over all ranks; only the first call waits for the device."""
        if self._first_seconds is None:
            now = self._now()
            self._first_seconds, self._start = now - self._start, now
            return
        self._steps += 1
        self._tokens += tokens
        self._flops += tokens * self.flops_per_token

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the body (evaluation, checkpoints) from the next reading."""
        began = self._now()
        try:
            yield
        finally:
            self._start += self._now() - began

    def read(self) -> dict[str, Any]:
        """Return tokens_per_s, mfu and seconds of a StepRecord, since the previous reading.

        Waits for the device. After the first step alone, rates are None and `seconds` is its time.
        """
        assert self._first_seconds is not None, "read() before the first step()"
        now = self._now()
        if self._steps == 0:
            return {"tokens_per_s": None, "mfu": None, "seconds": self._first_seconds}
        elapsed = now - self._start
        rate = self._tokens / elapsed
        mfu = None
        if self._peak is not None:
            mfu = self._flops / elapsed / self._world_size / self._peak
        speed = {"tokens_per_s": rate, "mfu": mfu, "seconds": elapsed / self._steps}
        self._start, self._steps, self._tokens, self._flops = now, 0, 0, 0.0
        return speed

    def _now(self) -> float:
        """Return the time after the device has finished its queued work."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return self._clock()


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
        self._steps = range(0) if steps is None else range(steps[0], steps[1] + 1)  # to trace
        self._profiler: torch.profiler.profile | None = None
        self._first = self._last = 0

    def step_start(self, step: int) -> None:
        """Begin the trace if `step`, counted from 1, is to be traced; call before each step."""
        self._last = step
        if self._profiler is not None or step not in self._steps:
            return
        self._first = step
        try:
            # No shapes: collecting them blocks Python, and so the heartbeat, for seconds.
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        except Exception as error:
            self._profiler, self._steps = None, range(0)
            warn(f"--profile-steps: the profiler did not start, the run continues: {error!r}")

    def step_end(self, step: int) -> None:
        """Write the trace after its last step; call after each step."""
        if self._steps and step >= self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Write what was traced, also if the run ends before the last step to trace."""
        profiler, self._profiler, self._steps = self._profiler, None, range(0)
        if profiler is None:
            return
        path = self._folder / f"rank{self._rank}_steps{self._first}-{self._last}.json.gz"
        try:
            profiler.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))  # compressed, because of .gz
        except Exception as error:
            warn(f"the trace {path} was not written, the run continues: {error!r}")
