"""A disk that hangs does not keep the watchdog from seeing processes end or forwarding signals."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.disks import freezable_disk, frozen
from tests.watchdog.test_watchdog import TRAIN, WatchedRun, wait_until


@contextmanager
def training(folder: Path, **limits: Any) -> Iterator[WatchedRun]:
    """Two ranks that train under a watchdog."""
    run = WatchedRun(folder, *TRAIN, **limits)
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


def test_a_run_outlives_a_disk_that_hangs_for_longer_than_the_limit_of_silence(
    tmp_path: Path,
) -> None:
    with (
        freezable_disk(tmp_path / "disk") as disk,
        training(disk / "run", silence=2, compute=3) as run,
    ):
        with frozen(disk):
            run.wait_for_log("the disk hangs")
            time.sleep(2)  # for longer than the limit of the phase, too
        thawed = time.monotonic()
        run.wait_for_log("responds again after")
        while time.monotonic() - thawed < 2.5:
            assert run.process.poll() is None, "a healthy run was ended"
            time.sleep(0.1)
        run.process.send_signal(signal.SIGTERM)
        assert run.exit_code() == 0
        assert "HALT" not in run.stderr
        assert run.statuses() == ["preempted: SIGTERM"] * 2
        assert not (run.folder / "halt.json").exists()


def test_signals_pass_on_while_the_disk_hangs(tmp_path: Path) -> None:
    with freezable_disk(tmp_path / "disk") as disk, training(disk / "run", silence=1) as run:
        ranks = ranks_of(run)
        with frozen(disk):
            run.wait_for_log("the disk hangs")
            assert [rank.status() for rank in ranks] == [psutil.STATUS_DISK_SLEEP] * 2
            run.process.send_signal(signal.SIGTERM)
            wait_until(lambda: all(has_pending(rank, signal.SIGTERM) for rank in ranks))
        assert run.exit_code() == 0
        assert run.statuses() == ["preempted: SIGTERM"] * 2
