"""Progress lines: which steps are printed, what they say, and what a run ends with."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nsa.monitor.observer import StepRecord
from nsa.monitor.outputs import Progress
from tests.monitor.records import make_record

Captured = pytest.CaptureFixture[str]


def show(
    records: list[StepRecord], run_dir: Path, capsys: Captured, status: str = "done"
) -> list[str]:
    """Return the lines of a run of 300 steps that ends after these."""
    progress = Progress(last_step=300)
    progress.on_start(run_dir, 0)
    for record in records:
        progress.on_step(record)
    progress.on_message("saved")
    progress.on_end(status)
    return capsys.readouterr().out.splitlines()


def test_a_short_run_that_logs_every_step_prints_few_lines(
    tmp_path: Path, capsys: Captured
) -> None:
    records = [
        make_record(step, val_loss=2.5 if step == 101 else None, bits_per_byte=1.25, mfu=0.375)
        for step in range(1, 301)
    ]
    lines = show(records, tmp_path, capsys)
    steps = [line for line in lines if line.startswith("step ") and "/300" in line]
    first, validation, last = steps
    assert first.startswith("step 1/300  loss 1.6667  ")
    assert validation == (
        "step 101/300  loss 0.0485  val 2.5000  1.2500 bits/byte  142,857 tokens/s  MFU 37.5%  "
        "ETA 01:06"
    )
    assert last.startswith("step 300/300")
    assert "ETA 00:00" in last
    assert all("142,857 tokens/s" in line for line in steps)
    assert lines[-2:] == ["saved", "done"]


def test_the_last_step_of_a_run_that_ends_early_is_printed(
    tmp_path: Path, capsys: Captured
) -> None:
    records = [make_record(step) for step in range(1, 8)]
    lines = show(records, tmp_path, capsys)
    assert [line.split()[1] for line in lines if "/300" in line] == ["1/300", "7/300"]
    assert lines[-1] == "done"
    lines = show(records, tmp_path / "my run", capsys, "finished")
    assert lines[-3] == f"  nsa report '{tmp_path}/my run'"


def printed(times: dict[int, float], capsys: Captured) -> list[list[str]]:
    """Return the first and the last cell of the lines of a run whose steps end at these times."""
    with pytest.MonkeyPatch.context() as patch:
        progress = Progress(last_step=1_000)
        for step, seconds in times.items():
            patch.setattr(time, "monotonic", lambda seconds=seconds: seconds)
            progress.on_step(make_record(step, seconds=7.0))
    lines = capsys.readouterr().out.splitlines()
    return [[line.split()[1], line.split()[-1]] for line in lines]


def test_a_line_is_printed_every_ten_seconds_with_the_rest_at_this_steps_speed(
    capsys: Captured,
) -> None:
    steps = printed({1: 0.0, 2: 9.0, 3: 10.0, 4: 19.0, 52: 19.5, 103: 20.0}, capsys)
    assert steps == [["1/1000", "1:56:33"], ["3/1000", "1:56:19"], ["103/1000", "1:44:39"]]
