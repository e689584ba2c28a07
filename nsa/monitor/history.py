"""History of one rank: steps, pauses, memory and losses, built from its heartbeat lines.

While a run trains, each rank keeps its history in memory, one for each gate (`HistoryRecorder`).
A report of a finished run builds the same history from files (`read_rank`).
"""

from __future__ import annotations

import copy
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.monitor.artifacts import number, read_jsonl

UNTIMED = ("eval", "save", "setup")  # phases in which no step is due
MAX_LOSSES = 1_000
TRAINING = ("data", "forward", "backward", "step")


@dataclass
class RankHistory:
    """One rank's steps (since, upto]. Its size does not grow with the number of steps."""

    rank: int
    lines: int = 0
    step: int = 0  # the highest completed
    done: list[tuple[int, int]] = field(default_factory=list)  # (from, to], one per process
    processes: int = 0
    pause: float = 0.0  # seconds: the longest time without a step, within a process
    pause_at: str = ""
    memory: list[tuple[int, float]] = field(default_factory=list)  # (step, GB), rising peaks
    snapshot_gb: float = 0.0  # the highest peak among the memory snapshots
    losses: list[tuple[int, float]] = field(default_factory=list)  # (step, loss) when it changed
    gpu_busy: Counter[float] = field(default_factory=Counter)  # how often each value was sampled
    skipped: int | None = None
    status: str = ""  # how the last process ended
    first_time: float | None = None
    last_time: float | None = None
    backend: str = ""

    @property
    def gpu_utilization(self) -> float | None:
        """The mean over samples taken between steps."""
        samples = sum(self.gpu_busy.values())
        total = math.fsum(value * count for value, count in self.gpu_busy.items())
        return total / samples if samples else None


class HistoryRecorder:
    """Keeps the history of this rank for each gate, from the files of earlier processes onwards.

    `windows` are pairs (step of the gate before, step of the gate). Reads files only once, here:
    no process writes them yet. All methods may be called from any thread.
    """

    def __init__(self, run_dir: Path, rank: int, windows: Iterable[tuple[int, int]]) -> None:
        self._lock = threading.Lock()
        self._builders = {upto: _Builder(rank, since, upto) for since, upto in windows}
        for line in _heartbeat_lines(run_dir, rank):
            self.add(line)
        for line in read_jsonl(run_dir / "memory" / f"rank{rank}.jsonl"):
            self.add_snapshot(line)

    def add(self, line: dict[str, Any]) -> None:
        """Take in a heartbeat line of this process."""
        with self._lock:
            for builder in self._builders.values():
                builder.add(line)

    def add_snapshot(self, line: dict[str, Any]) -> None:
        """Take in a memory snapshot."""
        step, peak = number(line.get("step")), number(line.get("peak_gb"))
        with self._lock:
            for upto, builder in self._builders.items():
                if step is not None and peak is not None and step <= upto:
                    builder.history.snapshot_gb = max(builder.history.snapshot_gb, peak)

    def history(self, step: int) -> RankHistory:
        """Return a copy of the history for the gate at `step`."""
        with self._lock:
            builder = copy.deepcopy(self._builders[step])
        return builder.finish()


def read_rank(run_dir: Path, rank: int) -> RankHistory:
    """Build the history of one rank over all steps from its files."""
    builder = _Builder(rank, 0, math.inf)
    for line in _heartbeat_lines(run_dir, rank):
        builder.add(line)
    return builder.finish()


def _heartbeat_lines(run_dir: Path, rank: int) -> Iterator[dict[str, Any]]:
    for name in (f"heartbeat_rank{rank}.1.jsonl", f"heartbeat_rank{rank}.jsonl"):
        yield from read_jsonl(run_dir / name, skip='"step_start"')


class _Builder:
    """Adds up a rank's lines, given in the order in which they were written.

    A line holds the rank's phase and for how long it has been in it: the time between that moment
    and the line before belongs to the phase of the line before.
    """

    def __init__(self, rank: int, since: int, upto: float) -> None:
        self.history = RankHistory(rank)
        self._since, self._upto = since, upto
        self._pid: object = None
        self._first: int | None = None  # steps done before this process's first one
        self._step = 0
        self._mono: float | None = None
        self._phase = ""
        self._waited: float | None = None  # since the last step; None: no step yet

    def add(self, line: dict[str, Any]) -> None:
        step, mono, event = number(line.get("step")), number(line.get("mono")), line.get("event")
        if event == "step_start":  # its step_end says the same
            return
        if step is None or not 0 <= step <= self._upto:
            return
        step = int(step)
        starts = event == "start" or line.get("pid") != self._pid
        if starts or (self._first is not None and step < self._step):  # or rolled back
            self._end_process()
            self._pid = line.get("pid")
            self.history.processes += starts
            self.history.status = ""
        phase = str(line.get("phase"))
        if mono is not None:
            self._add_time(mono, number(line.get("since")) or 0.0, phase)
        if self._first is None and event == "step_end":
            # Lines before the first step_end prove no step: the checkpoint may still be loading.
            self._first = self._step = step - 1
        if self._first is not None and step > self._step:
            self._end_pause(self._step + 1)
            self._step, self._waited = step, 0.0
        self._add_values(line, step, phase)

    def finish(self) -> RankHistory:
        self._end_process()
        return self.history

    def _end_process(self) -> None:
        """The time since the last step is a pause too: the process may have been killed for it."""
        if self._first is not None:
            self.history.done.append((self._first, self._step))
            if self._step < self._upto:
                self._end_pause(self._step + 1)
        self._pid, self._mono, self._waited, self._first = None, None, None, None

    def _add_time(self, mono: float, since: float, phase: str) -> None:
        if self._mono is not None and self._waited is not None and mono > self._mono:
            passed = mono - self._mono
            in_phase = min(max(since, 0.0), passed)
            self._waited += in_phase * (phase not in UNTIMED)
            self._waited += (passed - in_phase) * (self._phase not in UNTIMED)
        self._mono, self._phase = mono, phase

    def _end_pause(self, step: int) -> None:
        history = self.history
        if self._waited is not None and self._waited > history.pause and step > self._since:
            history.pause = self._waited
            history.pause_at = f"rank {history.rank}, before step {step:,}"

    def _add_values(self, line: dict[str, Any], step: int, phase: str) -> None:
        history = self.history
        history.lines += 1
        history.step = max(history.step, step)
        history.backend = str(line.get("backend") or history.backend)
        if line.get("event") == "end":
            history.status = str(line.get("status") or "")
        time = number(line.get("time"))
        if time is not None:
            history.first_time = time if history.first_time is None else history.first_time
            history.last_time = time
        skipped = number(line.get("skipped"))
        if skipped is not None and line.get("event") == "step_end":  # not yet loaded before
            history.skipped = int(skipped)
        memory = number(line.get("memory_gb"))
        if memory and (not history.memory or memory > history.memory[-1][1]):
            history.memory.append((step, memory))
        loss = line.get("loss")
        if isinstance(loss, float) and (not history.losses or loss != history.losses[-1][1]):
            history.losses.append((step, loss))
            if len(history.losses) > MAX_LOSSES:  # gates compare the first few with the last few
                del history.losses[MAX_LOSSES // 4 : -MAX_LOSSES // 4]
        busy = number(line.get("gpu_busy"))
        if busy is not None and phase in TRAINING and step >= self._since:
            history.gpu_busy[busy] += 1
