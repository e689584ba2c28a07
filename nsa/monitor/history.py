"""History of a run: kept in memory for the gates, read from files for a report.

RankHistory    steps, pauses and memory of one rank, from its heartbeat lines
RunHistory     rows of metrics.csv and selection.csv, on rank 0
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.monitor.artifacts import Row, Table, older_part, read_table, valid_beats
from nsa.monitor.csv_files import METRICS_FILE, SELECTION_FILE
from nsa.monitor.observer import METRICS_COLUMNS, Observer, RunInfo, StepRecord
from nsa.untrusted import open_regular

UNTIMED = ("eval", "save", "setup")  # phases in which no step is due
TRAINING = ("data", "forward", "backward", "step")
SELECTION_ROWS = 500  # newest rows of selection.csv to keep, a few logged steps


@dataclass
class RankHistory:
    """One rank's history between two steps; its size does not grow with the number of steps."""

    rank: int
    from_step: int = 0  # pauses and GPU utilization count from here on
    to_step: float = math.inf  # later lines are ignored
    lines: int = 0
    step: int = 0  # the highest completed step
    spans: list[tuple[int, int]] = field(default_factory=list)  # (from, to] of each process
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
    # Of the current process.
    _pid: object = None
    _first: int | None = None  # steps done before its first one; None: no step has ended
    _done: int = 0  # steps done
    _mono: float | None = None
    _phase: str = ""
    _waited: float | None = None  # seconds since the last step; None: no step has ended

    @property
    def gpu_utilization(self) -> float | None:
        """The mean over samples taken between steps."""
        samples = sum(self.gpu_busy.values())
        total = math.fsum(value * count for value, count in self.gpu_busy.items())
        return total / samples if samples else None

    def add(self, line: dict[str, Any]) -> None:
        """Add the next heartbeat line."""
        step, event, phase = int(line["step"]), line["event"], line["phase"]
        if event == "step_start" or step > self.to_step:  # step_end has the same information
            return
        if event == "start" or line["pid"] != self._pid:
            self.end_process()
            self._pid, self.status = line["pid"], ""
            self.processes += 1
        self._add_time(line["mono"], line["since"], phase)
        if self._first is None and event == "step_end":
            # Not taken from earlier lines: they may be from before the checkpoint was loaded.
            self._first = self._done = step - 1
        if self._first is not None and step > self._done:
            self._end_pause()
            self._done, self._waited = step, 0.0
        self._add_values(line, step, phase)

    def end_process(self) -> None:
        """End a process; a hang before it failed or was killed counts as a pause."""
        failed = not self.status or self.status.startswith("failed")
        if self._first is not None:
            self.spans.append((self._first, self._done))
            if failed and self._done < self.to_step:
                self._end_pause()
        self._pid, self._mono, self._waited, self._first = None, None, None, None

    def _add_time(self, mono: float, since: float, phase: str) -> None:
        """Split the time since the previous line between two phases, and add it to the pause.

        The last `since` seconds were spent in this line's phase, the rest in the previous line's.
        """
        if self._mono is not None and self._waited is not None and mono > self._mono:
            passed = mono - self._mono
            in_phase = min(max(since, 0.0), passed)
            self._waited += in_phase * (phase not in UNTIMED)
            self._waited += (passed - in_phase) * (self._phase not in UNTIMED)
        self._mono, self._phase = mono, phase

    def _end_pause(self) -> None:
        if self._waited is not None and self._waited > self.pause and self._done >= self.from_step:
            self.pause = self._waited
            self.pause_at = f"rank {self.rank}, before step {self._done + 1:,}"

    def _add_values(self, line: dict[str, Any], step: int, phase: str) -> None:
        self.lines += 1
        self.step = max(self.step, step)
        self.backend = str(line.get("backend") or self.backend)
        if line["event"] == "end":
            self.status = str(line.get("status") or "")
        self.first_time = line["time"] if self.first_time is None else self.first_time
        self.last_time = line["time"]
        if line["event"] == "step_end":  # others may be from before the checkpoint was loaded
            self.skipped = int(line["skipped"])
        memory, busy = line.get("memory_gb"), line.get("gpu_busy")
        if memory and (not self.memory or memory > self.memory[-1][1]):
            self.memory.append((step, memory))
        if busy is not None and phase in TRAINING and step >= self.from_step:
            self.gpu_busy[busy] += 1


class HistoryRecorder:
    """Keeps the history of this rank for each gate, including earlier processes of the run.

    `windows` has (step of the previous gate, step of the gate) for each gate. Lines of earlier
    processes are read on creation, before this process writes any. All methods are thread-safe.
    """

    def __init__(self, run_dir: Path, rank: int, windows: Iterable[tuple[int, int]]) -> None:
        self._lock = threading.Lock()
        self._histories = {end: RankHistory(rank, start, end) for start, end in windows}
        for line in _heartbeat_lines(run_dir, rank):
            self.add(line)

    def add(self, line: dict[str, Any]) -> None:
        """Add a heartbeat line of this process."""
        with self._lock:
            for history in self._histories.values():
                history.add(line)

    def up_to(self, step: int) -> RankHistory:
        """Return a copy of the history for the gate at `step`."""
        with self._lock:
            history = copy.deepcopy(self._histories[step])
        history.end_process()
        return history


def read_rank(run_dir: Path, rank: int) -> RankHistory:
    """Build the history of one rank over all steps from its files."""
    history = RankHistory(rank)
    for line in _heartbeat_lines(run_dir, rank):
        history.add(line)
    history.end_process()
    return history


def _heartbeat_lines(run_dir: Path, rank: int) -> Iterator[dict[str, Any]]:
    path = run_dir / f"heartbeat_rank{rank}.jsonl"
    for part in (older_part(path), path):
        with contextlib.suppress(OSError), open_regular(part) as file:
            lines = io.BufferedReader(file)
            yield from valid_beats(line for line in lines if b'"step_start"' not in line)


class RunHistory(Observer):
    """Keeps the rows of metrics.csv and the newest of selection.csv.

    A resumed run reads the rows of earlier processes once, at its start. 50,000 steps logged every
    10 take about 4 MB.
    """

    def __init__(self) -> None:
        self.metrics, self.selection = Table(), Table()

    def on_start(self, info: RunInfo) -> None:
        if info.start_step:
            self.load(info.run_dir, info.start_step)

    def load(self, run_dir: Path, step: int) -> None:
        """Read the rows up to `step` that earlier processes wrote."""
        self.metrics = read_table(run_dir / METRICS_FILE)
        self.selection = read_table(run_dir / SELECTION_FILE)
        for table in (self.metrics, self.selection):
            table.rows = [row for row in table.rows if 1 <= row["step"] <= step]
        del self.selection.rows[:-SELECTION_ROWS]

    def on_step(self, record: StepRecord) -> None:
        self.metrics.rows.append(_numbers({name: vars(record)[name] for name in METRICS_COLUMNS}))
        self.selection.rows += map(_numbers, record.layers)
        del self.selection.rows[:-SELECTION_ROWS]


def _numbers(cells: Mapping[str, float | None]) -> Row:
    return {name: float(value) for name, value in cells.items() if value is not None}
