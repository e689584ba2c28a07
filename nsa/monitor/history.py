"""History of one rank: steps, pauses and memory, built from its heartbeat lines.

During training each rank keeps a history per gate in memory (`HistoryRecorder`). A report builds
the same history from files (`read_rank`).
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.monitor.artifacts import older_part, valid_beats

UNTIMED = ("eval", "save", "setup")  # phases in which no step is due
TRAINING = ("data", "forward", "backward", "step")


@dataclass
class RankHistory:
    """One rank's history up to a step; its size does not grow with the number of steps."""

    rank: int
    lines: int = 0
    step: int = 0  # the highest completed step
    done: list[tuple[int, int]] = field(default_factory=list)  # (from, to], one per process
    processes: int = 0
    pause: float = 0.0  # seconds: the longest time without a step, within a process
    pause_at: str = ""  # rank and step of that pause
    memory: list[tuple[int, float]] = field(default_factory=list)  # (step, GB), rising peaks
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
    """Keeps the history of this rank for each gate, including earlier processes of the run.

    `windows` are pairs (step of the previous gate, step of the gate). Their heartbeat files are
    read here, before this process writes any. All methods are thread-safe.
    """

    def __init__(self, run_dir: Path, rank: int, windows: Iterable[tuple[int, int]]) -> None:
        self._lock = threading.Lock()
        self._builders = {upto: _Builder(rank, since, upto) for since, upto in windows}
        for line in _heartbeat_lines(run_dir, rank):
            self.add(line)

    def add(self, line: dict[str, Any]) -> None:
        """Add a heartbeat line of this process."""
        with self._lock:
            for builder in self._builders.values():
                builder.add(line)

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
    path = run_dir / f"heartbeat_rank{rank}.jsonl"
    for part in (older_part(path), path):
        with contextlib.suppress(OSError), part.open("rb") as file:
            yield from valid_beats(line for line in file if b'"step_start"' not in line)


class _Builder:
    """Builds a history from a rank's heartbeat lines, oldest first.

    `since` of a line is the time spent in its phase; the rest of the time since the previous line
    was spent in the previous line's phase.
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
        step, event, phase = int(line["step"]), line["event"], line["phase"]
        if event == "step_start":  # the step's step_end has the same information
            return
        if step > self._upto:
            return
        new_process = event == "start" or line["pid"] != self._pid
        if new_process or (self._first is not None and step < self._step):  # or rolled back
            self._end_process()
            self._pid = line["pid"]
            self.history.processes += new_process
            self.history.status = ""
        self._add_time(line["mono"], line["since"], phase)
        if self._first is None and event == "step_end":
            # Earlier lines count no step: the checkpoint may still be loading.
            self._first = self._step = step - 1
        if self._first is not None and step > self._step:
            self._end_pause(self._step + 1)
            self._step, self._waited = step, 0.0
        self._add_values(line, step, phase)

    def finish(self) -> RankHistory:
        self._end_process()
        return self.history

    def _end_process(self) -> None:
        """End a process; a hang before its end counts as a pause."""
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
        if line["event"] == "end":
            history.status = str(line.get("status") or "")
        history.first_time = line["time"] if history.first_time is None else history.first_time
        history.last_time = line["time"]
        if line["event"] == "step_end":  # before, a checkpoint may still be loading
            history.skipped = int(line["skipped"])
        memory = line.get("memory_gb")
        if memory and (not history.memory or memory > history.memory[-1][1]):
            history.memory.append((step, memory))
        busy = line.get("gpu_busy")
        if busy is not None and phase in TRAINING and step >= self._since:
            history.gpu_busy[busy] += 1
