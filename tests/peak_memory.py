"""Peak memory of a call."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path


def print_peak(call: Callable[[], object], first: Callable[[], object]) -> None:
    """Print by how many bytes a call needs more than `first`, which makes all one-time allocations.

    In a process of its own, as VmHWM only rises. A new process starts with the ru_maxrss of the one
    that spawned it.
    """
    if os.fork():
        _, code = os.wait()
        assert code == 0, f"status {code}"
        return
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: freed blocks return to the system
    first()
    before = _peak()
    call()
    print(_peak() - before, flush=True)
    os._exit(0)


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
