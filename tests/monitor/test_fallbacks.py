from __future__ import annotations

import csv
from pathlib import Path

from nsa.monitor.csv_files import FallbacksCsv
from tests.monitor.records import make_info, make_record

REASON = 'it has no "float64", and commas'
Counts = dict[tuple[str, str, str], int]


def start(run_dir: Path, counts: Counts) -> FallbacksCsv:
    observer = FallbacksCsv(lambda: counts)
    observer.on_start(make_info(run_dir))
    return observer


def read(run_dir: Path) -> list[list[str]]:
    with (run_dir / "fallbacks.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["operation", "backend", "reason", "calls"]
    return rows


def test_fallbacks_are_written_during_the_run_and_at_its_end(tmp_path: Path) -> None:
    counts: Counts = {}
    observer = start(tmp_path, counts)
    observer.on_step(make_record(1))
    assert not (tmp_path / "fallbacks.csv").exists(), "no fallback yet"
    counts["window_attention", "triton", REASON] = 2
    counts["select_blocks", "triton", REASON] = 1
    observer.on_step(make_record(2))
    expected = [["select_blocks", "triton", REASON, "1"], ["window_attention", "triton", REASON]]
    assert read(tmp_path) == [expected[0], [*expected[1], "2"]]
    counts["window_attention", "triton", REASON] += 1
    observer.on_end("failed")
    assert read(tmp_path) == [expected[0], [*expected[1], "3"]]


def test_steps_without_new_fallbacks_write_nothing(tmp_path: Path) -> None:
    observer = start(tmp_path, {("select_blocks", "triton", REASON): 1})
    observer.on_step(make_record(1))
    (tmp_path / "fallbacks.csv").unlink()
    observer.on_step(make_record(2))
    assert not (tmp_path / "fallbacks.csv").exists()


def test_a_run_without_fallbacks_writes_an_empty_table(tmp_path: Path) -> None:
    observer = start(tmp_path, {})
    observer.on_end("finished")
    assert read(tmp_path) == []
