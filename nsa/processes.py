"""Whether a process is alive."""

from __future__ import annotations

import contextlib

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Return whether `process` runs; a zombie does not."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
