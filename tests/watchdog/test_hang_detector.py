"""HangDetector: limits on heartbeats, throughput collapse."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from nsa.watchdog.hang_detector import HangDetector, HangReport
from tests.monitor.heartbeats import make_beat, write_limits

CONFIRM = 0.2  # seconds


@pytest.fixture(autouse=True)
def _confirm_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.watchdog.hang_detector.CONFIRM_SECONDS", CONFIRM)
    monkeypatch.setattr("nsa.watchdog.hang_detector.HEARTBEAT_SECONDS", 0.05)


def find_hang(
    detector: HangDetector, beats: Mapping[int, Mapping[str, object]]
) -> HangReport | None:
    """Judge twice, as far apart as a hang has to last on a disk that takes writes."""
    assert detector.find_hang(beats, time.monotonic()) is None, "a single look is not enough"
    time.sleep(1.5 * CONFIRM)
    return detector.find_hang(beats, time.monotonic())


def test_silence_is_no_hang_while_the_disk_takes_no_heartbeats(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_limits(folder)
    detector, silent = HangDetector(folder), {0: make_beat(0, mono=time.monotonic() - 100)}
    report = find_hang(detector, silent)
    assert report is not None
    assert report.reason == (
        "no heartbeat from rank 0 for 100 s (limit monitor.watch.silence = 10), in forward after "
        "step 7; its process is alive"
    )
    folder.rename(tmp_path / "elsewhere")
    assert find_hang(detector, silent) is None
    (tmp_path / "elsewhere").rename(folder)
    assert find_hang(detector, silent) is None, "no time to write since"
    assert detector.check({}).messages == [
        f"{folder} cannot be written (No such file or directory), so missing heartbeats prove "
        "nothing"
    ]


def test_a_rank_that_writes_again_after_a_hang_of_the_disk_is_not_judged_by_old_heartbeats(
    tmp_path: Path,
) -> None:
    write_limits(tmp_path)
    detector, silent = HangDetector(tmp_path), {0: make_beat(0, mono=time.monotonic() - 60)}
    assert detector.find_hang(silent, time.monotonic()) is None
    time.sleep(1.5 * CONFIRM)
    assert detector.find_hang({0: make_beat(0)}, time.monotonic()) is None
    assert detector.find_hang(silent, time.monotonic()) is None, "each hang has to last"


def test_a_rank_stuck_for_longer_is_named_as_a_possible_cause(tmp_path: Path) -> None:
    write_limits(tmp_path, compute=10, save=1_000)
    ranks = {
        number: make_beat(number, phase=phase, since=since)
        for number, phase, since in ((0, "forward", 11.0), (1, "save", 60.0))
    }
    report = find_hang(HangDetector(tmp_path), ranks)
    assert report is not None
    assert report.rank == 0
    assert "rank 1 has been in save for longer, 60 s" in report.reason


def test_each_throughput_collapse_is_reported_once(tmp_path: Path) -> None:
    speeds = [1000.0] * 30
    detector = HangDetector(tmp_path)
    reported = list[tuple[int, HangReport]]()
    for speed in [*[100.0] * 12, *[1000.0] * 5, *[100.0] * 12]:
        speeds.append(speed)
        rows = [f"{10 * number},{speed}\n" for number, speed in enumerate(speeds, 1)]
        (tmp_path / "metrics.csv").write_text("step,tokens_per_s\n" + "".join(rows))
        if (report := detector.find_collapse()) is not None:
            reported.append((len(speeds), report))
    assert [rows for rows, _ in reported] == [40, 57]
    reason = reported[0][1].reason
    assert "at most 100 tokens/s in the last 10 logged steps, up to step 400" in reason
