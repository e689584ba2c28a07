"""Data worker processes, seen from outside."""

from __future__ import annotations

import time
from pathlib import Path

from tests.ranks import alive

SECONDS = 20.0  # in which a process must end


def workers_of(parent: int) -> list[int]:
    """The worker processes of a process, oldest first."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        if int(stat.rpartition(")")[2].split()[1]) == parent and b"nsa.data.writer" in command:
            pids.append(int(folder.name))
    return sorted(pids)


def ends_soon(pid: int) -> bool:
    """Whether a process ends within SECONDS; a zombie has ended."""
    deadline = time.monotonic() + SECONDS
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)
