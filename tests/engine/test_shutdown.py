"""ShutdownMonitor: signals, the time limit and a dead launcher stop a run; a lost peer ends it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nsa.engine.shutdown import Interrupted, ShutdownMonitor, parse_time
from tests.ranks import ROOT, SpawnedRanks, spawn_ranks, wait_for

PROGRAM = Path(__file__).with_name("shutdown_rank.py")
LIMIT = 30.0  # seconds


@contextmanager
def ready_rank(
    time_limit: float = 0, peer: int = 0, waits_in: str = "step"
) -> Iterator[SpawnedRanks]:
    rank = spawn_ranks(PROGRAM, str(time_limit), str(peer), waits_in, ranks=0)
    try:
        wait_for(lambda: "ready\n" in rank.text("out"), lambda: rank.text("err"))
        yield rank
    finally:
        rank.end(signal.SIGKILL)


def output(rank: SpawnedRanks, code: int = 0) -> str:
    """Wait for the end; return what the rank printed after "ready"."""
    assert rank.codes(LIMIT) == [code], rank.text("err")
    return rank.text("out").removeprefix("ready\n")


def test_a_signal_interrupts_waiting_for_data() -> None:
    with ready_rank(waits_in="data") as rank:
        rank.started[0].kill(signal.SIGTERM)
        assert output(rank) == "interrupted\nSIGTERM\n"


def test_a_signal_before_the_wait_for_data_interrupts_it_and_one_after_it_nothing() -> None:
    monitor = ShutdownMonitor()
    with monitor.interruptible():
        pass
    monitor._on_signal(signal.SIGTERM, None)
    assert monitor.reason == "SIGTERM"
    with pytest.raises(Interrupted), monitor.interruptible():
        pytest.fail("it waits")


def test_the_time_limit_interrupts_waiting_for_data() -> None:
    with ready_rank(time_limit=1, waits_in="data") as rank:
        assert output(rank) == "interrupted\n--time-limit\n"


def test_repeated_signals_of_a_launcher_still_let_the_step_finish() -> None:
    with ready_rank() as rank:
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(rank.pids[0], number)
        assert output(rank) in ("SIGINT\n", "SIGTERM\n")


def test_a_rank_whose_peer_was_killed_ends_even_in_a_collective() -> None:
    peer = subprocess.Popen(["sleep", "60"])
    with ready_rank(peer=peer.pid, waits_in="collective") as rank:
        os.kill(peer.pid, signal.SIGKILL)
        assert output(rank, code=1) == ""
    peer.wait()
    assert f"lost rank 1 (process {peer.pid})" in rank.text("err")


def test_a_rank_that_ends_soon_after_a_peer_ends_as_usual() -> None:
    peer = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    with ready_rank(peer=peer.pid, waits_in="the end") as rank:
        peer.communicate()
        assert output(rank) == ""


def test_a_process_of_another_host_is_not_watched() -> None:
    namesake = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    with ready_rank(time_limit=4, peer=-namesake.pid) as rank:
        namesake.communicate()
        assert output(rank) == "--time-limit\n"


@pytest.mark.parametrize(
    ("parent", "time_limit", "reason"),
    [("deepspeed.launcher.launch", 0, "launcher exited"), ("shell", 4, "--time-limit")],
)
def test_a_killed_launcher_is_a_reason_to_stop_and_another_parent_is_none(
    parent: str, time_limit: int, reason: str
) -> None:
    """The parent process has the name of DeepSpeed's launcher in its command."""
    rank_command = [sys.executable, str(PROGRAM), str(time_limit), "0", "step"]
    start = f"import subprocess, time; subprocess.Popen({rank_command!r}); time.sleep(60)"
    command = [sys.executable, "-c", start, parent]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        launcher.kill()
        assert launcher.stdout.readline() == f"{reason}\n"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("45m", 2_700),
        ("2h30m", 9_000),
        ("1d", 86_400),
        ("1:30", 5_400),
        ("0:00:20", 20),
    ],
)
def test_a_time_is_parsed(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "soon", "5 m", "1h60", "-3", "1:2"])
def test_a_malformed_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"--time-limit .*2h30m"):
        parse_time(text)
