"""Histories in memory: equal to those read from files, resumable, and of bounded size."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from nsa.gates.schedule import Gate
from nsa.monitor.csv_files import MetricsCsv, SelectionCsv
from nsa.monitor.heartbeat import Heartbeat
from nsa.monitor.history import HistoryRecorder, RunHistory, read_rank
from tests.gates.files import judge_files
from tests.monitor.records import make_health, make_info, make_record
from tests.monitor.run_folders import CONFIG, beats, write_beats, write_metrics


def beating(folder: Path, history: HistoryRecorder, **changes: Any) -> Heartbeat:
    values: dict[str, Any] = {"rank": 0, "backend": "deepspeed-zero1", "seconds": 0.01}
    return Heartbeat(folder, history=history, **{**values, **changes})


def test_a_step_is_in_the_history_at_once_though_no_line_is_on_disk(tmp_path: Path) -> None:
    history = HistoryRecorder(tmp_path, 0, [(0, 2), (2, 4)])
    heartbeat = beating(tmp_path / "no" / "folder", history, seconds=100)
    for step in (1, 2, 3):
        heartbeat.step_start(step)
        heartbeat.enter("forward")
        heartbeat.step_end(step, tokens=64 * step, skipped=step // 2)
    assert (history.up_to(2).step, history.up_to(2).spans) == (2, [(0, 2)])
    later = history.up_to(4)
    assert (later.step, later.spans, later.skipped, later.processes) == (3, [(0, 3)], 1, 1)
    heartbeat.close("finished")


def test_a_resumed_process_continues_the_history_that_earlier_ones_wrote(tmp_path: Path) -> None:
    write_metrics(tmp_path, 4, log_every=1)
    for start in (0, 2):
        history = HistoryRecorder(tmp_path, 0, [(0, 4)])
        heartbeat = beating(tmp_path, history, step=start)
        for step in range(start + 1, start + 3):
            heartbeat.step_start(step)
            heartbeat.enter("forward")
            heartbeat.step_end(step, tokens=64 * step, skipped=1)
        heartbeat.close("finished")
    stored = HistoryRecorder(tmp_path, 0, [(0, 4)]).up_to(4)
    assert stored == history.up_to(4)
    assert (stored.spans, stored.processes, stored.status) == ([(0, 2), (2, 4)], 2, "finished")
    assert stored.backend == "deepspeed-zero1"
    result = judge_files(tmp_path, Gate("smoke", 4), CONFIG)
    criteria = {criterion.name: criterion for criterion in result.criteria}
    assert criteria["steps recorded"].ok
    assert criteria["slowest rank's step"].value == 4
    assert criteria["skipped-step fraction"].value == 0.25


def test_a_process_that_only_wrote_where_it_resumes_has_done_nothing(tmp_path: Path) -> None:
    """A killed run that resumes at 200 without having recorded steps 101 to 200."""
    late = beats(300, start=200, pid=900)
    late[0]["step"] = 0
    write_beats(tmp_path, beats(100), late)
    assert read_rank(tmp_path, 0).spans == [(0, 100), (200, 300)]


def test_a_history_of_fifty_thousand_steps_stays_small(tmp_path: Path) -> None:
    history = HistoryRecorder(tmp_path, 0, [(0, 50_000)])
    line = beats(0)[0]
    for step in range(1, 50_001):
        moved = {"event": "step_end", "step": step, "mono": float(step)}
        history.add({**line, **moved, "phase": "step", "gpu_busy": step % 100 / 100})
    full = history.up_to(50_000)
    assert full.spans == [(0, 50_000)]
    assert sum(full.gpu_busy.values()) == 50_000
    assert len(pickle.dumps(full)) < 50_000


def test_rows_in_memory_equal_those_that_a_resumed_run_reads(tmp_path: Path) -> None:
    live = RunHistory()
    observers = [live, MetricsCsv(), SelectionCsv()]
    for observer in observers:
        observer.on_start(make_info(tmp_path))
    for step in range(1, 13):
        loss = {"val_loss": 2.5, "mfu": 0.5} if step % 4 == 0 else {"tokens_per_s": None}
        for observer in observers:
            observer.on_step(make_record(step, health=make_health(), **loss))
    resumed = RunHistory()
    resumed.on_start(make_info(tmp_path, start_step=12))
    assert resumed.metrics == live.metrics
    assert [row["step"] for row in live.metrics.rows] == [*range(1, 13)]
    for read, kept in zip(resumed.selection.rows, live.selection.rows, strict=True):
        assert read == pytest.approx(kept, rel=1e-5)  # the file has six digits
