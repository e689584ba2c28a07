"""Progress lines on the console: loss, tokens/s and the remaining time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from nsa.monitor.observer import LINES, Observer, RunInfo, StepRecord
from nsa.untrusted import printable

_LINES_PER_RUN = 20  # in a fast run; a slow one prints a line every `min_seconds`


class Progress(Observer):
    """Prints a line for some logged steps, for each validation, checkpoint and message."""

    def __init__(
        self,
        stream: TextIO | None = None,
        min_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stdout
        self._min_seconds = min_seconds
        self._clock = clock
        self._total = 0
        self._first: tuple[int, float] | None = None  # step and time from which the ETA is measured
        self._last_step = 0
        self._last_time = 0.0
        self._unprinted: StepRecord | None = None

    def on_start(self, info: RunInfo) -> None:
        self._total = info.total_steps
        steps = f"steps {info.start_step + 1} to {info.total_steps}"
        if info.start_step >= info.total_steps:
            steps = "no step to take"
        count = info.parameters
        parameters = f"{count / 1e6:.1f}M" if count >= 100_000 else f"{count:,}"
        self._print(
            f"{info.name} ({info.profile}): {parameters} parameters, {steps} on {info.world_size} "
            f"rank{'s' if info.world_size > 1 else ''}, in {info.run_dir}"
        )
        for note in info.notes:
            self._print(note)

    def on_step(self, record: StepRecord) -> None:
        now = self._clock()
        due = (
            record.val_loss is not None
            or self._first is None
            or record.step >= self._total
            or now - self._last_time >= self._min_seconds
            or (record.step - self._last_step) * _LINES_PER_RUN >= self._total
        )
        self._unprinted = record
        if due:
            self._print_step(record, now)

    def on_checkpoint(self, step: int, path: Path, seconds: float) -> None:
        self._print(f"step {step}: saved {path}, training paused for {seconds:.1f} s")

    def on_message(self, text: str) -> None:
        self._print(text)

    def on_end(self, status: str) -> None:
        if self._unprinted is not None:
            self._print_step(self._unprinted, self._clock())
        self._print(status)

    def _print_step(self, record: StepRecord, now: float) -> None:
        self._first = self._first or (record.step, now)
        first_step, first_time = self._first
        done = record.step - first_step
        seconds = (now - first_time) / done if done else record.seconds
        eta = tqdm.format_interval(max(0.0, (self._total - record.step) * seconds))
        self._last_step, self._last_time, self._unprinted = record.step, now, None
        values = {name: getattr(record, name) for name in LINES}
        measured = (LINES[name].format(x) for name, x in values.items() if x is not None)
        self._print("  ".join([f"step {record.step}/{self._total}", *measured, f"ETA {eta}"]))

    def _print(self, text: str) -> None:
        print(printable(text, keep="\n"), file=self._stream, flush=True)
