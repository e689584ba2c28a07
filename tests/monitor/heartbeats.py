"""Heartbeats in tests: written by hand for the watchdog, or read from a run's folder."""

from __future__ import annotations

import platform
import re
import time
from pathlib import Path
from typing import Any

import yaml

from nsa.monitor.artifacts import valid_beats

LIMITS = {"compute": 20, "silence": 10, "save": 1_000}


def make_beat(rank: int, **changes: object) -> dict[str, object]:
    """Return a line of a rank's heartbeat file."""
    line = {"event": "progress", "rank": rank, "pid": 2**22, "host": platform.node()}
    line |= {"phase": "forward", "since": 0.0, "time": time.time(), "mono": time.monotonic()}
    return {**line, "step": 7, "micro_step": 0, "tokens": 0, "skipped": 0, **changes}


def write_limits(folder: Path, **limits: object) -> None:
    folder.mkdir(exist_ok=True)
    config = {"monitor": {"watch": LIMITS | limits}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def read_heartbeats(run_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """Read the valid lines of every rank that has any, oldest first."""
    matches = (re.search(r"rank(\d+)", path.name) for path in run_dir.glob("heartbeat_rank*.jsonl"))
    beats = {}
    for rank in sorted({int(match[1]) for match in matches if match}):
        parts = [run_dir / f"heartbeat_rank{rank}{part}.jsonl" for part in (".1", "")]
        lines = [line for part in parts if part.exists() for line in part.read_bytes().splitlines()]
        beats[rank] = list(valid_beats(lines))
    return beats
