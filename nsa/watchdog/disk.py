"""DiskWorker: a child process for everything that touches the run's folder, with a time limit.

A system call on a file system that hangs cannot be interrupted. Only the child waits in it, so that
the watchdog still sees processes end and forwards signals.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LIMIT_SECONDS = 5.0  # until a call counts as hanging


class DiskHangs(OSError):
    """The worker did not return in time, is still in an earlier call, or was killed."""


class DiskWorker:
    """Calls the methods of `target` in a child process, which keeps the state of `target`."""

    pids: ClassVar[set[int]] = set()  # of all workers, which do not belong to a run

    def __init__(self, folder: Path, target: object) -> None:
        self._folder, self._target = folder, target
        self.hangs_since: float | None = None
        self._start()

    def call(self, method: str, *args: object) -> Any:
        """Return `target.method(*args)`, or raise its error.

        Raise DiskHangs after LIMIT_SECONDS, and at each further call until the late result has
        arrived. That result is dropped: it may describe the folder before the hang.
        """
        try:
            if self.hangs_since is not None:
                if not self._connection.poll():
                    raise DiskHangs(f"{self._folder}: the disk hangs")
                self._connection.recv()
                self.hangs_since = None
            start = time.monotonic()
            self._connection.send((method, args))
            if not self._connection.poll(LIMIT_SECONDS):
                self.hangs_since = start
                raise DiskHangs(f"{self._folder}: the disk hangs")
            result, error = self._connection.recv()
        except (EOFError, ConnectionError) as ended:
            self._start()
            raise DiskHangs(f"{self._folder}: the process that reads it was killed") from ended
        if error is not None:
            raise error
        return result

    def _start(self) -> None:
        self.hangs_since = None
        self._connection, child_end = multiprocessing.Pipe()
        pid = os.fork()
        if pid == 0:
            self._connection.close()
            _execute_calls(self._target, child_end)
        child_end.close()
        self.pids.add(pid)


def _execute_calls(target: object, connection: Connection) -> NoReturn:
    """Execute calls and send back their results, until the watchdog closes its end of the pipe."""
    try:
        for number in SIGNALS:  # a terminal and a scheduler send them to every process
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):  # do not keep pipes of the watchdog's output open
            os.dup2(null, descriptor)
        while True:
            method, args = connection.recv()
            result = error = None
            try:
                result = getattr(target, method)(*args)
            except Exception as raised:
                error = raised
            connection.send((result, error))
    finally:
        os._exit(0)
