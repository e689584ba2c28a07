"""Log lines of the watchdog on stderr, and `halt.json` in the run's folder."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from nsa.atomic_io import atomic_write_text
from nsa.monitor.artifacts import read_json


def log(text: str) -> None:
    """Print one line on stderr; a closed stderr does not stop the watchdog."""
    with contextlib.suppress(OSError):
        print(f"watch: {text}", file=sys.stderr, flush=True)


def update_halt(folder: Path, changes: dict[str, Any]) -> None:
    """Set keys of halt.json and keep the others; a full disk costs a warning only."""
    path = folder / "halt.json"
    try:
        atomic_write_text(path, json.dumps({**read_json(path), **changes}, indent=2) + "\n")
    except OSError as error:
        log(f"{path} could not be written: {error}")
