"""Readers of a run's files, which tolerate torn lines, corrupt bytes and missing files."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa import untrusted
from nsa.untrusted import parse_json

PHASES = ("setup", "data", "forward", "backward", "step", "eval", "save", "idle")  # of heartbeats
EVENTS = ("start", "step_start", "progress", "step_end", "end")

_NUMBERS = ("time", "mono", "rank", "pid", "since", "step", "micro_step", "tokens", "skipped")
_MAY_BE_NULL = ("loss", "memory_gb", "gpu_busy")
_MAX_PID = 2**31 - 1
_TAIL = 64 * 1024  # bytes at a heartbeat file's end that hold its last complete line
MAX_HEARTBEAT_BYTES = 2**26  # the writer starts a new file at a quarter of this
MAX_FILE_BYTES = 2**25  # of a table or a JSON file; those of a long run have half as much

Row = dict[str, float]  # by column; cells that are empty or hold no number are left out


@dataclass
class Table:
    """Numbers from a CSV file: rows sorted by step, and why rows are missing."""

    rows: list[Row] = field(default_factory=list)
    problem: str = ""


PARTS = "layer", "first"  # columns that tell the rows of a step apart


def read_table(path: Path, newest: int | None = None) -> Table:
    """Read a CSV file whose first column is `step`; `newest` reads only that many bytes at its end.

    A later row replaces an earlier one of the same step (and of PARTS, if there is such a column).
    """
    table = Table()
    try:
        if newest is None:
            text = untrusted.read_text(path, "replace", MAX_FILE_BYTES)
        else:
            text = _read_end(path, newest)
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


def _read_end(path: Path, newest: int) -> str:
    """Return the header and the rows in the last `newest` bytes, without a part of a row."""
    with untrusted.open_regular(path) as file:
        header = file.readline(_TAIL)
        start = max(len(header), file.seek(0, os.SEEK_END) - newest)
        file.seek(start)
        rows = file.read(newest)
    if start > len(header):
        rows = rows.partition(b"\n")[2]
    return (header + rows).decode("utf-8", "replace")


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
    step = row.get("step")
    return row if step is not None and step >= 0 and step == int(min(step, 1e15)) else None


def list_ranks(run_dir: Path) -> list[int]:
    """Return the ranks of a run, from env.json's world_size or else from its heartbeat files.

    env.json comes first: a run resumed on fewer ranks leaves the others' heartbeats behind.
    """
    size = finite_number(read_json(run_dir / "env.json").get("world_size"))
    if size is not None and 1 <= size < 65_536:
        return list(range(int(size)))
    names = (path.name for path in run_dir.glob("heartbeat_rank*.jsonl"))
    matches = (re.fullmatch(r"heartbeat_rank(\d+)(\.1)?\.jsonl", name) for name in names)
    return sorted({0, *(int(match[1]) for match in matches if match)})


def last_beat(path: Path) -> dict[str, Any] | None:
    """Return the newest valid line of a heartbeat file; reads only its end."""
    for part in (path, older_part(path)):
        # Opening a FIFO would wait for its writer.
        if not part.is_file():
            continue
        with contextlib.suppress(OSError), part.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            for line in valid_beats(reversed(file.read().splitlines())):
                return line
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
            and 0 < beat["pid"] <= _MAX_PID
            and all(isinstance(beat.get(name), str | None) for name in ("host", "status"))
            and all(beat.get(n) is None or finite_number(beat[n]) is not None for n in _MAY_BE_NULL)
        ):
            yield beat


def older_part(path: Path) -> Path:
    """Return the file to which a full heartbeat file is moved."""
    return path.with_name(f"{path.stem}.1.jsonl")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    try:
        value = parse_json(try_read_text(path) or "")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def try_read_text(path: Path) -> str | None:
    """Return a file's text, with invalid bytes replaced; None if it cannot be read."""
    try:
        return untrusted.read_text(path, "replace", MAX_FILE_BYTES)
    except (OSError, ValueError):
        return None


def too_large(run_dir: Path) -> list[str]:
    """Return a line for each table and JSON file of a run that is too large to be read."""
    files = [path for path in sorted(run_dir.iterdir()) if path.suffix in (".csv", ".json")]
    return [
        f"{path.name}: has more than {MAX_FILE_BYTES:,} bytes"
        for path in files
        if path.is_file() and path.stat().st_size > MAX_FILE_BYTES
    ]


def finite_number(value: object) -> float | None:
    """Return `value` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
