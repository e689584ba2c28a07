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

from nsa.processes import is_alive

_PR_SET_CHILD_SUBREAPER = 36  # Linux' prctl
_LAUNCHERS = ("deepspeed", "deepspeed.launcher.launch", "torchrun", "torch.distributed.run")
_PAUSE = 0.05


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants: ranks of a killed launcher stay in our tree."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class ProcessTree:
    """A process tree that keeps its members when a process between them has died.

    psutil compares start times, so a later process with the same pid is never signalled.
    """

    def __init__(self, root: psutil.Process | None = None, launcher_pid: int = 0) -> None:
        self._roots = [root] if root else []
        self._launcher_pid = launcher_pid  # reaped by its Popen
        self._members: dict[int, psutil.Process] = {}
        self.exit_codes: dict[psutil.Process, int] = {}  # of orphans that were reaped here

    def add(self, process: psutil.Process) -> None:
        """Follow one more process, its descendants, and the launchers above it."""
        self._roots.append(process)
        self._members[process.pid] = process
        with contextlib.suppress(psutil.Error):
            for parent in process.parents():
                if not any(Path(word).name in _LAUNCHERS for word in parent.cmdline()[:4]):
                    break
                self._members[parent.pid] = parent

    def running(self) -> list[psutil.Process]:
        """Update the tree, reap orphans, and return what runs. Call often, or orphans get lost."""
        for root in self._roots:
            with contextlib.suppress(psutil.Error):
                self._members |= {child.pid: child for child in root.children(recursive=True)}
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
        self.running()
        return self._members.get(pid)

    def kill(self, seconds: float = 10.0) -> int:
        """SIGKILL all members and what they start meanwhile; return how many that were."""
        killed: set[psutil.Process] = set()
        deadline = time.monotonic() + seconds
        while (running := self.running()) and time.monotonic() < deadline:
            for process in running:
                send(process, signal.SIGKILL)
            killed.update(running)
            wait_for(running, _PAUSE)
        return len(killed)


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Send a signal; return False where the process is gone or not ours."""
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)
        return True
    return False


def wait_for(processes: Iterable[psutil.Process], seconds: float) -> bool:
    """Wait until all have ended, zombies included, and leave their exit codes unread.

    Return False after `seconds`. (psutil.wait_procs reaps children and waits for zombies.)
    """
    running, deadline = list(processes), time.monotonic() + seconds
    while running := [process for process in running if is_alive(process)]:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    return True


def handles_signal(process: psutil.Process, number: signal.Signals) -> bool:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    return False


def find_holder(pid: int, path: Path) -> psutil.Process | None:
    """Return the process with this pid if it has `path` open, as only the real rank does."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process if path.resolve() in open_heartbeats(process) else None
    return None


def open_heartbeats(process: psutil.Process) -> list[Path]:
    with contextlib.suppress(psutil.Error, OSError):
        paths = [Path(file.path) for file in process.open_files()]
        return [path for path in paths if path.name.startswith("heartbeat_rank")]
    return []
