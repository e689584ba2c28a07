"""Looking at worker processes from outside."""

from __future__ import annotations

import time
from pathlib import Path

SECONDS = 20.0  # that a process has to end


def workers_of(parent: int) -> list[int]:
    """The worker processes that a process has started, oldest first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it ended meanwhile
        if int(stat.rpartition(")")[2].split()[1]) == parent and b"nsa.data.worker" in command:
            found.append(int(folder.name))
    return sorted(found)


def gone(pid: int) -> bool:
    """Whether a process ends soon; a zombie has ended."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        if stat.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False
