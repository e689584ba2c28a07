"""metrics.csv, selection.csv and fallbacks.csv: exact values, resumed runs, full disks."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nsa.model import AttentionConfig, LanguageModel, ModelConfig
from nsa.monitor.artifacts import read_table
from nsa.monitor.health import HealthRecorder
from nsa.monitor.observer import SELECTOR_STATISTICS, BackgroundWriter, Observers, StepRecord
from nsa.monitor.outputs import (
    SELECTION_COLUMNS,
    CsvObserver,
    FallbacksCsv,
    metrics_csv,
    selection_csv,
)
from nsa.spec import NSASpec
from tests.engine.runs import read_metrics
from tests.monitor.records import NO_FREE_BLOCKS, files_no_longer_than, make_layers, make_record

HEADER = "step,tokens,loss,val_loss,bits_per_byte,lr,grad_norm,tokens_per_s,mfu,memory_gb,seconds"
REASON = 'it has no "float64", and commas'
Counts = dict[tuple[str, str, str], int]


def log(
    observer: CsvObserver, run_dir: Path, records: list[StepRecord], start_step: int = 0
) -> Path:
    observer.on_start(run_dir, start_step)
    for record in records:
        observer.on_step(record)
    return run_dir / observer.file_name


def healthy(step: int, layers: int = 2) -> StepRecord:
    return make_record(step, layers=make_layers(layers, overlap=step / 64))


def test_values_read_back_exactly_and_missing_ones_are_empty_cells(tmp_path: Path) -> None:
    full = make_record(2, val_loss=2 / 3, bits_per_byte=math.pi, mfu=0.1)
    warm_up = make_record(1, tokens_per_s=None, grad_norm=None, loss=float("inf"))
    text = log(metrics_csv(), tmp_path, [warm_up, full]).read_text()
    lines = text.splitlines()
    assert lines[0] == HEADER
    assert lines[1] == f"1,4096,inf,,,{1e-4 / 3!r},,,,{15.6 / 7!r},{1 / 3!r}"
    rows = read_metrics(tmp_path)
    assert [",".join(row) for row in rows] == [HEADER] * 2
    for row, record in zip(rows, [warm_up, full], strict=True):
        assert row == {column: getattr(record, column) for column in HEADER.split(",")}


@pytest.mark.parametrize("observer", [metrics_csv, selection_csv])
def test_the_table_of_a_resumed_run_is_that_of_an_uninterrupted_one(
    observer: Callable[[], CsvObserver], tmp_path: Path
) -> None:
    path = log(observer(), tmp_path, [healthy(step) for step in range(1, 9)])
    uninterrupted = path.read_text()
    log(observer(), tmp_path, [make_record(step, loss=9.0) for step in range(1, 7)])
    log(observer(), tmp_path, [healthy(step) for step in range(1, 7)])
    path.write_text(path.read_text() + "7,0,0.1")
    log(observer(), tmp_path, [healthy(step) for step in range(5, 9)], start_step=4)
    assert path.read_text() == uninterrupted


@pytest.mark.parametrize("content", ["precious\n", f"{HEADER}\n"])
def test_no_file_is_written_through_a_symbolic_link(content: str, tmp_path: Path) -> None:
    (target := tmp_path / "target").write_text(content)
    names = ("metrics.csv", "fallbacks.csv")
    for name in names:
        (tmp_path / name).symlink_to(target)
    log(metrics_csv(), tmp_path, [make_record(1)])
    fallbacks = FallbacksCsv(lambda: {("select", "triton", "no GPU"): 1})
    fallbacks.on_start(tmp_path, 0)
    fallbacks.on_end("finished")
    assert not any((tmp_path / name).is_symlink() for name in names), "replaced or moved aside"
    assert target.read_text() == content

    metrics = metrics_csv()
    metrics.on_start(tmp_path, 1)
    (tmp_path / "metrics.csv").unlink()
    (tmp_path / "metrics.csv").symlink_to(target)
    with pytest.raises(OSError, match="is a symbolic link"):
        metrics.on_step(make_record(2))
    assert target.read_text() == content


@pytest.mark.parametrize("start_step", [0, 1])
@pytest.mark.parametrize("header", ["time,loss", HEADER + ",more", HEADER[:-8], '{"step": 1}', "�"])
def test_a_file_with_other_columns_is_moved_and_never_written_into(
    header: str, start_step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = f"{header}\n1,2.0\n"
    for name in ("metrics.1.csv", "metrics.2.csv"):
        (tmp_path / "metrics.csv").write_text(theirs)
        observers = Observers([(metrics_csv(), BackgroundWriter("metrics.csv"))])
        observers.on_start(tmp_path, start_step)
        observers.on_step(make_record(2))
        observers.close()
        assert (tmp_path / name).read_text() == theirs
        assert [row["step"] for row in read_metrics(tmp_path)] == [2]
        assert f"metrics.csv: has other columns ({header[:20]}" in capsys.readouterr().err.replace(
            "'", ""
        )


def test_lines_that_are_no_rows_do_not_lose_the_file(tmp_path: Path) -> None:
    records = [make_record(step) for step in range(1, 3)]
    path = log(metrics_csv(), tmp_path, records[:1])
    expected = path.read_text()
    path.write_bytes(expected.encode() + b"\xff\xfe" + b"," * 10 + b"\n" + b"x" + b"," * 10 + b"\n")
    log(metrics_csv(), tmp_path, [], start_step=1)
    assert path.read_text() == expected


def test_each_logged_step_has_one_row_per_layer_that_reads_back(tmp_path: Path) -> None:
    without_free = make_layers(1, **NO_FREE_BLOCKS)
    log(selection_csv(), tmp_path, [healthy(1), make_record(7, layers=without_free)])
    rows = read_table(tmp_path / "selection.csv").rows
    assert [(row["step"], row["layer"]) for row in rows] == [(1, 0), (1, 1), (7, 0)]
    second, last = rows[1], rows[2]
    assert [second[f"gate_{branch}"] for branch in ("cmp", "sel", "win")] == [0.125, 0.25, 0.375]
    assert second["gate_sel_std"] == pytest.approx(1 / 3, rel=1e-5)
    assert (second["choosing"], second["entropy"]) == (0.75, 0.5625)
    assert (second["overlap"], second["distance"]) == (1 / 64, 6.5)
    assert set(SELECTION_COLUMNS) - last.keys() == {"entropy", "overlap", "distance"}


def test_a_later_row_of_a_step_counts_and_lines_that_are_no_rows_are_counted(
    tmp_path: Path,
) -> None:
    (path := tmp_path / "metrics.csv").write_text(
        "step,loss\n2,5\n2,4\n1,6\ntorn\n1.5,3\n-1,3\n3,3"
    )
    table = read_table(path)
    assert table.rows == [{"step": 1, "loss": 6}, {"step": 2, "loss": 4}]
    assert table.problem == "metrics.csv: 3 lines could not be read"
    path.write_text("step,loss\n")
    assert read_table(path).problem == "metrics.csv holds no rows"
    path.write_text("loss,step\n5,2\n")
    assert read_table(path).problem == "metrics.csv: the first column is not 'step'"


def test_a_run_without_sparse_layers_gets_no_file(tmp_path: Path) -> None:
    log(selection_csv(), tmp_path, [make_record(1), make_record(2)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("observer", "part"),
    [(metrics_csv(), 20), (selection_csv(), 105)],  # of a row; one row and a half
    ids=["metrics", "selection"],
)
def test_a_step_that_does_not_fit_on_the_disk_writes_none_of_its_rows(
    observer: CsvObserver, part: int, tmp_path: Path
) -> None:
    path = log(observer, tmp_path, [healthy(1)])
    with (
        files_no_longer_than(path.stat().st_size + part),
        pytest.raises(OSError, match="bytes were written"),
    ):
        observer.on_step(healthy(2))
    observer.on_step(healthy(3))
    assert {row["step"] for row in read_table(path).rows} == {1, 3}
    assert len({line.count(",") for line in path.read_text().splitlines()}) == 1


def test_a_run_with_the_selector_loss_has_a_column_for_it(tmp_path: Path) -> None:
    spec = NSASpec(8, 4, 8, select_top=3, init_blocks=1, local_blocks=1, window=16)
    attention = AttentionConfig(spec=spec, selector_loss=1.0)
    sizes = {"vocab_size": 64, "layers": 2, "width": 32, "heads": 4, "head_dim": 8}
    model = LanguageModel(ModelConfig(**sizes, mlp_width=32, attention=attention))
    recorder = HealthRecorder(model.sparse_layers(), spec)
    recorder.arm()
    ids = torch.randint(64, (1, 96))
    model(ids, labels=ids).backward()
    path = log(
        selection_csv(selector_loss=True), tmp_path, [make_record(1, layers=recorder.read())]
    )
    rows = read_table(path).rows
    assert [row["layer"] for row in rows] == [0, 1]
    assert all(0 < row["selector_loss"] < 10 for row in rows)
    assert path.read_text().splitlines()[0].split(",")[-3:] == [*SELECTOR_STATISTICS]
    for row in rows:
        assert 0 < row["recall_random"] < 1
        assert 0 < row["recall"] < 1


def test_fallbacks_are_written_once_there_are_any_and_at_the_end(tmp_path: Path) -> None:
    counts: Counts = {}
    observer, path = FallbacksCsv(lambda: counts), tmp_path / "fallbacks.csv"

    def rows() -> list[list[str]]:
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
        assert header == ["operation", "backend", "reason", "calls"]
        return rows

    observer.on_start(tmp_path, 0)
    observer.on_step(make_record(1))
    assert not path.exists(), "no fallback yet"
    observer.on_end("finished")
    assert rows() == []
    counts["window_attention", "triton", REASON] = 2
    counts["select_blocks", "triton", REASON] = 1
    observer.on_step(make_record(2))
    select, window = ["select_blocks", "triton", REASON], ["window_attention", "triton", REASON]
    assert rows() == [[*select, "1"], [*window, "2"]]
    for number, write in (
        (3, lambda: observer.on_step(make_record(4))),
        (4, lambda: observer.on_end("failed")),
    ):
        counts["window_attention", "triton", REASON] = number
        write()
        assert rows() == [[*select, "1"], [*window, str(number)]]
    path.unlink()
    observer.on_step(make_record(5))
    assert not path.exists(), "no count has changed"
