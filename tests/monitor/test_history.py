"""A rank's history: read from its heartbeat file, over restarts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from nsa.monitor.artifacts import MAX_HEARTBEAT_BYTES, read_rank
from nsa.monitor.heartbeat import Heartbeat
from tests.monitor.run_folders import beats, write_beats


def test_processes_of_one_run_add_up_to_one_history(tmp_path: Path) -> None:
    for start in (0, 2):
        heartbeat = Heartbeat(tmp_path, rank=1, backend="deepspeed-zero1", seconds=0.01, step=start)
        for step in range(start + 1, start + 3):
            heartbeat.step_start(step)
            heartbeat.enter("forward")
            heartbeat.step_end(step, tokens=64 * step, skipped=1)
        assert heartbeat.flush()
        history = read_rank(tmp_path, 1)
        assert (history.spans[-1], history.status) == ((start, start + 2), ""), "before the end"
        heartbeat.close("finished")
    history = read_rank(tmp_path, 1)
    assert (history.rank, history.step, history.spans) == (1, 4, [(0, 2), (2, 4)])
    assert (history.processes, history.status, history.skipped) == (2, "finished", 1)
    assert (history.backend, history.problem) == ("deepspeed-zero1", "")


def test_a_process_that_only_wrote_where_it_resumes_has_done_nothing(tmp_path: Path) -> None:
    """A killed run that resumes at 200 without having recorded steps 101 to 200."""
    late = beats(300, start=200, pid=900)
    late[0]["step"] = 0
    write_beats(tmp_path, beats(100), late)
    assert read_rank(tmp_path, 0).spans == [(0, 100), (200, 300)]


def test_the_first_step_of_each_process_which_compiles_is_no_pause(tmp_path: Path) -> None:
    for start in (0, 3):
        lines = beats(start + 3, start=start, pid=100 + start)
        (first, *_) = [line for line in lines if line["phase"] == "backward"]
        first["since"] = 900.0
        write_beats(tmp_path, lines)
        assert read_rank(tmp_path, 0).pause == 0.1


def test_only_the_highest_peaks_and_the_mean_utilization_are_kept(tmp_path: Path) -> None:
    lines = beats(5_000)
    for line in lines:
        line["memory_gb"] = 10.0 + (line["step"] >= 200) - (line["step"] >= 300)
        line["gpu_busy"] = line["step"] / 5_000
    write_beats(tmp_path, lines)
    history = read_rank(tmp_path, 0)
    assert history.memory == [(0, 10.0), (200, 11.0)]
    assert history.gpu_utilization == pytest.approx(0.5, abs=2e-4)
    assert len(json.dumps(asdict(history))) < 1_000, "ranks send it to each other"


def test_a_sparse_heartbeat_file_of_200_gb_is_not_read_and_named(tmp_path: Path) -> None:
    with (tmp_path / "heartbeat_rank0.jsonl").open("wb") as file:
        file.truncate(200 * 10**9)
    problem = read_rank(tmp_path, 0).problem
    assert problem.startswith("heartbeat_rank0.jsonl cannot be read: ")
    assert f"more than {MAX_HEARTBEAT_BYTES:,} bytes" in problem
