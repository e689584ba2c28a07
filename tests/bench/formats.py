"""Lists of words in flags, and JSON with a line per row."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any


def whole_number_list(text: str) -> list[int]:
    """Parse one whole number, or several separated by commas, for a flag that takes a list."""
    return [int(word) for word in text.split(",")]


def words(text: str) -> list[str]:
    """Parse words separated by commas, without duplicates."""
    return list(dict.fromkeys(word for word in text.split(",") if word))


def words_of(*known: str) -> Callable[[str], list[str]]:
    """Return a parser of words separated by commas, for a flag that takes some of `known`."""

    def parse(text: str) -> list[str]:
        for word in words(text):
            if word not in known:
                raise argparse.ArgumentTypeError(
                    f"{word!r}: choose from {', '.join(known)}, separated by commas"
                )
        return words(text)

    return parse


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
