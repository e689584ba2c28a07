"""Supervisor of one attempt of a run: reads heartbeats, forwards signals, ends a run that hangs.

`halt.json` in the run's folder records why a run was ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from nsa.atomic_io import atomic_write_text
from nsa.monitor.observer import warn
from nsa.system import in_background, is_alive, with_timeout
from nsa.watchdog.hang_detector import DISK_LIMIT_SECONDS, HangDetector, HangReport

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HALTED = 4  # exit code of a run that the watchdog has ended
EXIT_CODE_OF_STATUS = {"finished": 0, "stopped": 0, "preempted": 0, "no-go": 3}  # any other: 1
CHECK_SECONDS = 0.5  # between two checks of heartbeats and processes
PEER_SECONDS = 5.0  # how long processes may run after a rank failed, or launcher and ranks ended
LAUNCHER_SECONDS = 3.0  # how long a launcher may outlive its killed ranks
STACKS_SECONDS = 2.0  # how long ranks may take to write their stacks
GRACE_SECONDS = 30.0  # between SIGTERM and SIGKILL
KILL_SECONDS = 10.0  # how long to repeat SIGKILL until no process is left
_PR_SET_CHILD_SUBREAPER = 36  # Linux' prctl
log = partial(warn, program="watch")


class SignalState:
    """The first signal received; `urgent` if another came more than a second later."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.urgent = False
        self._received = 0.0
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # respect nohup
                signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: object) -> None:
        if self.signal is None:
            self.signal, self._received = number, time.monotonic()
        # Within a second, the terminal and the scheduler may both send the same request.
        self.urgent = time.monotonic() - self._received > 1.0


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that a killed launcher's ranks are found."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def open_heartbeats(pid: int) -> list[Path]:
    """Return the heartbeat files that a process has open, without touching their disk."""
    paths = []
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # just closed
                paths.append(Path(os.readlink(link)))
    return [path for path in paths if path.name.startswith("heartbeat_rank")]


def _send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has just ended
            process.send_signal(number)


class Supervisor:
    """Watches the ranks that `launcher` starts, until all processes have ended."""

    def __init__(self, signals: SignalState, launcher: subprocess.Popen[bytes]) -> None:
        self.detector: HangDetector | None = None  # of the run's folder; None until it is known
        self.beats: dict[int, dict[str, Any]] = {}  # newest heartbeat of each rank of this host
        self.report: HangReport | None = None  # why the run was halted
        self._signals, self._launcher = signals, launcher
        self._members: dict[int, psutil.Process] = {}  # the launcher and its descendants, by pid
        self._reading: Future[HangReport | None] | None = None  # a check that a thread runs
        self._reading_since = 0.0
        self._signalled: set[int] = set()  # ranks that got SIGTERM
        self._kill_at = float("inf")  # when to kill all processes
        self._succeeded = False  # every rank had ended well when the run was halted
        self._logged: set[str] = set()
        self._start = time.monotonic()

    def run(self) -> int:
        """Watch until every process has ended; return the run's exit code."""
        while True:
            self._check()
            if self.report is None and self._signals.signal is not None:
                self._forward_signal(signal.Signals(self._signals.signal).name)
            ended = self._launcher.poll() is not None and not self._processes()
            if ended or self.report is not None:
                # The exit code follows from the last heartbeats. So wait for a disk that hangs,
                # unless the run was halted or a signal ended it.
                is_read, _ = self._read_folder()
                if is_read or self.report is not None or self._signals.signal is not None:
                    return self._exit_code()
            time.sleep(CHECK_SECONDS)

    def _check(self) -> None:
        """Check heartbeats and processes once; halt a run that hangs, kill one that failed."""
        if self.detector is None:
            paths = (path for process in self._processes() for path in open_heartbeats(process.pid))
            path = next(paths, None)
            if path is not None:
                self.detector = HangDetector(path.parent)
                log(f"watching {path.parent}")
        exited = self.beats.keys() - self.running().keys()
        is_read, report = self._read_folder()  # only now: it has the last beats of `exited`
        if report is not None:
            return self._halt(report)
        if is_read:
            self._schedule_kill(sorted(exited))
        if self._kill_at <= time.monotonic() and self._processes():
            self._log_once("killing all processes of the run")
            self._kill()

    def _processes(self) -> list[psutil.Process]:
        """Find new processes of the run; return those that are alive, orphans included.

        Call this often: heartbeats of a rank that ends before it is found are ignored. psutil
        compares start times, so a later process with the same pid is never signalled.
        """
        with contextlib.suppress(psutil.Error):
            children = psutil.Process().children(recursive=True)
            self._members |= {child.pid: child for child in children}
        return [process for process in self._members.values() if is_alive(process)]

    def running(self) -> dict[int, psutil.Process]:
        """Return the processes of the running ranks, by rank."""
        ranks = {rank: self._members[beat["pid"]] for rank, beat in sorted(self.beats.items())}
        return {rank: process for rank, process in ranks.items() if is_alive(process)}

    def _exit_code(self) -> int:
        """Return the ranks' exit code if it is known, else the launcher's."""
        if self.report is not None:
            return 0 if self._succeeded else HALTED
        codes = [self._exit_code_of(rank) for rank in self.beats]
        launcher_code = self._launcher.returncode
        if codes and all(code == 0 for code in codes):
            return 0
        if self._signals.signal is not None and not any(codes):
            return 128 + self._signals.signal
        if launcher_code > 192:  # 256 - n, from sys.exit(-n): signal n killed a rank
            return 128 + (256 - launcher_code)
        if launcher_code <= 0 and codes:  # the launcher reports no failed rank, or was killed
            return next((code for code in codes if code), 1)
        if launcher_code < 0:  # -n: signal n killed the launcher
            return 128 - launcher_code
        return launcher_code

    def _exit_code_of(self, rank: int) -> int | None:
        """Return the exit code that a rank's last heartbeat implies; None: unknown."""
        beat = self.beats[rank]
        status = re.split("[: ]", str(beat.get("status")))[0]
        return EXIT_CODE_OF_STATUS.get(status, 1) if beat["event"] == "end" else None

    def _read_folder(self) -> tuple[bool, HangReport | None]:
        """Update the ranks; return whether the disk responded, and the report of a hang."""
        if self.detector is None:
            return True, None
        if self._reading is None:
            pids = {rank: self.beats[rank]["pid"] for rank in self.running()}
            self._reading = in_background(partial(self.detector.check, pids))
            self._reading_since = time.monotonic()
        if not wait([self._reading], CHECK_SECONDS).done:
            if time.monotonic() - self._reading_since > DISK_LIMIT_SECONDS:
                self._log_once(
                    f"{self.detector.folder}: the disk hangs; until it responds, no rank is checked"
                )
            return False, None
        report, self._reading = self._reading.result(), None
        while self.detector.messages:
            self._log_once(self.detector.messages.pop(0))
        self._processes()  # finds new ranks
        for rank, beat in self.detector.beats.items():
            # Not a heartbeat of an earlier run in the folder, or of another host.
            is_own = int(beat["pid"]) in self._members and beat["mono"] >= self._start
            if is_own and beat.get("host") == platform.node():
                self.beats[rank] = beat
        return True, report

    def _forward_signal(self, name: str) -> None:
        """Send SIGTERM to the ranks, which save and exit; a launcher would kill them after 30 s."""
        if self._signals.urgent:
            self._kill_at = time.monotonic()
        if self._kill_at < float("inf"):  # all processes are ending already
            return
        running = self.running().items()
        ranks = {rank: process for rank, process in running if rank not in self._signalled}
        if not running and not self._signalled:
            log(f"{name}: no rank writes heartbeats; ending the command")
            _send(self._processes(), signal.SIGTERM)
            self._kill_at = time.monotonic() + GRACE_SECONDS
        elif ranks:
            log(f"{name}: sending SIGTERM to {_names(ranks)}, to save and exit; repeat to kill")
            _send(ranks.values(), signal.SIGTERM)
            self._signalled |= ranks.keys()

    def _schedule_kill(self, exited: list[int]) -> None:
        """Schedule SIGKILL after a rank has failed, or after launcher and ranks have exited."""
        failed = next((rank for rank in exited if self._exit_code_of(rank) != 0), None)
        if failed is not None:
            beat = self.beats[failed]
            how = "exited without a last heartbeat"
            if beat["event"] == "end":
                how = f"ended as {beat.get('status')!r}"
            self._log_once(f"rank {failed}, {beat['phase']} after step {beat['step']}: {how}")
        if failed is not None or (self._launcher.poll() is not None and not self.running()):
            self._kill_at = min(self._kill_at, time.monotonic() + PEER_SECONDS)

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            log(text)
        self._logged.add(text)

    def _halt(self, report: HangReport) -> None:
        """Dump stacks, SIGTERM the ranks, SIGKILL all that still run, and write halt.json."""
        assert self.detector is not None
        log(f"HALT: {report.reason}; dumping stacks, then SIGTERM")
        self.report = report
        self._succeeded = all(self._exit_code_of(rank) == 0 for rank in self.beats)
        beats = dict(self.beats)  # before SIGTERM, after which ranks write others
        _send(self.running().values(), signal.SIGUSR1)
        time.sleep(STACKS_SECONDS)
        _send(self.running().values(), signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while self.running() and time.monotonic() < deadline:
            time.sleep(CHECK_SECONDS)
        if left := self.running():
            log(f"SIGKILL to {_names(left)}, {GRACE_SECONDS:g} s after SIGTERM")
        self._kill()
        end = {"time": time.time(), "exit_code": self._exit_code(), "ranks": beats}
        path = self.detector.folder / "halt.json"
        try:
            text = json.dumps(asdict(report) | end, indent=2) + "\n"
            with_timeout(DISK_LIMIT_SECONDS, partial(atomic_write_text, path, text))
        except OSError as error:
            log(f"{path} could not be written: {error}")

    def _kill(self) -> None:
        """SIGKILL the ranks, let the launcher exit with their code, SIGKILL the rest."""
        self._processes()  # finds the ranks' children, which are orphans afterwards
        _send(self.running().values(), signal.SIGKILL)
        if self.beats:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(LAUNCHER_SECONDS)
        deadline = time.monotonic() + KILL_SECONDS
        while (running := self._processes()) and time.monotonic() < deadline:
            _send(running, signal.SIGKILL)  # includes processes that were just started
            time.sleep(CHECK_SECONDS)


def _names(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in ranks]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"
