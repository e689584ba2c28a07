"""What the watchdog reads, made by hand: a line of a rank, and the limits of a run."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import yaml

LIMITS = {"compute": 20, "silence": 10, "save": 1_000, "grace": 0.5}


def a_line(number: int, **changes: object) -> dict[str, object]:
    """A line of a rank's heartbeat."""
    line = {"event": "progress", "rank": number, "pid": 2**22, "host": platform.node()}
    line |= {"phase": "forward", "since": 0.0, "time": time.time(), "mono": time.monotonic()}
    return {**line, "step": 7, "micro_step": 0, "tokens": 0, "skipped": 0, **changes}


def write_limits(folder: Path, **limits: object) -> None:
    folder.mkdir(exist_ok=True)
    config = {"monitor": {"heartbeat": 0.05, "watch": LIMITS | limits}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
