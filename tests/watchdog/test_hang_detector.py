"""HangDetector: limits on heartbeats, throughput collapse."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from nsa.watchdog.hang_detector import HangDetector, HangReport
from tests.monitor.heartbeats import make_beat, write_limits

CONFIRM = 0.05  # seconds


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
    assert set(detector.check({}).messages) == {
        f"{folder} cannot be written (No such file or directory), so missing heartbeats prove "
        "nothing"
    }


def test_a_disk_is_tested_once_heartbeats_are_late(tmp_path: Path) -> None:
    """Else the time in which it takes none would count as silence later."""
    folder = tmp_path / "run"
    write_limits(folder)
    for ago, tested in ((0.0, False), (5.0, True)):
        detector = HangDetector(folder)
        beats = {0: make_beat(0, mono=time.monotonic() - ago)}
        detector.find_hang(beats, time.monotonic())
        folder.rename(tmp_path / "elsewhere")
        detector.find_hang(beats, time.monotonic())
        (tmp_path / "elsewhere").rename(folder)
        assert bool(detector.check({}).messages) == tested


def test_a_rank_that_writes_again_after_a_hang_of_the_disk_is_not_judged_by_old_heartbeats(
    tmp_path: Path,
) -> None:
    write_limits(tmp_path)
    detector, silent = HangDetector(tmp_path), {0: make_beat(0, mono=time.monotonic() - 60)}
    assert detector.find_hang(silent, time.monotonic()) is None
    time.sleep(1.5 * CONFIRM)
    assert detector.find_hang({0: make_beat(0)}, time.monotonic()) is None
    assert detector.find_hang(silent, time.monotonic()) is None, "each hang has to last"


def test_of_the_ranks_above_their_limits_the_one_that_is_so_for_longest_is_reported(
    tmp_path: Path,
) -> None:
    """The others may wait for it."""
    write_limits(tmp_path, compute=10, save=1_000)
    ranks = {
        number: make_beat(number, phase=phase, since=since)
        for number, phase, since in (
            *((0, "forward", 11.0), (1, "backward", 60.0)),
            *((2, "data", 12.0), (3, "save", 900.0)),
        )
    }
    report = find_hang(HangDetector(tmp_path), ranks)
    assert report is not None
    assert (report.rank, report.phase, report.seconds) == (1, "backward", 60.0)


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
def test_each_phase_has_a_limit_of_its_own_which_0_switches_off(
    phase: str, setting: str, tmp_path: Path
) -> None:
    others = dict.fromkeys({"setup", "compute", "save"} - {setting}, 9)
    for limit, hangs in ((9, True), (11, False), (0, False)):
        write_limits(folder := tmp_path / str(limit), **others, **{setting: limit})
        report = find_hang(HangDetector(folder), {0: make_beat(0, phase=phase, since=10.0)})
        assert (report is not None) == hangs, limit
        if report is not None:
            assert report.reason == (
                f"rank 0 has been in {phase} after step 7 for 10 s (limit monitor.watch.{setting} "
                "= 9)"
            )
            assert (report.rank, report.phase, report.step) == (0, phase, 7)
            assert (report.seconds, report.limit) == (10.0, 9)


def test_without_a_limit_of_silence_a_phase_lasts_until_now(tmp_path: Path) -> None:
    old = {0: make_beat(0, since=3.0, mono=time.monotonic() - 10)}
    for silence, hangs in ((0, True), (1_000, False)):
        write_limits(folder := tmp_path / str(silence), compute=8, silence=silence)
        assert (find_hang(HangDetector(folder), old) is not None) == hangs


def test_a_finished_rank_that_stays_is_reported_after_the_limit_of_compute(
    tmp_path: Path,
) -> None:
    write_limits(tmp_path, compute=9, silence=1)
    for ago, hangs in ((8, False), (10, True)):
        beat = make_beat(0, event="end", status="finished", mono=time.monotonic() - ago)
        report = find_hang(HangDetector(tmp_path), {0: beat})
        assert (report is not None) == hangs
    assert report is not None
    assert report.reason.startswith("rank 0 has written its last heartbeat but not exited for 10 s")


def test_limits_that_cannot_be_read_stay_as_they_were(tmp_path: Path) -> None:
    write_limits(tmp_path, compute=9)
    detector, hanging = HangDetector(tmp_path), {0: make_beat(0, since=10.0)}
    assert find_hang(detector, hanging) is not None
    write_limits(tmp_path, compute=-1)
    assert detector.find_hang(hanging, time.monotonic()) is not None
    (message,) = detector.check({}).messages
    assert "monitor.watch cannot be read, so its limits stay" in message
    write_limits(tmp_path, compute=11)
    assert find_hang(detector, hanging) is None


@pytest.mark.parametrize(
    ("rates", "collapsed"),
    [
        ([1_000.0] * 11 + [199.0] * 10, True),
        ([1_000.0] * 11 + [200.0] * 10, False),
        ([1_000.0] * 11 + [199.0] * 9, False),
        ([1_000.0] * 9 + [1.0] * 10, False),
        ([1_000.0] * 20, False),
    ],
)
def test_a_collapse_is_ten_logged_steps_below_a_fifth_of_the_median(
    rates: list[float], collapsed: bool, tmp_path: Path
) -> None:
    rows = [f"{number},{rate}\n" for number, rate in enumerate(rates, 1)]
    (tmp_path / "metrics.csv").write_text("step,tokens_per_s\n" + "".join(rows))
    assert (HangDetector(tmp_path).find_collapse() is not None) == collapsed


@pytest.mark.parametrize(
    ("action", "halts", "warns"), [("ignore", False, 0), ("warn", False, 1), ("halt", True, 0)]
)
def test_a_collapse_is_ignored_logged_or_halts(
    action: str, halts: bool, warns: int, tmp_path: Path
) -> None:
    write_limits(tmp_path, on_collapse=action)
    rows = [f"{number},{1_000 if number < 30 else 1}\n" for number in range(1, 41)]
    (tmp_path / "metrics.csv").write_text("step,tokens_per_s\n" + "".join(rows))
    (tmp_path / "heartbeat_rank0.jsonl").write_text(json.dumps(make_beat(0, pid=5)) + "\n")
    detector = HangDetector(tmp_path)
    assert detector.check({}).report is None, "no rank runs, so nothing is judged"
    state = detector.check({0: 5})
    assert (state.report is not None) == halts
    assert len(state.messages) == warns
    assert all(message.startswith("WARNING: throughput") for message in state.messages)


def test_halt_json_keeps_what_is_not_set_again(tmp_path: Path) -> None:
    detector = HangDetector(tmp_path)
    assert not detector.add_restart({"step": 3}), "without config.yaml there is nothing to resume"
    detector.update_halt({"reason": "a", "rank": 1})
    detector.update_halt({"reason": "b"})
    (tmp_path / "config.yaml").touch()
    assert detector.add_restart({"step": 4})
    halt = json.loads((tmp_path / "halt.json").read_text())
    assert halt == {"restarts": [{"step": 3}, {"step": 4}], "reason": "b", "rank": 1}
