"""A disk that hangs does not keep the watchdog from seeing processes end or forwarding signals."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import nsa.watchdog.disk
from nsa.cli import main
from tests.disks import freezable_disk, frozen
from tests.watchdog.test_watchdog import IMPATIENT, TRAIN, WatchedRun, wait_until


@contextmanager
def training(folder: Path, **limits: Any) -> Iterator[WatchedRun]:
    """Two ranks that train under a watchdog."""
    run = WatchedRun(folder, *TRAIN, program=IMPATIENT, **limits)
    try:
        run.wait_for_phase("backward")
        yield run
    finally:
        run.end()


def ranks_of(run: WatchedRun) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in run.pids()]


def has_pending(process: psutil.Process, number: int) -> bool:
    """Return whether a signal waits for a process that cannot act on it now."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    pending = [int(mask, 16) for mask in re.findall(r"(?:SigPnd|ShdPnd):\s*(\w+)", status)]
    return any(mask >> (number - 1) & 1 for mask in pending)


def read_until(run: WatchedRun, text: str) -> str:
    """Read the watchdog's log up to a line with `text`."""
    assert run.process.stderr is not None
    lines, deadline = "", time.monotonic() + 30
    while text not in lines:
        left = deadline - time.monotonic()
        assert left > 0, f"{text!r} is not in the log:\n{lines}"
        if select.select([run.process.stderr], [], [], left)[0]:
            lines += os.read(run.process.stderr.fileno(), 4096).decode()
    return lines


@pytest.mark.parametrize("flags", [["--status"], []])
def test_a_disk_that_answers_no_read_ends_the_command_in_one_line(
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = os.getpid()
    is_dir = Path.is_dir

    def hang(path: Path) -> bool:
        assert os.getpid() != here, "this process would wait, and not only its child"
        time.sleep(60)
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", hang)
    monkeypatch.setattr(nsa.watchdog.disk, "LIMIT_SECONDS", 0.2)
    assert main(["watch", *flags, str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"nsa: {tmp_path}: the disk hangs\n"


def test_a_run_outlives_a_disk_that_hangs_for_longer_than_the_limit_of_silence(
    tmp_path: Path,
) -> None:
    with (
        freezable_disk(tmp_path / "disk") as disk,
        training(disk / "run", silence=2, compute=3) as run,
    ):
        with frozen(disk):
            log = read_until(run, "the disk hangs")
            time.sleep(2)  # for longer than the limit of the phase, too
        thawed = time.monotonic()
        log += read_until(run, "responds again after")
        assert "HALT" not in log
        while time.monotonic() - thawed < 2.5:
            assert run.process.poll() is None, "a healthy run was ended"
            time.sleep(0.1)
        run.process.send_signal(signal.SIGTERM)
        assert run.exit_code() == 0
        assert run.statuses() == ["preempted: SIGTERM"] * 2
        assert not (run.folder / "halt.json").exists()


def test_signals_pass_on_while_the_disk_hangs(tmp_path: Path) -> None:
    with freezable_disk(tmp_path / "disk") as disk, training(disk / "run", silence=1) as run:
        ranks = ranks_of(run)
        with frozen(disk):
            read_until(run, "the disk hangs")
            assert [rank.status() for rank in ranks] == [psutil.STATUS_DISK_SLEEP] * 2
            run.process.send_signal(signal.SIGTERM)
            wait_until(lambda: all(has_pending(rank, signal.SIGTERM) for rank in ranks))
        assert run.exit_code() == 0
        assert run.statuses() == ["preempted: SIGTERM"] * 2


def test_signals_pass_on_while_a_read_hangs(tmp_path: Path) -> None:
    with training(tmp_path / "run") as run:
        own = psutil.Process(run.process.pid)
        (reader,) = (child for child in own.children() if child.cmdline() == own.cmdline())
        reader.suspend()  # as a read from a server that is gone does
        read_until(run, "the disk hangs")
        run.process.send_signal(signal.SIGTERM)
        assert run.exit_code() == 0
        assert run.statuses() == ["preempted: SIGTERM"] * 2
    reader.kill()


def test_a_reader_that_is_killed_is_replaced(tmp_path: Path) -> None:
    with training(tmp_path / "run", compute=1_000, silence=1) as run:
        own = psutil.Process(run.process.pid)
        (reader,) = (child for child in own.children() if child.cmdline() == own.cmdline())
        reader.kill()
        read_until(run, "the process that reads it was killed")
        read_until(run, "responds again after")
        hung = ranks_of(run)[0]
        os.kill(hung.pid, signal.SIGSTOP)
        assert run.exit_code() == 4
