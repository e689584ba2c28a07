"""`nsa watch` ends what hangs, says how a run ended, and never touches anyone else's process.

The runs are real processes (`toy_run.py`) that write heartbeats, and hang, die, or play deaf.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nsa.cli import main
from nsa.watchdog.halt import read_halt
from tests.launch.test_ranks import alive
from tests.monitor.heartbeats import a_line, write_limits
from tests.ranks import ROOT

TOY = Path(__file__).with_name("toy_run.py")


class Watched:
    """A call of `nsa watch`, and the folder of the run that it watches."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self.process = folder, process
        self.said = ""

    def end(self) -> int:
        """Wait for its exit code, and take in what it said."""
        self.said = self.process.communicate(timeout=60)[1]
        return self.process.returncode

    def pids(self) -> list[int]:
        """The processes of the run: of every rank that ever began, and what workers wrote."""
        lines = [
            json.loads(line)
            for path in self.folder.glob("heartbeat_rank*.jsonl")
            for line in path.read_text().splitlines()
            if '"pid"' in line
        ]
        workers = [int(path.read_text()) for path in self.folder.glob("worker*")]
        return sorted({line["pid"] for line in lines} | set(workers))

    def statuses(self) -> list[str]:
        """What the ranks said in their last lines."""
        paths = self.folder.glob("heartbeat_rank*.jsonl")
        return [json.loads(path.read_text().splitlines()[-1])["status"] for path in paths]

    def wait_for_phase(self, phase: str) -> None:
        """Until both ranks have told of `phase`, and the watchdog has found them."""
        wait_until((self.folder / ".watch.lock").exists)
        for number in range(2):
            path = self.folder / f"heartbeat_rank{number}.jsonl"
            wait_until(lambda path=path: path.exists() and f'"{phase}"' in path.read_text())


Watch = Callable[..., Watched]


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never came to be")


def call(*arguments: object) -> subprocess.Popen[str]:
    """`nsa watch` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "nsa", "watch", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def toy(folder: Path, *deeds: str) -> list[str]:
    return [sys.executable, "-S", str(TOY), str(folder), *deeds]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """Start a toy run under `nsa watch`; in the end, nothing of it may be left."""
    begun: list[Watched] = []

    def start(*deeds: str, flags: tuple[object, ...] = (), **limits: object) -> Watched:
        folder = tmp_path / f"run{len(begun)}"
        write_limits(folder, **limits)
        begun.append(Watched(folder, call(*flags, "--", *toy(folder, *deeds))))
        return begun[-1]

    yield start
    for watched in begun:
        if watched.process.poll() is None:
            watched.process.kill()
        left = [pid for pid in watched.pids() if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left


def calls(watched: Watched) -> list[str]:
    return (watched.folder / "calls.txt").read_text().splitlines()


def test_a_hang_is_ended_with_all_its_processes_and_the_reason_is_written_down(
    watch: Watch,
) -> None:
    run = watch("0:train", "0:deaf", "0:worker", "1:hang", "1:stacks")
    assert run.end() == 4
    halt = read_halt(run.folder)
    assert halt["reason"].startswith("rank 1 has been in forward after step 3 for 10")
    assert "monitor.watch.compute is 20" in halt["reason"]
    assert (halt["rank"], halt["phase"], halt["step"]) == (1, "forward", 3)
    assert (halt["limit"], halt["exit_code"]) == (20, 4)
    assert halt["done"][:2] == ["SIGUSR1 to rank 1 for stacks", "SIGTERM to ranks 0, 1"]
    assert "SIGKILL to rank 0 after 0.5 s" in halt["done"]
    assert halt["ranks"]["0"]["phase"] == "backward"
    assert (run.folder / "stacks/rank1.txt").read_text() == "a stack\n"
    assert halt["reason"] in run.said
    assert len(run.pids()) == 3


def test_a_process_that_lives_and_says_nothing_is_ended(watch: Watch) -> None:
    run = watch("0:train", "1:stop", silence=1)
    assert run.end() == 4
    assert "rank 1, though its process lives, has written nothing" in run.said


def test_each_phase_has_a_limit_of_its_own(watch: Watch) -> None:
    assert watch("0:slow-save", "1:slow-save").end() == 0


def test_the_exit_code_of_the_ranks_comes_back_and_only_a_crash_is_tried_again(
    watch: Watch,
) -> None:
    flags = ("--restart", 1, "--backoff", 0)
    codes = {"finished": 0, "failed": 1, "mistake": 2, "no-go": 3}
    runs = {deed: watch(f"0:{deed}", f"1:{deed}", flags=flags) for deed in codes}
    assert {deed: run.end() for deed, run in runs.items()} == codes, [
        run.said for run in runs.values()
    ]
    assert [deed for deed, run in runs.items() if len(calls(run)) > 1] == ["failed"]


def test_a_rank_that_dies_takes_a_deaf_one_with_it_though_the_launcher_only_waits(
    watch: Watch,
) -> None:
    run = watch("0:train", "0:deaf", "1:killed")
    assert run.end() == 137
    assert "rank 1, forward after step 3: died without a word" in run.said


def test_ranks_whose_launcher_was_killed_are_watched_to_their_end_and_tell_the_code(
    watch: Watch,
) -> None:
    codes = {"finished": 0, "mistake": 2}  # the latter stands in no heartbeat
    runs = {
        deed: watch("launcher:die", "0:slow-save", "1:slow-save", f"1:{deed}") for deed in codes
    }
    assert {deed: run.end() for deed, run in runs.items()} == codes
    for run in runs.values():
        assert "the launcher has ended before its ranks" in run.said


def test_a_signal_reaches_the_ranks_alone_so_that_they_may_save(watch: Watch) -> None:
    run = watch("0:train", "1:train")
    run.wait_for_phase("backward")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0
    assert run.statuses() == ["preempted: SIGTERM"] * 2


def test_a_second_signal_ends_the_run_at_once(watch: Watch) -> None:
    run = watch("0:train", "0:deaf", "1:train", "1:deaf")
    run.wait_for_phase("backward")
    while run.process.poll() is None:
        run.process.send_signal(signal.SIGTERM)
        time.sleep(0.6)
    assert run.end() == 143


def test_a_signal_before_any_rank_is_at_work_ends_what_was_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    process = call("--", "sh", "-c", f'{sys.executable} -S -c "{code}"; exit 5')
    wait_until(lambda: pid.exists() and bool(pid.read_text()))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert not alive(int(pid.read_text()))


def test_a_crash_is_restarted_where_the_run_was_saved(watch: Watch) -> None:
    run = watch("1:crash-once", flags=("--restart", 3, "--backoff", 0.1))
    assert run.end() == 0
    assert calls(run) == ["1:crash-once", f"1:crash-once --resume --run-dir {run.folder}"]
    (restart,) = read_halt(run.folder)["restarts"]
    assert (restart["exit_code"], restart["step"]) == (1, 3)
    assert "exit code 1 after step 3; restart 1 of 3" in run.said


def test_a_crash_at_the_same_step_again_is_a_loop_and_ends_it(watch: Watch) -> None:
    run = watch("1:failed", flags=("--restart", 9, "--backoff", 0.1))
    assert run.end() == 1
    assert len(calls(run)) == 2
    assert "a crash loop, it ended after step 3 twice in a row" in run.said
    assert "crash loop" in read_halt(run.folder)["gave_up"]


def test_restarts_end_when_they_are_used_up_though_the_run_gets_further(watch: Watch) -> None:
    run = watch("0:further", "1:further", "1:failed", flags=("--restart", 1, "--backoff", 0.1))
    assert run.end() == 1
    assert len(calls(run)) == 2
    assert "all 1 are used up" in run.said


def test_lines_of_an_earlier_run_torn_lines_and_a_clock_that_jumps_prove_nothing(
    watch: Watch, tmp_path: Path
) -> None:
    old = a_line(0, since=9_000.0, time=0.0, mono=0.0)
    (tmp_path / "run0").mkdir()
    for number in range(3):
        path = tmp_path / f"run0/heartbeat_rank{number}.jsonl"
        path.write_text(json.dumps(old) + '\n{"torn": \n\0\0\n[1]\n')
    assert watch("0:slow-save", "0:clock", "1:slow-save", "1:clock").end() == 0


def test_a_rank_that_has_ended_and_does_not_go_is_ended_and_the_run_is_good(watch: Watch) -> None:
    run = watch("0:linger", compute=0.5)
    assert run.end() == 0
    assert "rank 0 has said its end and does not go" in run.said


def test_a_run_outlives_its_watchdog_and_another_one_can_take_over(watch: Watch) -> None:
    run = watch("0:train", "1:hang", compute=1_000)
    run.wait_for_phase("forward")
    second = call(run.folder)
    assert "is watched already" in second.communicate(timeout=60)[1]
    assert second.returncode == 2
    run.process.kill()
    run.process.wait()
    left = call(run.folder)
    assert left.stderr
    assert "watching ranks 0, 1" in left.stderr.readline()
    left.send_signal(signal.SIGTERM)
    left.communicate(timeout=60)
    assert left.returncode == 143
    assert all(map(alive, run.pids()))
    write_limits(run.folder)
    third = call(run.folder)
    third.communicate(timeout=60)
    assert third.returncode == 4
    assert read_halt(run.folder)["rank"] == 1


def test_a_process_that_only_has_the_pid_of_a_rank_is_left_alone(tmp_path: Path) -> None:
    write_limits(tmp_path / "run")
    bystander = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    try:
        line = a_line(0, pid=bystander.pid, since=9_000.0)
        (tmp_path / "run/heartbeat_rank0.jsonl").write_text(json.dumps(line) + "\n")
        process = call(tmp_path / "run")
        assert "died without a word" in process.communicate(timeout=60)[1]
        assert process.returncode == 1
        assert alive(bystander.pid)
    finally:
        bystander.kill()


def test_a_run_that_has_ended_is_told_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = a_line(0, event="end", status="preempted", step=1_234, loss=2.5, memory_gb=1.0)
    (tmp_path / "heartbeat_rank0.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["watch", str(tmp_path)]) == 0
    assert "has ended: preempted" in capsys.readouterr().err
    assert main(["watch", "--status", str(tmp_path)]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["rank", "phase", "since", "step", "line", "loss", "memory", "process"]
    assert "1,234" in row
    assert row.endswith("2.5000  1.00 GB  ended: preempted")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nowhere"], "no such folder"),
        ([], "give the folder of a run"),
        (["--restart", "2", "."], "--restart: needs the command"),
        (["--restart", "-1", "--", "true"], "--restart -1: must be 0 or more"),
        (["--", "no-such-program"], "no-such-program"),
    ],
)
def test_a_wrong_call_is_one_line(arguments: list[str], word: str) -> None:
    process = call(*arguments)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert word in said
    assert len(said.splitlines()) == 1


def test_a_sickness_halts_a_run_that_was_told_to(watch: Watch, tmp_path: Path) -> None:
    (tmp_path / "run0").mkdir()
    rows = [f"{number},{1000 if number < 30 else 1}\n" for number in range(1, 41)]
    (tmp_path / "run0/metrics.csv").write_text("step,tokens_per_s\n" + "".join(rows))
    run = watch("0:train", "1:train", on_collapse="halt")
    assert run.end() == 4
    halt = read_halt(run.folder)
    assert halt["reason"].startswith("throughput has collapsed")
    assert halt["done"] == ["SIGTERM to ranks 0, 1"]
    assert run.statuses() == ["preempted: SIGTERM"] * 2
