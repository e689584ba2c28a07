"""Finds the processes of a run that DeepSpeed's launcher started."""

from __future__ import annotations

import psutil

LAUNCHER = "deepspeed.launcher.launch"


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def find(ancestor: int, name: str) -> int:
    """Return the pid of rank "0" or "1" or of the LAUNCHER; raise LookupError if there is none."""
    for process in descendants(ancestor):
        try:
            words, rank = process.cmdline(), process.environ().get("RANK")
        except psutil.Error:
            continue
        if name == (LAUNCHER if LAUNCHER in words else rank) and "nsa.data.worker" not in words:
            return process.pid
    raise LookupError(f"no process of {name}")
