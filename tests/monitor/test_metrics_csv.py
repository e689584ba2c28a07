from __future__ import annotations

import math
from pathlib import Path

import pytest

from nsa.monitor.csv_files import MetricsCsv, read_metrics
from nsa.monitor.observer import StepRecord
from nsa.monitor.writer import BackgroundWriter, Observers
from tests.monitor.records import files_no_longer_than, make_info, make_record

HEADER = "step,tokens,loss,val_loss,bits_per_byte,lr,grad_norm,tokens_per_s,mfu,memory_gb,seconds"


def log(run_dir: Path, records: list[StepRecord], start_step: int = 0) -> str:
    observer = MetricsCsv()
    observer.on_start(make_info(run_dir, start_step=start_step))
    for record in records:
        observer.on_step(record)
    return (run_dir / "metrics.csv").read_text()


def test_values_read_back_exactly_and_missing_ones_are_empty_cells(
    tmp_path: Path,
) -> None:
    full = make_record(2, val_loss=2 / 3, bits_per_byte=math.pi, mfu=0.1)
    warm_up = make_record(1, tokens_per_s=None, grad_norm=None, loss=float("inf"))
    text = log(tmp_path, [warm_up, full])
    lines = text.splitlines()
    assert lines[0] == HEADER
    assert lines[1] == f"1,4096,inf,,,{1e-4 / 3!r},,,,{15.6 / 7!r},{1 / 3!r}"
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [",".join(row) for row in rows] == [HEADER] * 2
    for row, record in zip(rows, [warm_up, full], strict=True):
        assert row == {column: getattr(record, column) for column in HEADER.split(",")}


def test_a_resumed_run_reads_as_an_uninterrupted_one(tmp_path: Path) -> None:
    records = [make_record(step) for step in range(1, 9)]
    uninterrupted = log(tmp_path / "uninterrupted", records)
    log(
        tmp_path / "resumed",
        [make_record(step, loss=9.0 if step > 4 else 5 / (step + 2)) for step in range(1, 7)],
    )
    resumed = log(tmp_path / "resumed", records[4:], start_step=4)
    assert resumed == uninterrupted


def test_a_torn_row_is_dropped_on_resume(tmp_path: Path) -> None:
    records = [make_record(step) for step in range(1, 5)]
    text = log(tmp_path, records)
    for torn_at in (len(text) - 1, len(text) - 9, len(text) - 60):
        (tmp_path / "metrics.csv").write_text(text[:torn_at])
        assert len(read_metrics(tmp_path / "metrics.csv")) == 3
        assert log(tmp_path, records[3:], start_step=3) == text


def test_a_fresh_run_in_an_old_folder_starts_an_empty_table(tmp_path: Path) -> None:
    log(tmp_path, [make_record(step) for step in range(1, 5)])
    assert log(tmp_path, []) == HEADER + "\n"


def test_a_row_that_does_not_fit_on_the_disk_is_not_torn(tmp_path: Path) -> None:
    observer = MetricsCsv()
    observer.on_start(make_info(tmp_path))
    observer.on_step(make_record(1))
    size = (tmp_path / "metrics.csv").stat().st_size
    with files_no_longer_than(size + 20), pytest.raises(OSError, match="bytes were written"):
        observer.on_step(make_record(2))
    observer.on_step(make_record(3))
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.csv")] == [1, 3]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize("start_step", [0, 1])
def test_a_file_with_other_columns_is_never_overwritten(
    tmp_path: Path, start_step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss\n1,2.0\n")
    observers = Observers([(MetricsCsv(), BackgroundWriter("metrics.csv"))])
    observers.on_start(make_info(tmp_path, start_step=start_step))
    observers.on_step(make_record(2))
    observers.close()
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n1,2.0\n"
    assert "the columns are 'step,loss'" in capsys.readouterr().err
