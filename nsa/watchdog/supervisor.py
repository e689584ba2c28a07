"""One life of a run, from its first process to its last: judged, signalled, ended, told of."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from nsa.monitor.config import WatchConfig
from nsa.monitor.heartbeat import last_beat
from nsa.processes import is_alive
from nsa.watchdog.halt import record, say
from nsa.watchdog.hang_detector import Judge, Rank, Verdict
from nsa.watchdog.process_tree import (
    HEARTBEAT,
    ProcessTree,
    handles,
    holder,
    open_heartbeats,
    send,
    wait_for,
)

HALTED = 4  # the exit code of a run that the watchdog has ended
LOCK_FILE = ".watch.lock"
# Exit codes of ranks by the first word of how they ended; any other is a crash.
CODE_OF_STATUS = {"finished": 0, "preempted": 0, "no-go": 3}
_POLL = 0.1  # seconds between two looks at signals and at the launcher's end
_LOOK = 0.5  # between two at heartbeats and processes
_LAST_WORDS = 5.0  # how long the others may outlive a rank that failed
_LAUNCHER = 3.0  # how long a launcher may outlive its ranks
_STACKS = 5.0  # how long ranks may take to write their stacks


class SignalState:
    """What this process was asked by signals. Asking again, a while later, is insisting."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.insists = False
        self._first = 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup stays nohup
                signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._first = number, now
        elif now - self._first > 1.0:  # a terminal and a scheduler may both send the same wish
            self.insists = True


def read_ranks(folder: Path) -> dict[int, dict[str, Any]]:
    """The newest line of every rank that has left a heartbeat in a run's folder."""
    found = {}
    for path in folder.glob("heartbeat_rank*.jsonl"):
        match = HEARTBEAT.fullmatch(path.name)
        beat = last_beat(path) if match else None
        if match and beat is not None:
            found[int(match[1])] = beat
    return dict(sorted(found.items()))


def lock(folder: Path) -> int | None:
    """Be the one watchdog of a run until this process ends; None where there is another."""
    file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


class Supervisor:
    """Watches the processes in `tree`: those of `launcher`, or of a run that was found going."""

    def __init__(
        self,
        tree: ProcessTree,
        wish: SignalState,
        *,
        launcher: subprocess.Popen[bytes] | None = None,
        folder: Path | None = None,
        locked: dict[Path, int | None] | None = None,
    ) -> None:
        self.ranks: dict[int, Rank] = {}
        self.folder: Path | None = None
        self.verdict: Verdict | None = None
        self._tree, self._wish, self._launcher = tree, wish, launcher
        self._locked = {} if locked is None else locked
        self._judge: Judge | None = None
        self._asked: set[psutil.Process] = set()
        self._deadline: float | None = None  # when those that are no ranks have to be gone
        self._failed: float | None = None  # when a rank failed
        self._far: dict[int, dict[str, Any]] = {}  # lines of ranks that may be another run's
        self._was_done = False  # when it was halted
        self._told: set[str] = set()
        self._began = time.monotonic()
        if folder is not None:
            self._enter(folder.resolve())

    def run(self) -> int:
        """Watch until everything has ended; returns the exit code that tells how."""
        look = time.monotonic()
        while True:
            if time.monotonic() >= look:
                self.look()
                look = time.monotonic() + (_LOOK if self.folder else _POLL)
            if self.verdict is not None:
                return self.code()
            if self._wish.signal is not None:
                if self._launcher is None:
                    say("watches no longer; the run goes on")
                    return 128 + self._wish.signal
                self._read()
                self._pass_on()
            if self._launcher is None or self._launcher.poll() is not None:
                self.look()
                if not (self._working() if self._launcher is None else self._tree.living()):
                    self._read()  # lines that were written since
                    return self.code()
            time.sleep(_POLL)

    def code(self) -> int:
        """The ranks' exit code where they have left one, else what the launcher's tells of them."""
        codes = [self._code_of(rank) for rank in self.ranks.values()]
        if self.verdict is not None:
            return 0 if self._was_done else HALTED
        if codes and not any(code != 0 for code in codes):
            return 0
        launched = self._launcher.returncode if self._launcher is not None else 0
        if self._wish.signal is not None and not any(codes):
            return 128 + self._wish.signal
        if launched > 192:  # sys.exit(-9) of a launcher whose rank was killed
            return 128 + 256 - launched
        if launched > 0:
            return launched
        if codes:
            return next((code for code in codes if code), 1)
        return 128 - launched if launched else 0

    @property
    def last_step(self) -> int | None:
        """The steps that were done when it ended."""
        return max((int(rank.beat["step"]) for rank in self.ranks.values()), default=None)

    def _code_of(self, rank: Rank) -> int | None:
        """A rank's exit code: seen, or told by its last line; None where nobody knows."""
        if rank.process is not None and rank.process.pid in self._tree.codes:
            code = self._tree.codes[rank.process.pid]
            return code if code >= 0 else 128 - code
        status = str(rank.beat.get("status")).partition(":")[0]
        return CODE_OF_STATUS.get(status, 1) if rank.ended else None

    def _working(self) -> list[Rank]:
        return [rank for rank in self.ranks.values() if rank.lives]

    def look(self) -> None:
        """Take in what is there, judge it, and end what has no reason left to live."""
        living = self._tree.living()
        self._tree.reap(self._launcher.pid if self._launcher is not None else 0)
        if self.folder is None:
            self._find_folder(living)
        gone, now = [rank for rank in self.ranks.values() if not rank.lives], time.monotonic()
        self._read()  # after that, so that the last line of one that has gone is among them
        self._judge_run(now)
        if self.verdict is None:
            self._end_what_a_failure_left(gone)
            if self._launcher is not None and self._launcher.poll() is not None:
                self._end_what_the_launcher_left()

    def _find_folder(self, living: Sequence[psutil.Process]) -> None:
        paths = (path for process in living for path in open_heartbeats(process))
        path = next(paths, None)
        if path is not None:
            self._enter(path.parent)
        elif time.monotonic() - self._began > WatchConfig().setup:
            self._say_once("nothing that was started writes heartbeats, so that none is judged")

    def _enter(self, folder: Path) -> None:
        self.folder = folder
        if folder not in self._locked:
            self._locked[folder] = lock(folder)
            if self._locked[folder] is None:
                say(f"another watchdog judges {folder}; this one passes signals on, and no more")
        if self._locked[folder] is not None:
            self._judge = Judge(folder, say)

    def _read(self) -> None:
        """Take in the newest lines of ranks that are this run's, and not of one before it."""
        for number, beat in (read_ranks(self.folder) if self.folder else {}).items():
            known = self.ranks.get(number)
            if known is not None and known.beat["pid"] == beat["pid"]:
                if known.beat != beat:
                    known.beat, known.received = beat, time.monotonic()
                continue
            if beat.get("host") == platform.node():
                process = self._find(number, int(beat["pid"]))
                young = self._launcher is not None and beat["mono"] >= self._began
                if process is not None or young:
                    self.ranks[number] = Rank(number, beat, time.monotonic(), process)
            elif self._far.setdefault(number, beat) != beat:  # it is alive
                self.ranks[number] = Rank(number, beat, time.monotonic(), None, far=True)

    def _find(self, number: int, pid: int) -> psutil.Process | None:
        """The process of a rank: one of those that were launched, or one that holds its file."""
        if self._launcher is not None:
            self._tree.look()
            return self._tree.find(pid)
        assert self.folder is not None
        process = holder(pid, self.folder / f"heartbeat_rank{number}.jsonl")
        if process is not None:
            self._tree.add(process)
        return process

    def _judge_run(self, now: float) -> None:
        if self._judge is None:
            return
        try:
            verdict = self._judge.stall({rank.number: rank for rank in self._working()}, now)
            for found, action in self._judge.sicknesses():
                if action == "warn":
                    say(f"WARNING: {found.reason}")
                else:
                    verdict = verdict or found
        except Exception as error:  # a judge that fails must not cost the run
            self._say_once(f"the run cannot be judged: {error!r}")
            return
        if verdict is not None:
            self._halt(verdict)

    def _pass_on(self) -> None:
        """Give ranks the wish to end; the launcher's own way would kill them after 30 s."""
        assert self._wish.signal is not None
        name = signal.Signals(self._wish.signal).name
        ranks = [rank for rank in self._working() if rank.process is not None]
        fresh = [rank for rank in ranks if rank.process not in self._asked]
        if not self.ranks and self._deadline is None:
            say(f"{name}: no rank is at work yet; ending what was started")
            self._tree.send(signal.SIGTERM)
            self._deadline = time.monotonic() + self._grace
        elif fresh and self._deadline is None:
            say(f"{name}: {_names(fresh)} may finish a step and save; once more ends them at once")
            for rank in fresh:
                assert rank.process is not None
                send(rank.process, signal.SIGTERM)
                self._asked.add(rank.process)
        late = self._deadline is not None and time.monotonic() > self._deadline
        if self._wish.insists or late:
            say("ending everything at once")
            self._kill()

    def _end_what_a_failure_left(self, gone: Sequence[Rank]) -> None:
        """A launcher gives ranks 30 s to end after another's death; they only wait for the dead."""
        failed = [rank for rank in gone if self._code_of(rank) != 0]
        if not failed:
            return
        rank = failed[0]
        how = f"ended as {rank.beat.get('status')!r}" if rank.ended else "died without a word"
        self._say_once(f"{_place(rank)}: {how}")
        self._failed = self._failed or time.monotonic()
        if time.monotonic() - self._failed > _LAST_WORDS and self._tree.living():
            self._kill()

    def _end_what_the_launcher_left(self) -> None:
        if any(rank.process for rank in self._working()):
            self._say_once("the launcher has ended before its ranks; they are watched to their end")
        elif self._deadline is None and not wait_for(self._tree.living(), 1.0):
            self._tree.send(signal.SIGTERM)
            self._deadline = time.monotonic() + self._grace
        elif self._deadline is not None and time.monotonic() > self._deadline:
            self._kill()

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            say(text)
        self._told.add(text)

    @property
    def _grace(self) -> float:
        return self._judge.limits.grace if self._judge is not None else 30.0

    def _halt(self, verdict: Verdict) -> None:
        """Ask for stacks, end the ranks, kill what is left, and write down why."""
        say(f"HALT: {verdict.reason}")
        self.verdict = verdict
        self._was_done = all(self._code_of(rank) == 0 for rank in self.ranks.values())
        names = ("phase", "since", "step", "pid", "host")
        where = {  # before anybody is asked to end, which would move them
            str(rank.number): {name: rank.beat.get(name) for name in names}
            for rank in self.ranks.values()
        }
        ranks = [rank for rank in self._working() if rank.process is not None]
        done = []
        if asked := self._ask_for_stacks(ranks):
            done.append(f"SIGUSR1 to {_names(asked)} for stacks")
        processes = [rank.process for rank in ranks if rank.process is not None]
        for process in processes:
            send(process, signal.SIGTERM)
        done.append(f"SIGTERM to {_names(ranks)}")
        if not wait_for(processes, self._grace):
            left = [rank for rank in ranks if rank.process is not None and is_alive(rank.process)]
            done.append(f"SIGKILL to {_names(left)} after {self._grace:g} s")
        if others := self._kill():
            done.append(f"SIGKILL to {others} processes that were left")
        if stuck := [process.pid for process in self._tree.living()]:
            done.append(f"the system does not end these processes: {stuck}")
        self._read()
        about = {"time": time.time(), **asdict(verdict), "done": done, "exit_code": self.code()}
        assert self.folder is not None
        record(self.folder, {**about, "ranks": where})

    def _kill(self) -> int:
        """End ranks, let the launcher tell its code, end the rest; returns how many that was."""
        self._tree.look()
        ranks = [rank.process for rank in self._working() if rank.process is not None]
        for process in ranks:
            send(process, signal.SIGKILL)
        if self.ranks and self._launcher is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(_LAUNCHER)
        return self._tree.kill()

    def _ask_for_stacks(self, ranks: Sequence[Rank]) -> list[Rank]:
        """Have ranks write where they are; one without a handler would die of the question."""
        assert self.folder is not None
        files = {rank.number: self.folder / "stacks" / f"rank{rank.number}.txt" for rank in ranks}
        before = {number: _size(path) for number, path in files.items()}
        asked = [
            rank
            for rank in ranks
            if rank.process is not None
            and handles(rank.process, signal.SIGUSR1)
            and send(rank.process, signal.SIGUSR1)
        ]
        deadline, sizes = time.monotonic() + _STACKS, dict(before)
        while asked and time.monotonic() < deadline:
            time.sleep(_LOOK)
            last, sizes = sizes, {number: _size(path) for number, path in files.items()}
            if sizes == last and all(sizes[rank.number] > before[rank.number] for rank in asked):
                break
        return asked


def _names(ranks: Sequence[Rank]) -> str:
    numbers = ", ".join(str(rank.number) for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}" if ranks else "no rank"


def _place(rank: Rank) -> str:
    return f"rank {rank.number}, {rank.beat['phase']} after step {rank.beat['step']}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
