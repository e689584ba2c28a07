"""The processes of a run: found, signalled and ended, orphans included, and never anyone else's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from nsa.processes import is_alive

HEARTBEAT = re.compile(r"heartbeat_rank(\d+)\.jsonl")
_SUBREAPER = 36  # of Linux' prctl: orphaned descendants become our children
_LAUNCHERS = ("deepspeed", "deepspeed.launcher.launch", "torchrun", "torch.distributed.run")
_PAUSE = 0.05


def adopt_orphans() -> None:
    """Become the parent of whatever outlives its own, so that a killed launcher hides no rank."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


class ProcessTree:
    """Everything that descends from some processes, remembered even when the link between is gone.

    psutil tells a process from a later one with the same pid, and signals none but the first.
    """

    def __init__(self, *roots: psutil.Process) -> None:
        self._roots = set(roots)
        self._known: set[psutil.Process] = set()
        self._gone: dict[int, psutil.Process] = {}
        self.codes: dict[int, int] = {}  # exit codes of adopted orphans

    def add(self, root: psutil.Process) -> None:
        """Follow one more process, its descendants, and the launchers that started it."""
        self._roots.add(root)
        self._known.add(root)
        with contextlib.suppress(psutil.Error):
            for parent in root.parents():
                words = parent.cmdline()[:4]
                if not any(Path(word).name in _LAUNCHERS for word in words):
                    break
                self._known.add(parent)

    def look(self) -> None:
        """Note who is there now; call it often, or an orphan may be lost sight of."""
        for root in self._roots:
            with contextlib.suppress(psutil.Error):
                self._known.update(root.children(recursive=True))

    def living(self) -> list[psutil.Process]:
        """Those that run still."""
        self.look()
        for process in [process for process in self._known if not is_alive(process)]:
            if not _is_zombie(process):
                self._known.remove(process)
                self._gone[process.pid] = process
        return [process for process in self._known if not _is_zombie(process)]

    def find(self, pid: int) -> psutil.Process | None:
        """The process of this run that has, or had, this pid."""
        known = (process for process in self._known if process.pid == pid)
        return next(known, self._gone.get(pid))

    def reap(self, launched: int) -> None:
        """Collect the exit codes of orphans; `launched` is the child that somebody waits for."""
        for process in self._known:
            if process.pid != launched and _is_zombie(process):
                with contextlib.suppress(ChildProcessError):
                    pid, status = os.waitpid(process.pid, os.WNOHANG)
                    if pid:
                        self.codes[pid] = os.waitstatus_to_exitcode(status)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every process."""
        for process in self.living():
            send(process, number)

    def kill(self, patience: float = 10.0) -> int:
        """End everything with SIGKILL, whatever is born meanwhile included; returns how many."""
        killed: set[psutil.Process] = set()
        deadline = time.monotonic() + patience
        while (left := self.living()) and time.monotonic() < deadline:
            for process in left:
                send(process, signal.SIGKILL)
            killed.update(left)
            wait_for(left, _PAUSE)
        return len(killed)


def _is_zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() == psutil.STATUS_ZOMBIE)
    return False


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; False where it is gone or not ours."""
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)
        return True
    return False


def wait_for(processes: Iterable[psutil.Process], seconds: float) -> bool:
    """Wait until all have ended; False where some still run after that long."""
    left, deadline = list(processes), time.monotonic() + seconds
    while left := [process for process in left if is_alive(process)]:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    return True


def handles(process: psutil.Process, number: signal.Signals) -> bool:
    """Whether it has a handler for a signal that would kill it otherwise."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    return False


def holder(pid: int, path: Path) -> psutil.Process | None:
    """The process of this pid, if it has `path` open: a later one with its pid has not."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process if path.resolve() in open_heartbeats(process) else None
    return None


def open_heartbeats(process: psutil.Process) -> list[Path]:
    """The heartbeat files that it has open."""
    with contextlib.suppress(psutil.Error, OSError):
        paths = [Path(file.path) for file in process.open_files()]
        return [path for path in paths if HEARTBEAT.fullmatch(path.name)]
    return []
