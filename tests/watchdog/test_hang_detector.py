"""HangDetector: limits on heartbeats, throughput collapse."""

import json
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nsa.watchdog import hang_detector
from nsa.watchdog.hang_detector import HangDetector, HangReport
from tests.disks import files_no_longer_than
from tests.monitor.run_folders import make_beat, write_limits

CONFIRM = 0.05  # seconds
PID = 5


@pytest.fixture(autouse=True)
def _confirm_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.watchdog.hang_detector.CONFIRM_SECONDS", CONFIRM)
    monkeypatch.setattr("nsa.watchdog.hang_detector.HEARTBEAT_SECONDS", 0.05)


def check(detector: HangDetector, *beats: dict[str, Any]) -> HangReport | None:
    """Write the last heartbeats of ranks 0 … n, which all run, and check them once."""
    for rank, beat in enumerate(beats):
        path = detector.folder / f"heartbeat_rank{rank}.jsonl"
        path.write_text(json.dumps({**beat, "rank": rank}) + "\n")
    return detector.check(dict.fromkeys(range(len(beats)), PID))


def beat(ago: float = 0.0, **changes: object) -> dict[str, Any]:
    """Return a heartbeat that was written `ago` seconds ago."""
    return make_beat(0, pid=PID, mono=time.monotonic() - ago, **changes)


def write_speeds(folder: Path, speeds: list[float]) -> None:
    rows = [f"{10 * number},{speed}\n" for number, speed in enumerate(speeds, 1)]
    (folder / "metrics.csv").write_text("step,tokens_per_s\n" + "".join(rows))


def test_silence_is_no_hang_while_the_disk_takes_no_heartbeats(tmp_path: Path) -> None:
    write_limits(tmp_path)
    detector, silent = HangDetector(tmp_path), beat(ago=100)
    report = check(detector, silent)
    assert report is not None
    assert report.reason == (
        "no heartbeat from rank 0 for 100 s (limit monitor.watch.silence = 10), in forward after "
        "step 7; its process is alive"
    )
    with files_no_longer_than(0):
        assert detector.check({0: PID}) is None
    assert check(detector, silent) is None, "no time to write since"
    assert detector.messages == [
        f"{tmp_path} cannot be written (File too large), so missing heartbeats prove nothing"
    ]


def test_a_hung_disk_resets_ranks_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_limits(tmp_path)
    slow, detector, silent = HangDetector(tmp_path), HangDetector(tmp_path), beat(ago=100)
    saving = beat(phase="save", since=5_000.0)
    with monkeypatch.context() as patch:
        patch.setattr("nsa.watchdog.hang_detector.DISK_LIMIT_SECONDS", 0.1)
        patch.setattr(os, "fsync", lambda descriptor: time.sleep(0.2))
        for ranks in ([silent], [silent, saving]):
            assert check(slow, *ranks) is None
    assert check(slow, silent) is None
    assert check(detector, silent) is not None


@pytest.mark.parametrize(("ago", "tested"), [(0.0, False), (5.0, True)])
def test_a_disk_is_tested_if_heartbeats_are_late(ago: float, tested: bool, tmp_path: Path) -> None:
    """Else the time in which it takes none would count as silence later."""
    write_limits(tmp_path)
    detector = HangDetector(tmp_path)
    check(detector, beat(ago))
    with files_no_longer_than(0):
        detector.check({0: PID})
    assert bool(detector.messages) == tested


def test_a_heartbeat_that_a_disk_held_up_may_arrive_before_a_rank_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_limits(tmp_path)
    path = tmp_path / "heartbeat_rank0.jsonl"
    monkeypatch.setattr(time, "sleep", lambda seconds: path.write_text(json.dumps(beat())))
    assert check(HangDetector(tmp_path), beat(ago=60)) is None


def test_of_ranks_above_their_limits_the_one_that_is_so_longest_is_reported(tmp_path: Path) -> None:
    """The others may wait for it."""
    write_limits(tmp_path, compute=10, save=1_000)
    phases = (("forward", 11.0), ("backward", 60.0), ("data", 12.0), ("save", 900.0))
    ranks = [beat(phase=phase, since=since) for phase, since in phases]
    report = check(HangDetector(tmp_path), *ranks)
    assert report is not None
    assert (report.rank, report.phase, report.seconds) == (1, "backward", 60.0)
    report = HangDetector(tmp_path).check({0: PID, 1: PID + 1})
    assert report is not None
    assert report.rank == 0, "the last heartbeat of rank 1 is that of an earlier process"


@pytest.mark.parametrize(
    ("phase", "setting"),
    [
        ("setup", "setup"),
        ("data", "compute"),
        ("forward", "compute"),
        ("backward", "compute"),
        ("step", "compute"),
        ("idle", "compute"),
        ("eval", "save"),
        ("save", "save"),
    ],
)
def test_each_phase_has_a_limit_or_none_with_0(phase: str, setting: str, tmp_path: Path) -> None:
    others = dict.fromkeys({"setup", "compute", "save"} - {setting}, 9)
    for limit, hangs in ((9, True), (11, False), (0, False)):
        write_limits(folder := tmp_path / str(limit), **others, **{setting: limit})
        report = check(HangDetector(folder), beat(phase=phase, since=10.0))
        assert (report is not None) == hangs, limit
        if report is not None:
            assert report.reason == (
                f"rank 0 has been in {phase} after step 7 for 10 s (limit monitor.watch.{setting} "
                "= 9)"
            )
            assert (report.rank, report.phase, report.step) == (0, phase, 7)
            assert (report.seconds, report.limit) == (10.0, 9)


def test_a_finished_rank_that_stays_is_reported_after_the_limit_of_compute(tmp_path: Path) -> None:
    write_limits(tmp_path, compute=9, silence=1)
    for ago, hangs in ((8, False), (10, True)):
        report = check(HangDetector(tmp_path), beat(ago, event="end", status="finished"))
        assert (report is not None) == hangs
    assert report is not None
    assert report.reason.startswith("rank 0 has written its last heartbeat but not exited for 10 s")


def test_limits_that_cannot_be_read_stay_as_they_were(tmp_path: Path) -> None:
    write_limits(tmp_path, compute=9)
    detector = HangDetector(tmp_path)
    assert check(detector, beat(since=10.0)) is not None
    write_limits(tmp_path, compute=-1)
    for _ in range(2):
        report = detector.check({0: PID})
        assert report is not None
        assert report.limit == 9
    (message,) = detector.messages  # a file is read again if it changed
    assert "monitor.watch cannot be read, so its limits stay" in message
    write_limits(tmp_path, compute=11)
    assert check(detector, beat(since=10.0)) is None


def test_a_speed_collapse_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(side_effect=hang_detector.read_table)
    monkeypatch.setattr(hang_detector, "read_table", read)
    detector, speeds = HangDetector(tmp_path), [1000.0] * 30
    logged: list[tuple[int, str]] = []
    for speed in [100.0] * 12:
        write_speeds(tmp_path, speeds := [*speeds, speed])
        assert detector.check({0: PID}) is None, "by default it halts nothing"
        logged += [(len(speeds), detector.messages.pop()) for _ in detector.messages]
    detector.check({0: PID})
    assert read.call_count == 12, "a table that has not changed is not read again"
    assert logged == [
        (
            40,
            "WARNING: throughput has collapsed: at most 100 tokens/s in the last 10 logged steps, "
            "up to step 400; the run's median is 1,000 (limit: 0.2 of it)",
        )
    ]


@pytest.mark.parametrize(
    ("rates", "collapsed"),
    [
        ([1_000.0] * 11 + [199.0] * 10, True),
        ([1_000.0] * 11 + [200.0] * 10, False),
        ([1_000.0] * 11 + [199.0] * 9, False),
        ([1_000.0] * 10 + [100.0] * 10, True),
        ([1_000.0] * 9 + [1.0] * 10, False),
        ([1_000.0] * 20, False),
    ],
)
def test_a_collapse_is_ten_logged_steps_below_a_fifth_of_the_median_and_halts_if_configured(
    rates: list[float], collapsed: bool, tmp_path: Path
) -> None:
    write_speeds(tmp_path, rates)
    for action in ("halt", "ignore"):
        write_limits(tmp_path, on_collapse=action)
        detector = HangDetector(tmp_path)
        assert detector.check({}) is None, "no rank runs, so nothing is judged"
        report = detector.check({0: PID})
        assert (report is not None) == (collapsed and action == "halt")
        assert detector.messages == []
