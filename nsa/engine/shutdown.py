"""ShutdownMonitor: stop a run on a signal, at the time limit, or if a peer is lost.

A signal, the time limit or a dead launcher sets a reason to stop. The loop exchanges it before each
step, and all ranks save and exit together. A rank that lost a peer may hang in a collective, so a
thread ends it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import psutil

from nsa.monitor.observer import warn
from nsa.system import is_alive

LAUNCHER = "deepspeed.launcher.launch"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
CTRL_C_AGAIN_SECONDS = 3.0  # a second Ctrl-C after this time ends the run at once
PEER_LOSS_GRACE_SECONDS = 5.0  # between a peer's loss and this rank's end
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


class Interrupted(BaseException):
    """Raised by a signal while the main thread waits for data."""


def parse_time(text: str) -> float:
    """Return the seconds of `90`, `45m`, `2h30m`, `1d` or `1:30:00` (hours:minutes:seconds)."""
    seconds = 0
    if re.fullmatch(r"\d+(:\d\d){1,2}", text):
        parts = [*map(int, text.split(":")), 0]  # 0: seconds may be left out
        seconds = 3_600 * parts[0] + 60 * parts[1] + parts[2]
    elif re.fullmatch(r"(\d+[smhd])+", text):
        seconds = sum(int(n) * UNIT_SECONDS[u] for n, u in re.findall(r"(\d+)([smhd])", text))
    elif text.isdecimal():
        seconds = int(text)
    if seconds < 1:
        raise ValueError(
            f"--time-limit {text!r}: not a time; write seconds, 45m, 2h30m, 1d or "
            "hours:minutes:seconds"
        )
    return float(seconds)


class ShutdownMonitor:
    """Holds the first reason to stop; ends this process if a peer is lost."""

    def __init__(self, time_limit: float | None = None) -> None:
        self.reason: str | None = None
        self._reason_time = 0.0
        self._is_interruptible = False
        self._deadline = None if time_limit is None else time.monotonic() + time_limit
        self._stopped = threading.Event()
        self._processes: dict[int, psutil.Process] = {}  # other ranks on this host
        self._launcher = _find_launcher()

    def start(self, processes: Sequence[tuple[str, int]]) -> None:
        """Handle SIGTERM and SIGINT, and watch the other ranks on this host from here on.

        `processes` holds (host, process id) of each rank. Call it on the main thread.
        """
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        for rank, (host, process_id) in enumerate(processes):
            if host == os.uname().nodename and process_id != os.getpid():
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._processes[rank] = psutil.Process(process_id)
        threading.Thread(target=self._watch, name="nsa shutdown", daemon=True).start()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise Interrupted inside the block once there is a reason to stop."""
        self._is_interruptible = True
        try:
            if self.reason is not None:
                raise Interrupted
            yield
        finally:
            self._is_interruptible = False

    def stop_watching(self) -> None:
        """Stop watching peers; ranks now exit independently."""
        self._stopped.set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.reason is None:
            self.reason, self._reason_time = signal.Signals(number).name, now
        elif number == signal.SIGINT and now - self._reason_time > CTRL_C_AGAIN_SECONDS:
            raise KeyboardInterrupt
        if self._is_interruptible:
            self._is_interruptible = False
            raise Interrupted

    def _watch(self) -> None:
        reported = int(os.environ.get("RANK", 0)) != 0  # rank 0 reports for all
        while not self._stopped.wait(1.0):
            if self.reason is None:
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self._request_stop("--time-limit")
                elif self._launcher and not is_alive(self._launcher):
                    self._request_stop("launcher exited")
            elif not reported:
                reported = True
                warn(f"{self.reason}: the run saves after this step; Ctrl-C again ends it at once")
            for rank, process in self._processes.items():
                if not is_alive(process) and not self._stopped.wait(PEER_LOSS_GRACE_SECONDS):
                    lost = f"lost rank {rank} (process {process.pid})"
                    warn(f"{lost}; this rank cannot continue alone")
                    os._exit(1)  # the main thread may hang in a collective

    def _request_stop(self, reason: str) -> None:
        """Set the reason and signal the main thread, which may wait for data."""
        self.reason, self._reason_time = reason, time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)


def _find_launcher() -> psutil.Process | None:
    """Return the parent process if it is DeepSpeed's launcher (not a shell, which may exit)."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process().parent()
        if parent is not None and LAUNCHER in " ".join(parent.cmdline()):
            return parent
    return None
