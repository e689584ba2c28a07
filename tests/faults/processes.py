"""Finding the processes of a run that was started with DeepSpeed's launcher."""

from __future__ import annotations

import psutil

LAUNCHER = "deepspeed.launcher.launch"


def descendants(pid: int) -> list[psutil.Process]:
    """All that a process has started."""
    return psutil.Process(pid).children(recursive=True)


def find(ancestor: int, which: str) -> int:
    """The process of rank "0" or "1", or of the LAUNCHER; a LookupError where there is none."""
    for process in descendants(ancestor):
        try:
            words, rank = process.cmdline(), process.environ().get("RANK")
        except psutil.Error:
            continue
        name = LAUNCHER if LAUNCHER in words else rank
        if name == which and "nsa.data.worker" not in words:
            return process.pid
    raise LookupError(f"no process of {which}")
