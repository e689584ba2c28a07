"""Readers of a run's files, which tolerate torn lines, corrupt bytes and missing files.

CSV tables, JSON files, heartbeats, and a rank's history from its heartbeats.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.untrusted import MAX_RUN_FILE_BYTES, open_regular, parse_json, read_text, text_or_empty

TRAINING = ("data", "forward", "backward", "step")  # phases of a step
PHASES = ("setup", *TRAINING, "eval", "save", "idle")  # of heartbeats
EVENTS = ("start", "step_start", "progress", "step_end", "end")
PARTS = "layer", "first"  # columns of a CSV file that tell the rows of a step apart

_NUMBERS = ("time", "mono", "rank", "pid", "since", "step", "micro_step", "tokens", "skipped")
_MAY_BE_NULL = ("loss", "memory_gb", "gpu_busy")
_TAIL = 64 * 1024  # bytes at a heartbeat file's end that hold its last complete line
MAX_HEARTBEAT_BYTES = 2**30  # a million steps take less

Row = dict[str, float]  # by column; cells that are empty or hold no number are left out


@dataclass
class Table:
    """Numbers from a CSV file: rows sorted by step, and why rows are missing."""

    rows: list[Row] = field(default_factory=list)
    problem: str = ""


def read_table(path: Path) -> Table:
    """Read a CSV file whose first column is `step`.

    A later row replaces an earlier one of the same step (and part, if there is a column of PARTS).
    """
    table = Table()
    try:
        text = read_text(path, "replace", MAX_RUN_FILE_BYTES)
    except (OSError, ValueError) as error:
        table.problem = f"{path.name} cannot be read: {getattr(error, 'strerror', error)}"
        return table
    header, *lines = text.split("\n")
    columns = header.strip().split(",")
    if columns[0] != "step":
        table.problem = f"{path.name}: the first column is not 'step'"
        return table
    parsed = [_row(columns, line) for line in lines[:-1]]  # the last is being written or was torn
    part = next((name for name in PARTS if name in columns), "")
    rows = {(row["step"], row.get(part, 0)): row for row in parsed if row is not None}
    table.rows = [rows[key] for key in sorted(rows)]
    if unreadable := parsed.count(None):
        table.problem = f"{path.name}: {unreadable:,} lines could not be read"
    elif not rows:
        table.problem = f"{path.name} holds no rows"
    return table


def _row(columns: list[str], line: str) -> Row | None:
    cells = line.split(",")
    if len(cells) != len(columns):
        return None
    row = {}
    for column, cell in zip(columns, cells, strict=True):
        try:
            row[column] = float(cell)
        except ValueError:
            continue
    step = row.get("step", math.nan)
    return row if 0 <= step <= 1e15 and step.is_integer() else None


def list_ranks(run_dir: Path) -> list[int]:
    """Return the ranks of a run, from env.json's world_size or else from its heartbeat files.

    env.json comes first: a run resumed on fewer ranks leaves the others' heartbeats behind.
    """
    size = finite_number(read_json(run_dir / "env.json").get("world_size"))
    if size is not None and 1 <= size < 65_536:
        return list(range(int(size)))
    names = (path.name for path in run_dir.glob("heartbeat_rank*.jsonl"))
    matches = (re.fullmatch(r"heartbeat_rank(\d+)\.jsonl", name) for name in names)
    return sorted({0, *(int(match[1]) for match in matches if match)})


def last_beat(path: Path) -> dict[str, Any] | None:
    """Return the newest valid line of a heartbeat file; reads only its end."""
    if path.is_file():  # opening a FIFO would wait for its writer
        with contextlib.suppress(OSError), path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            return next(valid_beats(reversed(file.read().splitlines())), None)
    return None


def valid_beats(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the heartbeats among `lines`; skip torn and corrupt lines."""
    for line in lines:
        try:
            beat = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(beat, dict)
            and beat.get("event") in EVENTS
            and beat.get("phase") in PHASES
            and all(finite_number(beat.get(name)) is not None for name in _NUMBERS)
            and 0 < beat["pid"] < 2**31
            and all(isinstance(beat.get(name), str | None) for name in ("host", "status"))
            and all(beat.get(n) is None or finite_number(beat[n]) is not None for n in _MAY_BE_NULL)
        ):
            yield beat


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    try:
        value = parse_json(text_or_empty(path))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def finite_number(value: object) -> float | None:
    """Return `value` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


@dataclass
class RankHistory:
    """What one rank recorded; its size does not grow with the number of steps."""

    rank: int
    problem: str = ""  # why its file could not be read
    step: int = 0  # the highest completed step
    spans: list[tuple[int, int]] = field(default_factory=list)  # steps (from, to] by process
    processes: int = 0
    pause: float = 0.0  # seconds: the last process's longest time in one phase of a step
    pause_at: str = ""  # rank, phase and step of that pause
    memory: list[tuple[int, float]] = field(default_factory=list)  # (step, GB), rising peaks
    gpu_samples: int = 0
    gpu_busy: float = 0.0  # sum of the samples taken in steps
    skipped: int | None = None
    status: str = ""  # how the last process ended
    backend: str = ""

    @property
    def gpu_utilization(self) -> float | None:
        """The mean over samples taken in steps."""
        return self.gpu_busy / self.gpu_samples if self.gpu_samples else None

    def add(self, beat: dict[str, Any], first_step: bool) -> None:
        """Add a heartbeat; `first_step`: its process has not completed a step yet."""
        step, event, phase = int(beat["step"]), beat["event"], beat["phase"]
        if event == "step_end":
            if first_step:
                self.spans.append((step - 1, step))
            else:
                self.spans[-1] = (self.spans[-1][0], step)
            self.skipped = int(beat["skipped"])
        self.step = max(self.step, step)
        self.backend = str(beat.get("backend") or self.backend)
        if event == "end":
            self.status = str(beat.get("status") or "")
        memory, busy = beat.get("memory_gb"), beat.get("gpu_busy")
        if memory and (not self.memory or memory > self.memory[-1][1]):
            self.memory.append((step, memory))
        if phase in TRAINING:
            if busy is not None:
                self.gpu_busy += busy
                self.gpu_samples += 1
            if beat["since"] > self.pause and not first_step:  # the first step compiles
                self.pause = beat["since"]
                self.pause_at = f"rank {self.rank}, in {phase} after step {step:,}"


def read_rank(run_dir: Path, rank: int) -> RankHistory:
    """Read the history of a rank from its heartbeat file."""
    history, pid, first_step = RankHistory(rank), -1, True
    path = run_dir / f"heartbeat_rank{rank}.jsonl"
    try:
        with open_regular(path, MAX_HEARTBEAT_BYTES) as file:
            # A step_end line repeats what its step_start line says.
            lines = (line for line in io.BufferedReader(file) if b'"step_start"' not in line)
            for beat in valid_beats(lines):
                if beat["event"] == "start" or beat["pid"] != pid:
                    pid, first_step = beat["pid"], True
                    history.processes += 1
                    history.status, history.pause, history.pause_at = "", 0.0, ""
                history.add(beat, first_step)
                first_step = first_step and beat["event"] != "step_end"
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        history.problem = f"{path.name} cannot be read: {error}"
    return history
