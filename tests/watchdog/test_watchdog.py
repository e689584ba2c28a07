"""`nsa watch` ends hangs, restarts crashes, returns the run's exit code, kills nothing else.

The runs are real processes (`toy_run.py`) that write heartbeats, and hang, die, or ignore SIGTERM.
A disk that hangs keeps the watchdog neither from seeing processes end nor from forwarding signals.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from nsa.watchdog import command, supervisor
from nsa.watchdog.hang_detector import last_beats
from tests.disks import freezable_disk, frozen
from tests.monitor.run_folders import make_beat, read_heartbeats, write_limits
from tests.ranks import ROOT, alive, wait_for

TOY = Path(__file__).with_name("toy_run.py")
WATCH = ("-m", "nsa", "watch")
IMPATIENT = ("-m", "tests.watchdog.impatient_watch")  # for tests that wait for a time limit
TRAIN = ("0:train", "1:train")


class WatchedRun:
    """A toy run under `nsa watch`, and its folder."""

    def __init__(
        self, folder: Path, *faults: str, flags: tuple[object, ...] = (), **limits: object
    ) -> None:
        self.folder, self.stderr = folder, ""
        if limits.pop("config", True):
            write_limits(folder, **limits)
        command = (*flags, "--", sys.executable, "-S", TOY, folder, *faults)
        self.process = call(*command, program=IMPATIENT)
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Read stderr; tell the ranks once the watchdog has found them."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr += line
            if "watching" in line:
                (self.folder / "watched").touch()

    def exit_code(self) -> int:
        """Wait for the exit code, and read stderr."""
        self.process.wait(60)
        self._reader.join(60)
        return self.process.returncode

    def wait_for_log(self, text: str) -> None:
        wait_for(lambda: text in self.stderr)

    def halt(self) -> dict[str, Any]:
        return json.loads((self.folder / "halt.json").read_text())

    def calls(self) -> list[str]:
        """The arguments of each start of the toy."""
        return (self.folder / "calls.txt").read_text().splitlines()

    def pids(self) -> list[int]:
        """The pids of every rank that ever started, and of workers."""
        beats = chain.from_iterable(read_heartbeats(self.folder).values())
        workers = {int(path.read_text()) for path in self.folder.glob("worker*")}
        return sorted({int(beat["pid"]) for beat in beats} | workers)

    def statuses(self) -> list[str]:
        """The status in each rank's last heartbeat."""
        return [beat["status"] for beat in last_beats(self.folder).values()]

    def wait_for_phase(self, phase: str) -> None:
        """Wait until both ranks are in `phase` and the watchdog has found them."""
        self.wait_for_log("watching")
        for number in range(2):
            path = self.folder / f"heartbeat_rank{number}.jsonl"
            wait_for(lambda path=path: path.exists() and f'"{phase}"' in path.read_text())

    def end(self) -> None:
        """Kill what is left; fail where the watchdog left a process of the run."""
        if self.process.poll() is None:
            self.process.kill()
        left = [pid for pid in self.pids() if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left


def call(*arguments: object, program: tuple[str, ...] = WATCH) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


RESTART_ONCE = ("--restart", 1)
# Runs that need no help from a test: faults, flags and limits.
SCENARIOS: dict[str, tuple[tuple[str, ...], tuple[object, ...], dict[str, Any]]] = {
    "hang": (("0:train", "0:ignore-sigterm", "0:worker", "1:hang", "1:stacks"), (), {}),
    "silent": (("0:train", "1:sigstop"), (), {"silence": 2}),
    "finished": (("0:finished", "1:finished"), RESTART_ONCE, {}),
    "failed": (("0:failed", "1:failed"), RESTART_ONCE, {}),
    "exit-2": (("0:exit-2", "1:exit-2"), RESTART_ONCE, {}),
    "no-go": (("0:no-go", "1:no-go"), RESTART_ONCE, {}),
    "rank killed": (("0:train", "0:ignore-sigterm", "1:sigkill"), (), {}),
    "orphans finish": (("launcher:die", "0:slow-save", "1:slow-save"), (), {}),
    "orphans fail": (("launcher:die", "0:slow-save", "1:slow-save", "1:exit-2"), (), {}),
    "crash once": (("1:crash-once",), ("--restart", 3), {}),
    "crash loop": (("1:failed",), ("--restart", 9), {"config": False}),
    "old heartbeats": (("0:slow-save", "0:clock-jump", "1:slow-save", "1:clock-jump"), (), {}),
    "linger": (("0:linger",), (), {"compute": 0.5}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, WatchedRun]]:
    """All of SCENARIOS, started at once because they mostly sleep."""
    root, started = tmp_path_factory.mktemp("runs"), dict[str, WatchedRun]()
    (root / "old heartbeats").mkdir()
    for number in range(3):
        beat = make_beat(0, since=9_000.0, time=0.0, mono=0.0)
        path = root / f"old heartbeats/heartbeat_rank{number}.jsonl"
        path.write_text(json.dumps(beat) + '\n{"torn": \n\0\0\n[1]\n')
    for name, (faults, flags, limits) in SCENARIOS.items():
        started[name] = WatchedRun(root / name, *faults, flags=flags, **limits)
    yield started
    for run in started.values():
        run.end()


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., WatchedRun]]:
    """Start a run that the test interferes with."""
    started: list[WatchedRun] = []

    def start(*faults: str, folder: Path = tmp_path / "run", **limits: Any) -> WatchedRun:
        started.append(WatchedRun(folder, *faults, **limits))
        return started[-1]

    yield start
    for run in started:
        run.end()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with freezable_disk(tmp_path / "disk") as disk:
        yield disk


Runs = dict[str, WatchedRun]
Watch = Callable[..., WatchedRun]


def test_a_hang_is_ended_with_all_its_processes_and_explained_in_halt_json(runs: Runs) -> None:
    run = runs["hang"]
    assert run.exit_code() == 4
    halt = run.halt()
    assert halt["reason"].startswith("rank 1 has been in forward after step 3 for 10")
    assert "limit monitor.watch.compute = 20" in halt["reason"]
    assert (halt["rank"], halt["phase"], halt["step"]) == (1, "forward", 3)
    assert (halt["limit"], halt["exit_code"]) == (20, 4)
    assert "SIGKILL to rank 0, 3 s after SIGTERM" in run.stderr
    assert halt["ranks"]["0"]["phase"] == "backward"
    assert (run.folder / "stacks/rank1.txt").read_text() == "a stack\n"
    assert f"HALT: {halt['reason']}; dumping stacks" in run.stderr
    assert len(run.pids()) == 3
    assert not any(map(alive, run.pids()))


def test_a_stopped_process_is_ended_for_its_silence(runs: Runs) -> None:
    assert runs["silent"].exit_code() == 4
    reason = runs["silent"].halt()["reason"]
    assert reason.startswith("no heartbeat from rank 1 for ")
    assert "in forward after step 3; its process is alive" in reason
    assert reason in runs["silent"].stderr


def test_the_exit_code_is_the_ranks_and_only_a_crash_is_restarted(runs: Runs) -> None:
    codes = {"finished": 0, "failed": 1, "exit-2": 2, "no-go": 3}
    assert {name: runs[name].exit_code() for name in codes} == codes
    assert [name for name in codes if len(runs[name].calls()) > 1] == ["failed"]


def test_peers_of_a_dead_rank_are_killed_though_they_ignore_sigterm(runs: Runs) -> None:
    run = runs["rank killed"]
    assert run.exit_code() == 137
    assert len(run.calls()) == 1, "nothing is restarted without --restart"
    assert "rank 1, forward after step 3: exited without a last heartbeat" in run.stderr


def test_orphaned_ranks_are_watched_to_their_end_and_give_the_exit_code(runs: Runs) -> None:
    for name, code in (("orphans finish", 0), ("orphans fail", 1)):
        assert runs[name].exit_code() == code


def test_a_crash_is_restarted_with_resume(runs: Runs) -> None:
    run = runs["crash once"]
    assert run.exit_code() == 0
    assert run.calls() == ["1:crash-once", f"1:crash-once --resume --run-dir {run.folder}"]
    assert "exit code 1 after step 3; restart 1 of 3 in 1 s" in run.stderr


def test_two_crashes_after_the_same_step_are_a_crash_loop(runs: Runs) -> None:
    run = runs["crash loop"]
    assert run.exit_code() == 1
    first, second = run.calls()
    assert second == f"{first} --run-dir {run.folder}", "without a config.yaml nothing is resumed"
    assert "crash loop, it ended after step 3 twice in a row" in run.stderr


def test_two_crashes_before_the_first_heartbeat_are_a_crash_loop() -> None:
    command = "sh", "-c", "exit 5", "--", "1"  # whose arguments may contain a -- of their own
    process = call("--restart", 9, "--", *command, program=IMPATIENT)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 5
    assert "restart 1 of 9 in 1 s, with nothing to resume from" in stderr
    assert "crash loop, it ended before the first heartbeat twice in a row" in stderr


@pytest.mark.parametrize(("codes", "restarts"), [([4, 137, 0], 9), ([1, 1, 4], 2)])
def test_a_run_that_gets_further_is_restarted_whatever_ended_it_but_not_too_often(
    codes: list[int],
    restarts: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """4: the watchdog did."""
    started: list[list[str]] = []

    def supervise(*_: object) -> Any:
        beats = {0: {"step": 5}, 1: {"step": 5 + len(started)}}  # the second gets further
        code = codes[len(started) - 1]
        return SimpleNamespace(run=lambda: code, beats=beats, detector=None)

    monkeypatch.setattr(command, "adopt_orphans", lambda: None)
    monkeypatch.setattr(command, "SignalState", lambda: SimpleNamespace(signal=None))
    monkeypatch.setattr(command, "Supervisor", supervise)
    monkeypatch.setattr(command, "RESTART_SECONDS", 0.0)
    popen = SimpleNamespace(Popen=lambda words, **_: started.append(words), DEVNULL=None)
    monkeypatch.setattr(command, "subprocess", popen)
    assert command._launch(["train"], restarts) == codes[-1]
    assert started == [["train"]] * 3
    given_up = "exit code 4, not restarting: all 2 restarts are used up" in capsys.readouterr().err
    assert given_up == (restarts == 2)


def test_no_restart_follows_a_signal_in_the_wait_for_it(tmp_path: Path) -> None:
    script = f"echo started >> {tmp_path / 'log'}; exit 5"
    process = call("--restart", 9, "--", "sh", "-c", script, program=IMPATIENT)
    assert process.stderr is not None
    assert "restart 1 of 9 in 1 s" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert (tmp_path / "log").read_text() == "started\n"


def test_old_heartbeats_torn_lines_and_a_jumping_clock_are_no_hang(runs: Runs) -> None:
    assert runs["old heartbeats"].exit_code() == 0


def test_a_finished_rank_that_does_not_exit_is_ended_and_the_run_has_succeeded(runs: Runs) -> None:
    run = runs["linger"]
    assert run.exit_code() == 0
    assert "rank 0 has written its last heartbeat but not exited for " in run.stderr


def test_a_signal_reaches_the_ranks_alone_so_that_they_save(watch: Watch) -> None:
    run = watch(*TRAIN)
    run.wait_for_phase("backward")
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGTERM)  # as a terminal and a scheduler may: not a second one
    assert run.exit_code() == 0
    assert run.statuses() == ["preempted: SIGTERM"] * 2
    assert "SIGINT: sending SIGTERM to ranks 0, 1, to save and exit; repeat to kill" in run.stderr


def test_a_second_signal_kills_the_run(watch: Watch) -> None:
    run = watch(*TRAIN, "0:ignore-sigterm", "1:ignore-sigterm")
    run.wait_for_phase("backward")
    while "killing all processes" not in run.stderr:
        run.process.send_signal(signal.SIGTERM)
        time.sleep(0.6)
    assert run.exit_code() == 143


def test_only_a_signal_more_than_a_second_later_is_urgent_and_nohup_is_respected() -> None:
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        state = supervisor.SignalState()
        signal.raise_signal(signal.SIGHUP)
        assert state.signal is None
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert (state.signal, state.urgent) == (signal.SIGINT, False)
        time.sleep(1.1)
        signal.raise_signal(signal.SIGTERM)
        assert (state.signal, state.urgent) == (signal.SIGINT, True)
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def test_a_signal_before_the_first_heartbeat_ends_the_command(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    process = call("--", "sh", "-c", f'{sys.executable} -S -c "{code}"; exit 5')
    wait_for(lambda: pid.exists() and bool(pid.read_text()))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert not alive(int(pid.read_text()))


def test_a_signal_after_all_ranks_have_ended_ends_the_command(tmp_path: Path) -> None:
    write_limits(tmp_path / "run")
    toy = f"{sys.executable} -S {TOY} {tmp_path / 'run'} 0:finished 1:finished"
    process = call("--", "sh", "-c", f"{toy}; echo ranks ended; sleep 600")
    assert process.stderr is not None
    assert process.stdout is not None
    assert "watching" in process.stderr.readline()
    (tmp_path / "run/watched").touch()
    assert process.stdout.readline() == "ranks ended\n"
    time.sleep(1)  # until the watchdog has seen it
    process.send_signal(signal.SIGTERM)
    assert "ending the command" in process.communicate(timeout=60)[1]
    assert process.returncode == 0, "the ranks have succeeded"


@pytest.mark.parametrize(
    ("statuses", "launcher", "number", "code"),
    [
        ([], 5, None, 5),
        ([], -9, None, 137),
        ([], 247, None, 137),  # sys.exit(-9)
        ([], 0, signal.SIGTERM, 143),
        (["finished", "stopped at --until 3 of 9 steps"], -9, None, 0),
        (["preempted: SIGTERM", None], 0, signal.SIGTERM, 143),
        (["preempted: SIGTERM"] * 2, 1, signal.SIGTERM, 0),
        (["failed: ValueError: x", None], 0, signal.SIGTERM, 1),
        (["finished", "no-go"], 0, None, 3),
        (["finished", None], 0, None, 1),
        (["finished", None], -9, None, 1),
        ([None, None], 3, None, 3),
    ],
)
def test_the_exit_code_is_that_of_the_ranks_or_else_of_the_launcher_or_the_signal(
    statuses: list[str | None], launcher: int, number: int | None, code: int
) -> None:
    """`statuses`: in the ranks' last heartbeats, None of a rank that wrote no last one."""
    run = supervisor.Supervisor(Mock(signal=number), Mock(returncode=launcher))
    for rank, status in enumerate(statuses):
        event = "progress" if status is None else "end"
        run.beats[rank] = make_beat(rank, event=event, status=status)
    assert run._exit_code() == code


def test_the_exit_code_waits_for_the_last_heartbeats_on_a_disk_that_hangs() -> None:
    run: Any = supervisor.Supervisor(Mock(signal=None), Mock(returncode=0))
    responses = iter([False, False, True])

    def read() -> tuple[bool, None]:
        if is_read := next(responses):
            run.beats[0] = make_beat(0, event="end", status="no-go")
        return is_read, None

    run._check, run._processes, run._read_folder = lambda: None, list, read
    assert run.run() == 3


def test_while_the_disk_hangs_one_thread_waits_for_it_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    responds, checks = Event(), list[object]()

    def check(pids: object) -> None:
        checks.append(pids)
        responds.wait(60)

    monkeypatch.setattr(supervisor, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "DISK_LIMIT_SECONDS", 0.0)
    run: Any = supervisor.Supervisor(Mock(), Mock())
    run.detector = SimpleNamespace(folder=Path("run"), check=check, messages=["slow"], beats={})
    assert [run._read_folder() for _ in range(3)] == [(False, None)] * 3
    responds.set()
    wait_for(lambda: run._read_folder()[0])
    assert run._read_folder() == (True, None)
    assert len(checks) == 2, "one for each response"
    log = "watch: run: the disk hangs; until it responds, no rank is checked\nwatch: slow\n"
    assert capsys.readouterr().err == log


def test_only_heartbeats_of_processes_of_the_command_are_of_the_run(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        run = supervisor.Supervisor(Mock(), child)
        run.detector = supervisor.HangDetector(tmp_path)
        others: list[dict[str, Any]] = [{"host": "node2"}, {"mono": 0.0}, {"pid": os.getpid()}]
        for rank, changes in enumerate([{}, *others]):
            beat = json.dumps(make_beat(rank, **({"pid": child.pid} | changes)))
            (tmp_path / f"heartbeat_rank{rank}.jsonl").write_text(f"{beat}\n")
        wait_for(lambda: run._read_folder()[0])
        assert list(run.beats) == [0]
        child.communicate(b"\n")


def has_pending(process: psutil.Process, number: int) -> bool:
    """Return whether a signal waits for a process that cannot act on it now."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    pending = [int(mask, 16) for mask in re.findall(r"(?:SigPnd|ShdPnd):\s*(\w+)", status)]
    return any(mask >> (number - 1) & 1 for mask in pending)


def test_signals_pass_on_while_the_disk_hangs(disk: Path, watch: Watch) -> None:
    run = watch(*TRAIN, folder=disk / "run", silence=1)
    run.wait_for_phase("backward")
    ranks = [psutil.Process(pid) for pid in run.pids()]
    with frozen(disk):
        run.wait_for_log("the disk hangs")
        assert [rank.status() for rank in ranks] == [psutil.STATUS_DISK_SLEEP] * 2
        run.process.send_signal(signal.SIGTERM)
        wait_for(lambda: all(has_pending(rank, signal.SIGTERM) for rank in ranks))
    assert run.exit_code() == 0
    assert run.statuses() == ["preempted: SIGTERM"] * 2


FORGED_VALUES: list[tuple[str, object]] = [
    ("pid", -1),
    ("pid", 10**30),
    ("pid", float("nan")),
    ("loss", "low"),
    ("memory_gb", [1]),
    ("host", {}),
    ("step", "5"),
    ("step", float("inf")),
    ("since", 1e999),
]


def test_the_last_sound_heartbeat_of_each_rank_is_read(tmp_path: Path) -> None:
    forged = [
        *(json.dumps(make_beat(0, **{name: value})) for name, value in FORGED_VALUES),
        *('{"torn": ', "\0\0", "", "[1, 2]", '"progress"', '{"event": "progress"}', "[" * 30_000),
        json.dumps(make_beat(0, event="dance")),
        json.dumps(make_beat(0, phase="dance")),
    ]
    for number, line in enumerate(forged):
        lines = [line, json.dumps(make_beat(number, step=5)), line]
        (tmp_path / f"heartbeat_rank{number}.jsonl").write_text("\n".join(lines) + "\n")
    os.mkfifo(tmp_path / "heartbeat_rank99.jsonl")  # opening it would block
    beats = last_beats(tmp_path)
    assert list(beats) == list(range(len(forged)))
    assert {(beat["step"], beat["pid"]) for beat in beats.values()} == {(5, 2**22)}


def test_a_wrong_call_is_one_line_and_exit_code_2(refusal: Callable[..., str]) -> None:
    assert "give the command to start, after --" in refusal("watch")
    withdrawn = "attaching to a run that is running is withdrawn in this version; "
    assert f"nsa watch .: {withdrawn}start it with nsa watch -- " in refusal("watch", ".")
    negative = refusal("watch", "--restart", "-1", "--", "true")
    assert "--restart -1: must be 0 or more" in negative
    process = call("--", "no-such-program")
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert "no-such-program" in stderr
    assert len(stderr.splitlines()) == 1
