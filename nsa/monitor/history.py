"""History of a rank, read from its heartbeat files: steps, pauses, memory and GPU utilization."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.monitor.artifacts import MAX_HEARTBEAT_BYTES, older_part, valid_beats
from nsa.untrusted import open_limited

UNTIMED = ("eval", "save", "setup")  # phases in which no step is due
TRAINING = ("data", "forward", "backward", "step")


@dataclass
class RankHistory:
    """What one rank recorded; its size does not grow with the number of steps."""

    rank: int
    problem: str = ""  # why a file could not be read
    lines: int = 0
    step: int = 0  # the highest completed step
    spans: list[tuple[int, int]] = field(default_factory=list)  # (from, to] of each process
    processes: int = 0
    pause: float = 0.0  # seconds: the last process's longest time without a step
    pause_at: str = ""  # rank and step of that pause
    memory: list[tuple[int, float]] = field(default_factory=list)  # (step, GB), rising peaks
    gpu_samples: int = 0
    gpu_busy: float = 0.0  # sum of the samples taken between steps
    skipped: int | None = None
    status: str = ""  # how the last process ended
    backend: str = ""

    @property
    def gpu_utilization(self) -> float | None:
        """The mean over samples taken between steps."""
        return self.gpu_busy / self.gpu_samples if self.gpu_samples else None


def read_rank(run_dir: Path, rank: int) -> RankHistory:
    """Read the history of a rank from its heartbeat files."""
    reader = _Reader(RankHistory(rank))
    path = run_dir / f"heartbeat_rank{rank}.jsonl"
    for part in (older_part(path), path):
        try:
            for line in _lines(part):
                reader.add(line)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            reader.history.problem = f"{part.name} cannot be read: {error}"
    reader.end_process()
    return reader.history


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of a heartbeat file; step_end has the information of step_start too."""
    with open_limited(path, MAX_HEARTBEAT_BYTES) as file:
        lines = io.BufferedReader(file)
        yield from valid_beats(line for line in lines if b'"step_start"' not in line)


class _Reader:
    """Adds heartbeat lines to a history, and keeps what it needs of the current process."""

    def __init__(self, history: RankHistory) -> None:
        self.history = history
        self._pid: object = None
        self._first: int | None = None  # steps done before its first one; None: no step has ended
        self._done = 0  # steps done
        self._mono: float | None = None
        self._phase = ""
        self._waited: float | None = None  # seconds since the last step; None: no step has ended

    def add(self, line: dict[str, Any]) -> None:
        """Add the next line."""
        step, event, phase, history = int(line["step"]), line["event"], line["phase"], self.history
        if event == "start" or line["pid"] != self._pid:
            self.end_process()
            self._pid = line["pid"]
            history.processes += 1
            history.status, history.pause, history.pause_at = "", 0.0, ""
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
        status = self.history.status
        if self._first is not None:
            self.history.spans.append((self._first, self._done))
            if not status or status.startswith("failed"):
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
        history = self.history
        if self._waited is not None and self._waited > history.pause:
            history.pause = self._waited
            history.pause_at = f"rank {history.rank}, before step {self._done + 1:,}"

    def _add_values(self, line: dict[str, Any], step: int, phase: str) -> None:
        history = self.history
        history.lines += 1
        history.step = max(history.step, step)
        history.backend = str(line.get("backend") or history.backend)
        if line["event"] == "end":
            history.status = str(line.get("status") or "")
        if line["event"] == "step_end":  # others may be from before the checkpoint was loaded
            history.skipped = int(line["skipped"])
        memory, busy = line.get("memory_gb"), line.get("gpu_busy")
        if memory and (not history.memory or memory > history.memory[-1][1]):
            history.memory.append((step, memory))
        if busy is not None and phase in TRAINING:
            history.gpu_busy += busy
            history.gpu_samples += 1
