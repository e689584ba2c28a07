"""`nsa watch` of two ranks that fork from it, without the seconds of their imports.

python watched.py -- PROGRAM ARGUMENT ...
"""

import os
import runpy
import signal
import subprocess
import sys
from multiprocessing import connection, get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nsa.watchdog import command
from tests.ranks import free_port

FORK: Any = get_context("fork")


class Launcher:
    """Replaces subprocess.Popen of DeepSpeed's launcher."""

    def __init__(self, arguments: list[str], **_: object) -> None:
        self._process = FORK.Process(target=launch, args=(arguments,))
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float) -> None:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("launcher", timeout)


def launch(arguments: list[str]) -> None:
    """Start both ranks, and once one has failed end the other, as DeepSpeed's launcher does."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # not the watchdog's
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [FORK.Process(target=run_rank, args=(rank, arguments)) for rank in ("0", "1")]
    for rank in ranks:
        rank.start()
    while None in (codes := [rank.exitcode for rank in ranks]) and not any(codes):
        connection.wait([rank.sentinel for rank in ranks if rank.exitcode is None])
    for rank in ranks:
        rank.terminate()
        rank.join()
    sys.exit(next((code for code in codes if code), 0))


def run_rank(rank: str, arguments: list[str]) -> None:
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    command.subprocess = SimpleNamespace(Popen=Launcher, DEVNULL=None)  # type: ignore[assignment]
    import tests.watchdog.impatient_watch  # noqa: F401 - calls `nsa watch`
