"""A signal, the clock and a lost launcher ask a run to stop; a lost neighbour ends a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nsa.engine.shutdown import parse_time
from tests.ranks import ROOT, Ranks, start_ranks

RANK = Path(__file__).with_name("shutdown_rank.py")
LIMIT = 30.0  # seconds that an end may take


@contextmanager
def rank(limit: float = 0, neighbour: int = 0, waits: str = "step") -> Iterator[Ranks]:
    """One that has begun."""
    started = start_ranks(RANK, str(limit), str(neighbour), waits, ranks=0)
    try:
        deadline = time.monotonic() + LIMIT
        while "ready\n" not in started.text("out"):
            assert started.codes(0.01) == [None], started.text("err")
            assert time.monotonic() < deadline
        yield started
    finally:
        started.end(signal.SIGKILL)


def said(process: Ranks, code: int = 0) -> str:
    """What it has said since it began, once it has ended."""
    assert process.codes(LIMIT) == [code], process.text("err")
    return process.text("out").removeprefix("ready\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_the_reason_and_the_step_is_finished(number: signal.Signals) -> None:
    with rank() as process:
        process.started[0].kill(number)
        assert said(process) == f"{number.name}\n"


def test_waiting_for_data_ends_at_once() -> None:
    with rank(waits="data") as process:
        process.started[0].kill(signal.SIGTERM)
        assert said(process) == "interrupted\nSIGTERM\n"


def test_the_time_limit_is_a_reason_also_for_who_waits_for_data() -> None:
    with rank(limit=1, waits="data") as process:
        assert said(process) == "interrupted\n--time-limit\n"


def test_a_signal_twice_at_once_as_launchers_send_it_still_finishes_the_step() -> None:
    with rank() as process:
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(process.pids[0], number)
        assert said(process) in ("SIGINT\n", "SIGTERM\n")


def test_a_rank_whose_neighbour_was_killed_ends_though_it_hangs() -> None:
    neighbour = subprocess.Popen(["sleep", "60"])
    with rank(neighbour=neighbour.pid, waits="collective") as process:
        os.kill(neighbour.pid, signal.SIGKILL)
        assert said(process, code=1) == ""
    neighbour.wait()
    assert f"lost rank 1 (process {neighbour.pid})" in process.text("err")


def test_a_launcher_that_is_killed_is_a_reason_to_stop() -> None:
    """The process that starts the rank carries the name of DeepSpeed's launcher."""
    rank_command = [sys.executable, str(RANK), "0", "0", "step"]
    start = f"import subprocess, time; subprocess.Popen({rank_command!r}); time.sleep(60)"
    command = [sys.executable, "-c", start, "deepspeed.launcher.launch"]
    shell = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=shell, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        launcher.kill()
        assert launcher.stdout.readline() == "launcher exited\n"


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
def test_times_are_read_as_people_write_them(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "soon", "5 m", "1h60", "-3", "1:2"])
def test_a_time_that_is_none_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"--time-limit .*2h30m"):
        parse_time(text)
