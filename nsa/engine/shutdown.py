"""Why a run should stop before its end, and how its ranks get to know.

A signal, the time limit or a launcher that died only leave a reason here. The loop asks for it
before each step, all ranks agree, and they save and end in good order. A rank that has lost a
neighbour or another machine cannot do that: it may hang in a collective for ever, so a thread ends
it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType

import psutil

from nsa.engine.peer_hosts import why_gone
from nsa.processes import is_alive

LAUNCHER = "deepspeed.launcher.launch"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
IMPATIENT_SECONDS = 3.0  # a second Ctrl-C after so long is meant: the run ends at once
PEER_LOSS_GRACE_SECONDS = 5.0  # that a rank has to end by itself once a neighbour is gone
UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


class Interrupted(BaseException):
    """Raised by a signal where this rank only waits for data."""


def parse_time(text: str) -> float:
    """Seconds of `90`, `45m`, `2h30m`, `1d`, `1:30:00` (hours, minutes, seconds)."""
    if re.fullmatch(r"\d+(:\d\d){1,2}", text):
        hours, minutes, *seconds = map(int, text.split(":"))
        found = hours * 3_600 + minutes * 60 + (seconds[0] if seconds else 0)
    elif re.fullmatch(r"(\d+[smhd])+", text):
        found = sum(int(n) * UNITS[unit] for n, unit in re.findall(r"(\d+)([smhd])", text))
    elif text.isdecimal():
        found = int(text)
    else:
        found = 0
    if found < 1:
        raise ValueError(
            f"--time-limit {text!r}: write seconds, or 45m, 2h30m, 1d, or hours:minutes:seconds"
        )
    return float(found)


class ShutdownMonitor:
    """Collects the reason to stop: None as long as there is none."""

    def __init__(self, time_limit: float | None = None) -> None:
        self.reason: str | None = None
        self._waiting = False
        self._asked_at = 0.0
        self._deadline = None if time_limit is None else time.monotonic() + time_limit
        self._ended = threading.Event()
        self._neighbours: dict[int, psutil.Process] = {}
        self._hosts: Mapping[str, socket.socket] = {}
        self._launcher = _launcher()
        self._before: dict[int, object] = {}
        self._thread = threading.Thread(target=self._watch, name="nsa stopping", daemon=True)

    def install(self) -> ShutdownMonitor:
        """Listen to SIGTERM and SIGINT from here on; for the main thread."""
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        self._thread.start()
        return self

    def watch_neighbours(self, processes: Mapping[int, tuple[str, int]]) -> None:
        """`processes`: host and pid of each rank; those of this host are watched."""
        host = os.uname().nodename
        for rank, (where, pid) in processes.items():
            if where == host and pid != os.getpid():
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._neighbours[rank] = psutil.Process(pid)

    def watch_hosts(self, connections: Mapping[str, socket.socket]) -> None:
        """`connections` to the other machines, of `connect_hosts`."""
        self._hosts = connections

    @contextlib.contextmanager
    def may_interrupt(self) -> Iterator[None]:
        """Within, a reason to stop raises Interrupted: to wait for data is no work to finish."""
        self._waiting = True
        try:
            if self.reason is not None:
                raise Interrupted
            yield
        finally:
            self._waiting = False

    def end(self) -> None:
        """The ranks are about to end, each in its own time: nobody is missed any more."""
        self._ended.set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self.reason is not None and now - self._asked_at > IMPATIENT_SECONDS
        if number == signal.SIGINT and again:
            raise KeyboardInterrupt
        if self.reason is None:
            self.reason, self._asked_at = signal.Signals(number).name, now
        if self._waiting:
            self._waiting = False
            raise Interrupted

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            if self.reason is None:
                self._ask(self._out_of_time())
            if self.reason is None and self._launcher and not is_alive(self._launcher):
                self._ask("the launcher is gone")
            lost = self._lost()
            if lost is not None and not self._ended.wait(PEER_LOSS_GRACE_SECONDS):
                _die(f"{lost}, and this rank cannot go on alone")

    def _lost(self) -> str | None:
        for rank, process in self._neighbours.items():
            if not is_alive(process):
                return f"rank {rank} (process {process.pid}) is gone"
        return why_gone(self._hosts)

    def _out_of_time(self) -> str | None:
        over = self._deadline is not None and time.monotonic() >= self._deadline
        return "--time-limit" if over else None

    def _ask(self, reason: str | None) -> None:
        """Through a signal, so that a main thread that waits for data hears of it."""
        if reason is not None:
            self.reason, self._asked_at = reason, time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)


def _launcher() -> psutil.Process | None:
    """The launcher that started this process; a shell may end before its children."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process().parent()
        if parent is not None and LAUNCHER in " ".join(parent.cmdline()):
            return parent
    return None


def _die(reason: str) -> None:
    """End this process though its main thread may hang in a collective."""
    with contextlib.suppress(OSError, ValueError):
        print(f"nsa: {reason}", file=sys.stderr, flush=True)
    os._exit(1)
