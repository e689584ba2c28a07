"""What the watchdog says and writes down: lines on stderr, and `halt.json` in the run's folder."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from nsa.atomic_io import atomic_write_text

FILE_NAME = "halt.json"


def say(text: str) -> None:
    """A line for people; that nobody reads it is no reason to stop watching."""
    with contextlib.suppress(OSError):
        print(f"watch: {text}", file=sys.stderr, flush=True)


def read_halt(folder: Path) -> dict[str, Any]:
    """What halt.json holds; empty where there is none that can be read."""
    try:
        found = json.loads((folder / FILE_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def record(folder: Path, changes: dict[str, Any]) -> None:
    """Put `changes` into halt.json and leave the rest of it; a full disk costs the file only."""
    whole = {**read_halt(folder), **changes}
    try:
        atomic_write_text(folder / FILE_NAME, json.dumps(whole, indent=2) + "\n")
    except OSError as error:
        say(f"{folder / FILE_NAME} could not be written: {error}")
