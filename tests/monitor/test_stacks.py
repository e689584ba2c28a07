from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nsa.monitor.stacks import dump_stacks_on_signal
from tests.monitor.records import PATIENCE
from tests.ranks import ROOT

# The sum never ends, and neither lets other threads run nor looks for signals.
STUCK_IN_C = """
import itertools
def count_for_ever():
    print("ready", flush=True)
    sum(itertools.repeat(1))  # line 8
count_for_ever()
"""
WAITING = """
import signal, time
def stop(*_):
    print("stopped in good order", flush=True)
    raise SystemExit(0)
signal.signal(signal.SIGTERM, stop)
def wait_for_ever():
    print("ready", flush=True)
    while True:
        time.sleep(100)
wait_for_ever()
"""


@contextmanager
def rank(run_dir: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that listens for the signal and runs `code`."""
    start = (
        "from pathlib import Path\nfrom nsa.monitor.stacks import dump_stacks_on_signal\n"
        f"dump_stacks_on_signal(Path({str(run_dir)!r}), 5)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", start + code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def test_stacks_are_written_while_c_code_holds_python_up(tmp_path: Path) -> None:
    with rank(tmp_path, STUCK_IN_C) as process:
        path = tmp_path / "stacks/rank5.txt"
        assert [entry.name for entry in path.parent.iterdir()] == ["rank5.txt"]
        assert path.read_text() == ""

        def found_counting() -> bool:
            process.send_signal(signal.SIGUSR1)  # the first may come before the counting begins
            return "line 8 in count_for_ever" in path.read_text()

        wait_for(found_counting)
        assert process.poll() is None


def test_each_signal_adds_a_dump_and_the_process_goes_on_to_its_own_handlers(
    tmp_path: Path,
) -> None:
    path = tmp_path / "stacks/rank5.txt"
    with rank(tmp_path, WAITING) as process:
        for number in (1, 2):
            process.send_signal(signal.SIGUSR1)
            wait_for(lambda number=number: path.read_text().count("-- the dump above") == number)
        process.send_signal(signal.SIGTERM)
        said, complaints = process.communicate(timeout=PATIENCE)
    assert (said, complaints, process.returncode) == ("stopped in good order\n", "", 0)
    assert path.read_text().count("in wait_for_ever") == 2
    assert f"process {process.pid}" in path.read_text()
    assert not (tmp_path / "stacks/rank5_collectives.json").exists(), "it had joined no group"


def test_a_folder_that_cannot_be_written_costs_the_stacks_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stacks").write_text("a file where the folder should be")
    before = signal.getsignal(signal.SIGUSR1)
    dump_stacks_on_signal(tmp_path, 0)()
    assert signal.getsignal(signal.SIGUSR1) == before
    assert "SIGUSR1 will write no stacks" in capsys.readouterr().err
