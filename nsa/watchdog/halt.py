"""Log lines of the watchdog on stderr, and `halt.json` in the run's folder."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from nsa.atomic_io import atomic_write_text

FILE_NAME = "halt.json"


def log(text: str) -> None:
    """Print one line on stderr; a closed stderr does not stop the watchdog."""
    with contextlib.suppress(OSError):
        print(f"watch: {text}", file=sys.stderr, flush=True)


def read_halt(folder: Path) -> dict[str, Any]:
    """Return the content of halt.json; empty where it is missing or damaged."""
    try:
        content = json.loads((folder / FILE_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def update_halt(folder: Path, changes: dict[str, Any]) -> None:
    """Set keys of halt.json and keep the others; a full disk costs a warning only."""
    content = {**read_halt(folder), **changes}
    try:
        atomic_write_text(folder / FILE_NAME, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        log(f"{folder / FILE_NAME} could not be written: {error}")
