"""The processes of a run: find, signal and kill them, orphans included."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from nsa.system import is_alive

_PR_SET_CHILD_SUBREAPER = 36  # Linux' prctl
_PAUSE = 0.05


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that a killed launcher's ranks are found."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def find_writer(pid: int, heartbeats: Path) -> psutil.Process | None:
    """Return the process with this pid if it has the file open, as only the real rank does."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process if heartbeats in open_heartbeats(process) else None
    return None


class ProcessTree:
    """The processes of a launched command, orphans included.

    psutil compares start times, so a later process with the same pid is never signalled.
    """

    def __init__(self, launcher_pid: int) -> None:
        self._launcher_pid = launcher_pid  # reaped by its Popen
        self._members: dict[int, psutil.Process] = {}
        self.exit_codes: dict[psutil.Process | None, int] = {}  # of orphans that were reaped here

    def running(self) -> list[psutil.Process]:
        """Update the tree, reap orphans, and return the running processes.

        Call it often: a process that was never seen below its parent is not found later.
        """
        with contextlib.suppress(psutil.Error):
            children = psutil.Process().children(recursive=True)
            self._members |= {child.pid: child for child in children}
        members = list(self._members.values())
        for process in members:
            with contextlib.suppress(psutil.Error, ChildProcessError):
                zombie = process.is_running() and process.status() == psutil.STATUS_ZOMBIE
                if zombie and process.pid != self._launcher_pid:
                    pid, status = os.waitpid(process.pid, os.WNOHANG)
                    if pid:
                        self.exit_codes[process] = os.waitstatus_to_exitcode(status)
        return [process for process in members if is_alive(process)]

    def find(self, pid: int) -> psutil.Process | None:
        """Return the process with this pid if it belongs to the tree."""
        self.running()
        return self._members.get(pid)

    def kill(self, seconds: float = 10.0) -> None:
        """SIGKILL all members, and whatever they start meanwhile."""
        deadline = time.monotonic() + seconds
        while (running := self.running()) and time.monotonic() < deadline:
            send(running, signal.SIGKILL)
            time.sleep(_PAUSE)


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def wait_for(processes: Iterable[psutil.Process], seconds: float) -> bool:
    """Wait until all have ended, zombies included; return False after `seconds`.

    (psutil.wait_procs would reap children, whose exit codes are needed, and wait for zombies.)
    """
    running, deadline = list(processes), time.monotonic() + seconds
    while any(map(is_alive, running)):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    return True


def open_heartbeats(process: psutil.Process) -> list[Path]:
    """Return the heartbeat files that a process has open, without touching their disk."""
    paths = []
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # just closed
                paths.append(Path(os.readlink(link)))
    return [path for path in paths if path.name.startswith("heartbeat_rank")]
