"""Observers of the training loop: callbacks, the records that they receive, background writers."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

from nsa.constants import BRANCHES
from nsa.text import printable

# Columns of CSV files, which docs/reference/metrics.md defines. teacher.csv compares the model with
# its teacher, by range of positions.
TEACHER_COLUMNS = ("first", "last", "tokens", "loss", "teacher_loss", "kl", "same_top1")
LAYER_STATISTICS = (  # of selection.csv
    *(f"gate_{branch}{suffix}" for suffix in ("", "_std") for branch in BRANCHES),
    "choosing",
    "entropy",
    "overlap",
    "distance",
)
# Further columns of selection.csv with the selector loss, from the queries that it samples.
SELECTOR_STATISTICS = ("selector_loss", "recall", "recall_random")

LayerStatistics = dict[str, float | None]  # None: not measured, or importance selects no block


def _metric(tag: str | None, column: bool = True, line: str = "", **options: Any) -> Any:
    """Declare a metric: its tag in trackers, column of metrics.csv, and text of progress lines."""
    return field(metadata={"tag": tag, "column": column, "line": line}, **options)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Metrics of one logged step, in the order of metrics.csv; None: not measured."""

    step: int = _metric(None)  # optimizer steps done, including this one
    tokens: int = _metric(None)  # of all ranks since the first step of the run
    loss: float = _metric("train/loss", line="loss {:.4f}")
    val_loss: float | None = _metric("eval/loss", line="val {:.4f}", default=None)
    bits_per_byte: float | None = _metric(  # of validation
        "eval/bits_per_byte", line="{:.4f} bits/byte", default=None
    )
    lr: float = _metric("train/lr")
    grad_norm: float | None = _metric("train/grad_norm")
    # All ranks together; None if only the warm-up step was timed.
    tokens_per_s: float | None = _metric("speed/tokens_per_s", line="{:,.0f} tokens/s")
    # 0 to 1; None: peak unknown
    mfu: float | None = _metric("speed/mfu", line="MFU {:.1%}", default=None)
    memory_gb: float = _metric("memory/peak_gb")  # peak so far
    seconds: float = _metric("speed/step_seconds")  # mean since the previous logged step
    skipped_steps: int = _metric("train/skipped_steps", column=False, default=0)  # of the run
    loss_scale: float | None = _metric("train/loss_scale", column=False, default=None)  # of fp16
    layers: Sequence[LayerStatistics] = ()  # of NSA layers, from rank 0's first micro-batch
    versus_teacher: Sequence[Mapping[str, float]] = ()  # of the validation split: TEACHER_COLUMNS


METRICS_COLUMNS = tuple(x.name for x in fields(StepRecord) if x.metadata.get("column"))
LINES = {x.name: line for x in fields(StepRecord) if (line := x.metadata.get("line"))}
TAGS = {x.name: tag for x in fields(StepRecord) if (tag := x.metadata.get("tag"))}


class Observer:
    """Callbacks of the training loop on rank 0; they cannot change what it computes.

    The observer's background writer calls them on its thread, where they may wait for a disk.
    """

    def on_start(self, run_dir: Path, start_step: int) -> None:
        """Called before the first step; a resumed run has done `start_step` steps."""

    def on_step(self, record: StepRecord) -> None:
        """Called after each logged step."""

    def on_message(self, text: str) -> None:
        """Called with a line for the user."""

    def on_end(self, status: str) -> None:
        """Called after the last step."""


def warn(text: str, program: str = "nsa") -> None:
    """Print one line to stderr; ignore an stderr that is full or closed."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{program}: {printable(text)}", file=sys.stderr, flush=True)


class BackgroundWriter:
    """Runs jobs one after the other on a daemon thread.

    Jobs that find the queue full are dropped and counted; jobs that raise are counted: a slow or
    full disk costs log lines, not the run. With a writer per destination, a destination that hangs
    does not block the others.
    """

    def __init__(self, name: str, capacity: int = 1024) -> None:
        self.name = name
        self.dropped = 0  # jobs that found the queue full, or were unfinished at close()
        self.failed = 0  # jobs that raised
        self._closed = False
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._work, name=f"writer {name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], object]) -> bool:
        """Queue `job` and return at once; False if it was dropped."""
        if not self._closed:
            with contextlib.suppress(queue.Full):
                self._jobs.put_nowait(job)
                return True
        self.dropped += 1
        return False

    def flush(self, timeout: float = 10.0) -> bool:
        """Finish the jobs so far; return False if that takes longer than `timeout` seconds."""
        done = threading.Event()
        return self.submit(done.set) and done.wait(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Finish the queue within `timeout` seconds, and warn of what was lost."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=timeout)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            with self._jobs.mutex:
                queued = sum(job is not None for job in self._jobs.queue)
            self.dropped += queued + 1  # the running job
        if self.dropped or self.failed:
            warn(f"{self.name}: {self.dropped} writes dropped and {self.failed} failed in this run")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self.failed += 1
                if self.failed == 1:
                    warn(f"{self.name}: a write failed, the run continues: {error!r}")


class Observers(Observer):
    """Calls each observer on the thread of its writer, which counts and reports failures."""

    def __init__(self, observers: Sequence[tuple[Observer, BackgroundWriter]]) -> None:
        self._observers = observers

    def close(self, timeout: float = 10.0) -> None:
        """Close the writers, all within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for _, writer in self._observers:
            writer.close(max(0.0, deadline - time.monotonic()))

    def _call(self, callback: str, *values: Any) -> None:
        for observer, writer in self._observers:
            writer.submit(partial(getattr(observer, callback), *values))


# Each callback of Observer, passed on to all observers.
for _name in [name for name in vars(Observer) if name.startswith("on_")]:
    setattr(Observers, _name, partialmethod(Observers._call, _name))
