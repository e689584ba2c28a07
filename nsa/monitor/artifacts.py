"""Readers of a run's files: torn lines, corrupt bytes and missing files never crash them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, float]  # one line of a table, without the cells that are empty or not numbers


@dataclass
class Table:
    """Numbers read from a CSV file: rows by rising step, and why some are missing."""

    name: str
    rows: list[Row] = field(default_factory=list)
    problem: str = ""


def read_table(path: Path, steps: Container[int] | None = None) -> Table:
    """Read a CSV file whose first column is `step`, only `steps` if given.

    Of two rows with the same step (and layer, if there is such a column) the later one counts.
    """
    table = Table(path.name)
    rows: dict[tuple[float, float], Row] = {}
    unreadable = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            columns = file.readline().strip().split(",")
            if columns[0] != "step":
                table.problem = f"{path.name}: the first column is not 'step'"
                return table
            for line in file:
                if steps is not None:
                    first = line[: line.find(",")]
                    if first.isdecimal() and int(first[:15]) not in steps:
                        continue
                row = _row(columns, line)
                if row is not None:
                    rows[row["step"], row.get("layer", 0)] = row
                elif line.endswith("\n"):  # otherwise it is being written, or a crash tore it
                    unreadable += 1
    except OSError as error:
        table.problem = f"{path.name} cannot be read: {error.strerror}"
        return table
    table.rows = [rows[key] for key in sorted(rows)]
    if unreadable:
        table.problem = f"{path.name}: {unreadable:,} lines could not be read"
    elif not rows:
        table.problem = f"{path.name} holds no rows"
    return table


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


def ranks(run_dir: Path) -> list[int]:
    """Return the ranks of a run: by env.json's world_size, else by the heartbeat files.

    A run resumed on fewer ranks still holds the heartbeats of the others.
    """
    size = number(read_json(run_dir / "env.json").get("world_size"))
    if size is not None and 1 <= size < 65_536:
        return list(range(int(size)))
    names = (path.name for path in run_dir.glob("heartbeat_rank*.jsonl"))
    matches = (re.fullmatch(r"heartbeat_rank(\d+)(\.1)?\.jsonl", name) for name in names)
    return sorted({0, *(int(match[1]) for match in matches if match)})


def read_jsonl(path: Path, skip: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file line by line, without parsing lines that contain `skip`."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if skip is not None and skip in line:
                    continue
                value = _parse(line)
                if isinstance(value, dict):
                    yield value
    except OSError:
        return


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty where there is none."""
    value = _parse(read_text(path) or "")
    return value if isinstance(value, dict) else {}


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_text(path: Path) -> str | None:
    """Return a file's text, whatever its bytes; None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def number(value: object) -> float | None:
    """Return `value` if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
