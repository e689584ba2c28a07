"""Text for terminals, messages and files: aligned tables, a first line, JSON with lines of rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nsa.untrusted import printable


def align(rows: Sequence[Sequence[str]], last: str = "<") -> list[str]:
    """Align the columns of a table: the first to the left, the others but the last to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<", *[">"] * (len(widths) - 2), last]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type without one."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def row_json(result: Mapping[str, Any]) -> str:
    """Return JSON with one line per entry, and one per row of an entry that is a list of rows."""
    entries = []
    for key, value in result.items():
        text = json.dumps(value, ensure_ascii=False, default=str)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in value)
            text = f"[\n  {rows}\n ]"
        entries.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"
