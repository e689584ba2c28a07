"""What a run has written down, read so that torn, corrupt and missing files cost lines only."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

UNCOUNTED = ("eval", "save", "setup")  # phases in which no step is due
_TAIL = 1 << 16  # bytes of a file's end that hold its last lines
TRAINING = ("data", "forward", "backward", "step")

Row = dict[str, float]  # one line of a table; an empty cell, or one that is no number, is not there


@dataclass
class Table:
    """A CSV file of numbers: its rows by rising step, and what was wrong with it."""

    name: str
    rows: list[Row] = field(default_factory=list)
    problem: str = ""  # why there are no rows, or fewer than lines; empty: nothing was wrong


@dataclass
class RankHistory:
    """What the heartbeats of one rank tell of the steps (since, upto] of a run."""

    rank: int
    lines: int = 0
    step: int = 0  # the highest that it has done
    done: list[tuple[int, int]] = field(default_factory=list)  # (from, to] as seen by a process
    processes: int = 0
    pause: float = 0.0  # the longest without a step, within a process
    pause_at: str = ""  # where that was
    memory: list[tuple[int, float]] = field(default_factory=list)  # (step, GB), rising maxima
    losses: list[tuple[int, float]] = field(default_factory=list)  # (step, loss) when it changed
    busy: list[float] = field(default_factory=list)
    skipped: int | None = None
    status: str = ""  # how the last process said that it ended
    first_time: float | None = None
    last_time: float | None = None
    backend: str = ""


def read_table(path: Path, steps: Container[int] | None = None) -> Table:
    """The rows of a CSV file whose first column is `step`; of a row that comes twice, the later.

    Tables with several rows a step have a column `layer` as well. `steps`: the others are skipped.
    """
    table = Table(path.name)
    found: dict[tuple[float, float], Row] = {}
    bad = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            columns = file.readline().strip().split(",")
            if columns[0] != "step":
                table.problem = f"the first line of {path.name} does not begin with 'step'"
                return table
            for line in file:
                if steps is not None:
                    first = line[: line.find(",")]
                    if first.isdecimal() and int(first[:15]) not in steps:
                        continue
                row = _row(columns, line)
                if row is not None:
                    found[row["step"], row.get("layer", 0)] = row
                elif line.endswith("\n"):  # else it is just being written, or a crash tore it
                    bad += 1
    except OSError as error:
        table.problem = f"{path.name} cannot be read: {error.strerror}"
        return table
    table.rows = [found[key] for key in sorted(found)]
    if bad:
        table.problem = f"{path.name}: {bad:,} lines could not be read"
    elif not found:
        table.problem = f"{path.name} holds no rows"
    return table


def read_rank(run_dir: Path, rank: int, since: int = 0, upto: int | None = None) -> RankHistory:
    """What one rank's heartbeats tell of the steps after `since`, up to `upto`."""
    history = RankHistory(rank)
    walk = _Walk(history, since, math.inf if upto is None else upto)
    for name in (f"heartbeat_rank{rank}.1.jsonl", f"heartbeat_rank{rank}.jsonl"):
        for beat in read_jsonl(run_dir / name, skip='"step_start"'):
            walk.see(beat)
    walk.end_process()
    return history


def ranks(run_dir: Path) -> list[int]:
    """The ranks of the run: env.json's world_size, or else those that have left heartbeats.

    A run that went on with fewer ranks still holds the heartbeats of the others.
    """
    size = number(read_json(run_dir / "env.json").get("world_size"))
    if size is not None and 1 <= size < 65_536:
        return list(range(int(size)))
    names = (path.name for path in run_dir.glob("heartbeat_rank*.jsonl"))
    matches = (re.fullmatch(r"heartbeat_rank(\d+)(\.1)?\.jsonl", name) for name in names)
    return sorted({0, *(int(match[1]) for match in matches if match)})


def last_step(path: Path) -> int:
    """The step of a table's last whole row; 0 where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            lines = file.read().decode(errors="replace").split("\n")[:-1]
    except OSError:
        return 0
    found = re.match(r"(\d{1,15}),", lines[-1]) if lines else None
    return int(found[1]) if found else 0


def read_jsonl(path: Path, skip: str | None = None) -> Iterator[dict[str, Any]]:
    """The lines of a file that are JSON objects; a line at a time, so that size costs no memory.

    Lines with the text `skip` in them are left out unread.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if skip is not None and skip in line:
                    continue
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(found, dict):
                    yield found
    except OSError:
        return


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is none that can be read."""
    try:
        found = json.loads(read_text(path) or "")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_text(path: Path) -> str | None:
    """A file's text, whatever its bytes; None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def number(value: object) -> float | None:
    """`value` where it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


class _Walk:
    """Goes through a rank's lines in order, and adds up what its processes did.

    The start of a step says nothing that its end doesn't, and is left out. A line tells its phase
    and for how long the rank has been in it; what lies between that and the line before belongs to
    the phase before.
    """

    def __init__(self, history: RankHistory, since: int, upto: float) -> None:
        self._history, self._since, self._upto = history, since, upto
        self._pid: object = None
        self._first: int | None = None  # steps done before this process's first one
        self._step = 0
        self._mono: float | None = None
        self._phase = ""
        self._waited: float | None = None  # since the last step; None: none was done yet

    def see(self, beat: dict[str, Any]) -> None:
        step, mono = number(beat.get("step")), number(beat.get("mono"))
        if step is None or step < 0 or step > self._upto:
            return
        step, event = int(step), beat.get("event")
        begins = event == "start" or beat.get("pid") != self._pid
        if begins or (self._first is not None and step < self._step):  # stepped back: rolled back
            self.end_process()
            self._pid = beat.get("pid")
            self._history.processes += begins
            self._history.status = ""
        phase = str(beat.get("phase"))
        self._time(mono, number(beat.get("since")) or 0.0, phase)
        if self._first is None and event == "step_end":
            # What it says before is no step of its own: it may still be loading.
            self._first = self._step = step - 1
        if self._first is not None and step > self._step:
            self._stop_waiting(self._step + 1)
            self._step, self._waited = step, 0.0
        self._note(beat, step, phase)

    def end_process(self) -> None:
        """What is waited for when a process ends is a pause too: it may have been killed for it."""
        if self._first is not None:
            self._history.done.append((self._first, self._step))
            if self._step < self._upto:
                self._stop_waiting(self._step + 1)
        self._pid, self._mono, self._waited, self._first = None, None, None, None

    def _time(self, mono: float | None, since: float, phase: str) -> None:
        if mono is None:
            return
        if self._mono is not None and self._waited is not None and mono > self._mono:
            passed = mono - self._mono
            within = min(max(since, 0.0), passed)
            self._waited += within * (phase not in UNCOUNTED)
            self._waited += (passed - within) * (self._phase not in UNCOUNTED)
        self._mono, self._phase = mono, phase

    def _stop_waiting(self, step: int) -> None:
        history = self._history
        if self._waited is not None and self._waited > history.pause and step > self._since:
            history.pause = self._waited
            history.pause_at = f"rank {history.rank}, before step {step:,}"

    def _note(self, beat: dict[str, Any], step: int, phase: str) -> None:
        history = self._history
        history.lines += 1
        history.step = max(history.step, step)
        history.backend = str(beat.get("backend") or history.backend)
        if beat.get("event") == "end":
            history.status = str(beat.get("status") or "")
        time = number(beat.get("time"))
        if time is not None:
            history.first_time = time if history.first_time is None else history.first_time
            history.last_time = time
        skipped = number(beat.get("skipped"))
        if skipped is not None and beat.get("event") == "step_end":  # before, it isn't loaded
            history.skipped = int(skipped)
        memory = number(beat.get("memory_gb"))
        if memory and (not history.memory or memory > history.memory[-1][1]):
            history.memory.append((step, memory))
        loss = beat.get("loss")
        if isinstance(loss, float) and (not history.losses or loss != history.losses[-1][1]):
            history.losses.append((step, loss))
        busy = number(beat.get("gpu_busy"))
        if busy is not None and phase in TRAINING and step >= self._since:
            history.busy.append(busy)


def _row(columns: list[str], line: str) -> Row | None:
    cells = line.split(",")
    if len(cells) != len(columns) or not line.endswith("\n"):
        return None
    row = {}
    for column, cell in zip(columns, cells, strict=True):
        try:
            row[column] = float(cell)
        except ValueError:
            continue
    step = row.get("step")
    return row if step is not None and step >= 0 and step == int(min(step, 1e15)) else None
