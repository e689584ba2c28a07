"""One attempt of a run under the watchdog: read heartbeats, forward signals, end what hangs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import signal
import subprocess
import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from nsa.monitor.config import WatchConfig
from nsa.monitor.heartbeat import last_beat
from nsa.watchdog.halt import log, update_halt
from nsa.watchdog.hang_detector import HangDetector, HangReport, WatchedRank
from nsa.watchdog.process_tree import (
    ProcessTree,
    find_holder,
    handles_signal,
    open_heartbeats,
    send,
    wait_for,
)

HALTED = 4  # exit code of a run that the watchdog has ended
EXIT_CODE_OF_STATUS = {"finished": 0, "preempted": 0, "no-go": 3}  # any other: 1, a crash
POLL_SECONDS = 0.1  # between two checks for signals and for the launcher's exit
LOOK_SECONDS = 0.5  # between two checks of heartbeats and processes
PEER_SECONDS = 5.0  # how long other ranks may outlive one that failed
LAUNCHER_SECONDS = 3.0  # how long a launcher may outlive its ranks
STACKS_SECONDS = 2.0  # how long ranks may take to write their stacks


class SignalState:
    """Signals that this process received; a second one, a second or more later, is urgent."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.urgent = False
        self._received = 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # respect nohup
                signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._received = number, now
        elif now - self._received > 1.0:  # a terminal and a scheduler may both send the first
            self.urgent = True


def newest_heartbeats(folder: Path) -> dict[int, dict[str, Any]]:
    beats = {}
    for path in folder.glob("heartbeat_rank*.jsonl"):
        number = path.stem.removeprefix("heartbeat_rank")
        if number.isdecimal() and (beat := last_beat(path)) is not None:
            beats[int(number)] = beat
    return dict(sorted(beats.items()))


@cache
def lock(folder: Path) -> bool:
    """Become the only watchdog that may end this run, until this process exits."""
    file = os.open(folder / ".watch.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return False
    return True


class Supervisor:
    """Watches the processes of `launcher`, or without one a run that is already going."""

    def __init__(
        self,
        tree: ProcessTree,
        signals: SignalState,
        *,
        launcher: subprocess.Popen[bytes] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.ranks: dict[int, WatchedRank] = {}
        self.folder: Path | None = None
        self.report: HangReport | None = None  # why the run was halted
        self._tree, self._signals, self._launcher = tree, signals, launcher
        self._detector: HangDetector | None = None
        self._signalled: set[psutil.Process] = set()
        self._kill_at = float("inf")  # when to kill what is left
        self._remote: dict[int, dict[str, Any]] = {}  # first heartbeats seen of other hosts
        self._succeeded = False  # every rank had ended well when the run was halted
        self._logged: set[str] = set()
        self._start = time.monotonic()
        if folder is not None:
            self._set_folder(folder)

    def run(self) -> int:
        """Watch until every process has ended; return the run's exit code."""
        next_look = 0.0
        while True:
            if time.monotonic() >= next_look:
                self.look()
                next_look = time.monotonic() + (LOOK_SECONDS if self.folder else POLL_SECONDS)
            if self.report is None and self._signals.signal is not None:
                if self._launcher is None:
                    log("stopped watching; the run continues")
                    return 128 + self._signals.signal
                self._read_heartbeats()
                self._forward_signal(self._signals.signal)
            if self.report is None and (self._launcher is None or self._launcher_exited()):
                self.look()
            if self.report is not None or self._all_exited():
                self._read_heartbeats()  # those written since
                return self.exit_code()
            time.sleep(POLL_SECONDS)

    def exit_code(self) -> int:
        """Return the ranks' exit code where it is known, else the launcher's."""
        if self.report is not None:
            return 0 if self._succeeded else HALTED
        codes = [self._exit_code_of(rank) for rank in self.ranks.values()]
        if codes and all(code == 0 for code in codes):
            return 0
        if self._signals.signal is not None and not any(codes):
            return 128 + self._signals.signal
        launcher_code = self._launcher.returncode if self._launcher is not None else 0
        if launcher_code > 192:  # sys.exit(-9) of a launcher whose rank was killed
            return 128 + 256 - launcher_code
        if launcher_code > 0:
            return launcher_code
        if codes:
            return next((code for code in codes if code), 1)
        return 128 - launcher_code if launcher_code else 0

    @property
    def last_step(self) -> int | None:
        """The number of steps done; None before the first heartbeat."""
        return max((int(rank.beat["step"]) for rank in self.ranks.values()), default=None)

    def look(self) -> None:
        """Check heartbeats and processes; halt a hang, end what a failure left behind."""
        processes = self._tree.running()
        if self.folder is None:
            paths = (path for process in processes for path in open_heartbeats(process))
            if (path := next(paths, None)) is not None:
                self._set_folder(path.parent)
        now = time.monotonic()
        exited = [rank for rank in self.ranks.values() if not rank.running]
        self._read_heartbeats()  # after `exited`, so that their last heartbeats are included
        self._detect(now)
        if self.report is None:
            self._end_peers(exited)
            if self._launcher_exited():
                self._end_leftovers()
            if time.monotonic() >= self._kill_at and self._tree.running():
                self._log_once("killing all processes of the run")
                self._kill()

    def _exit_code_of(self, rank: WatchedRank) -> int | None:
        """Return a rank's exit code, or what its last heartbeat implies; None: unknown."""
        if rank.process in self._tree.exit_codes:
            code = self._tree.exit_codes[rank.process]
            return code if code >= 0 else 128 - code
        status = str(rank.beat.get("status")).partition(":")[0]
        return EXIT_CODE_OF_STATUS.get(status, 1) if rank.ended else None

    def _local_ranks(self) -> list[WatchedRank]:
        return [rank for rank in self.ranks.values() if rank.process and rank.running]

    def _launcher_exited(self) -> bool:
        return self._launcher is not None and self._launcher.poll() is not None

    def _all_exited(self) -> bool:
        if self._launcher is None:
            return not any(rank.running for rank in self.ranks.values())
        return self._launcher_exited() and not self._tree.running()

    def _set_folder(self, folder: Path) -> None:
        self.folder = folder
        if lock(folder):
            self._detector = HangDetector(folder, log)
        else:
            log(f"{folder} has another watchdog; this one only forwards signals")

    def _read_heartbeats(self) -> None:
        """Update the ranks; heartbeats of an earlier run in the folder are ignored."""
        now = time.monotonic()
        for number, beat in (newest_heartbeats(self.folder) if self.folder else {}).items():
            rank = self.ranks.get(number)
            if rank is not None and rank.beat["pid"] == beat["pid"]:
                if rank.beat != beat:
                    rank.beat, rank.received = beat, now
            elif beat.get("host") == platform.node():
                process = self._find_process(number, int(beat["pid"]))
                # A rank that exited at once has no process left, but a heartbeat of this attempt.
                if process or (self._launcher is not None and beat["mono"] >= self._start):
                    self.ranks[number] = WatchedRank(number, beat, now, process)
            elif self._remote.setdefault(number, beat) != beat:  # a new one: the rank is alive
                self.ranks[number] = WatchedRank(number, beat, now, None, remote=True)

    def _find_process(self, number: int, pid: int) -> psutil.Process | None:
        """Return a rank's process: one that was launched, or that has its heartbeat file open."""
        if self._launcher is not None:
            return self._tree.find(pid)
        assert self.folder is not None
        process = find_holder(pid, self.folder / f"heartbeat_rank{number}.jsonl")
        if process is not None:
            self._tree.add(process)
        return process

    def _detect(self, now: float) -> None:
        if self._detector is None:
            return
        try:
            running = {rank.number: rank for rank in self.ranks.values() if rank.running}
            report = self._detector.find_hang(running, now)
            for degradation, action in self._detector.find_degradation():
                if action == "warn":
                    log(f"WARNING: {degradation.reason}")
                else:
                    report = report or degradation
        except Exception as error:  # must not cost the run
            self._log_once(f"hang detection failed: {error!r}")
            return
        if report is not None:
            self._halt(report, self._detector.limits.grace)

    def _forward_signal(self, number: int) -> None:
        """SIGTERM the ranks alone, which save; the launcher would kill them after 30 s."""
        name, pending = signal.Signals(number).name, self._kill_at == float("inf")
        new = [rank for rank in self._local_ranks() if rank.process not in self._signalled]
        if pending and not self.ranks:
            log(f"{name}: no rank writes heartbeats yet; ending the command")
            self._terminate()
        elif pending and new:
            log(f"{name}: sending SIGTERM to {_names(new)}, to save and exit; repeat to kill")
            self._signalled |= _send_all(new, signal.SIGTERM)
        if self._signals.urgent:
            self._kill_at = time.monotonic()

    def _end_peers(self, exited: list[WatchedRank]) -> None:
        """Kill ranks that wait for a failed one; launchers would give them 30 s."""
        failed = next((rank for rank in exited if self._exit_code_of(rank) != 0), None)
        if failed is not None:
            beat = failed.beat
            how = f"ended as {beat.get('status')!r}" if failed.ended else "died without a word"
            self._log_once(
                f"rank {failed.number}, {beat['phase']} after step {beat['step']}: {how}"
            )
            self._kill_at = min(self._kill_at, time.monotonic() + PEER_SECONDS)

    def _end_leftovers(self) -> None:
        """End processes that outlive the launcher; ranks may finish."""
        if self._local_ranks():
            self._log_once("the launcher exited before its ranks; watching them until they exit")
        elif self._kill_at == float("inf") and not wait_for(self._tree.running(), 1.0):
            self._terminate()

    def _terminate(self) -> None:
        for process in self._tree.running():
            send(process, signal.SIGTERM)
        limits = self._detector.limits if self._detector else WatchConfig()
        self._kill_at = time.monotonic() + limits.grace

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            log(text)
        self._logged.add(text)

    def _halt(self, report: HangReport, grace: float) -> None:
        """Dump stacks, SIGTERM the ranks, SIGKILL what is left, and write halt.json."""
        assert self.folder is not None
        log(f"HALT: {report.reason}; dumping stacks, then SIGTERM, SIGKILL after {grace:g} s")
        self.report = report
        self._succeeded = all(self._exit_code_of(rank) == 0 for rank in self.ranks.values())
        keys = ("phase", "since", "step", "pid", "host")
        where = {  # before SIGTERM, which moves the ranks
            str(number): {key: rank.beat.get(key) for key in keys}
            for number, rank in self.ranks.items()
        }
        ranks, done = self._local_ranks(), []
        # A rank without a handler for SIGUSR1 would die of it.
        dumping = [r for r in ranks if r.process and handles_signal(r.process, signal.SIGUSR1)]
        if dumping:
            _send_all(dumping, signal.SIGUSR1)
            time.sleep(STACKS_SECONDS)
            done.append(f"SIGUSR1 to {_names(dumping)} for stacks")
        processes = _send_all(ranks, signal.SIGTERM)
        done.append(f"SIGTERM to {_names(ranks)}")
        if not wait_for(processes, grace):
            stuck = [rank for rank in ranks if rank.running]
            done.append(f"SIGKILL to {_names(stuck)} after {grace:g} s")
        if others := self._kill():
            done.append(f"SIGKILL to {others} other processes")
        if unkillable := [process.pid for process in self._tree.running()]:
            done.append(f"these processes survive SIGKILL: {unkillable}")
        halt = {"time": time.time(), **asdict(report), "done": done, "exit_code": self.exit_code()}
        update_halt(self.folder, {**halt, "ranks": where})

    def _kill(self) -> int:
        """SIGKILL the ranks, let the launcher exit by itself, SIGKILL the rest; return how many."""
        self._tree.running()  # their children, which are orphans afterwards
        _send_all(self._local_ranks(), signal.SIGKILL)
        if self.ranks and self._launcher is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(LAUNCHER_SECONDS)
        return self._tree.kill()


def _send_all(ranks: list[WatchedRank], number: signal.Signals) -> set[psutil.Process]:
    processes = {rank.process for rank in ranks if rank.process is not None}
    for process in processes:
        send(process, number)
    return processes


def _names(ranks: list[WatchedRank]) -> str:
    numbers = ", ".join(str(rank.number) for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}" if ranks else "no rank"
