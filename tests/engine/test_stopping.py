"""A signal, the clock and a lost launcher ask a run to stop; a lost neighbour ends a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from nsa.engine.stopping import parse_time
from tests.ranks import ROOT

# A rank that takes "steps" and waits for data in between, as the training loop does.
RANK = """
import os, sys, time
from nsa.engine.stopping import Interrupted, Stopping
limit, neighbour, waits = sys.argv[1:]
stopping = Stopping(float(limit) or None).install()
if int(neighbour):
    stopping.watch_neighbours({1: (os.uname().nodename, int(neighbour))})
if waits != "data":
    print("ready", flush=True)
begun = time.monotonic()
while stopping.reason is None and time.monotonic() < begun + 60:
    if waits == "data":
        try:
            with stopping.may_interrupt():
                print("ready", flush=True)  # a signal before this would find nobody waiting
                time.sleep(60)
        except Interrupted:
            print("interrupted", flush=True)
    elif waits == "collective":
        import ctypes
        ctypes.CDLL(None).pause()
    else:
        time.sleep(0.05)
print(stopping.reason, flush=True)
"""


def rank(limit: float = 0, neighbour: int = 0, waits: str = "step") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RANK, str(limit), str(neighbour), waits]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_the_reason_and_the_step_is_finished(number: signal.Signals) -> None:
    with rank() as process:
        process.send_signal(number)
        assert process.communicate(timeout=30)[0] == f"{number.name}\n"
        assert process.returncode == 0


def test_waiting_for_data_ends_at_once() -> None:
    with rank(waits="data") as process:
        process.terminate()
        assert process.communicate(timeout=30)[0] == "interrupted\nSIGTERM\n"


def test_the_time_limit_is_a_reason_also_for_who_waits_for_data() -> None:
    with rank(limit=2, waits="data") as process:
        assert process.communicate(timeout=30)[0] == "interrupted\n--time-limit\n"


def test_a_signal_twice_at_once_as_launchers_send_it_still_finishes_the_step() -> None:
    with rank() as process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30)[0] in ("SIGINT\n", "SIGTERM\n")
        assert process.returncode == 0


def test_a_rank_whose_neighbour_was_killed_ends_though_it_hangs() -> None:
    neighbour = subprocess.Popen(["sleep", "60"])
    with rank(neighbour=neighbour.pid, waits="collective") as process:
        os.kill(neighbour.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=30)
    neighbour.wait()
    assert process.returncode == 1
    assert f"rank 1 (process {neighbour.pid}) is gone" in err
    assert out == ""


def test_a_launcher_that_is_killed_is_a_reason_to_stop() -> None:
    """The process that starts the rank carries the name of DeepSpeed's launcher."""
    rank_command = [sys.executable, "-c", RANK, "0", "0", "step"]
    start = f"import subprocess, time; subprocess.Popen({rank_command!r}); time.sleep(60)"
    command = [sys.executable, "-c", start, "deepspeed.launcher.launch"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        launcher.kill()
        assert launcher.stdout.readline() == "the launcher is gone\n"


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
