from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nsa.model import AttentionConfig, LanguageModel, ModelConfig
from nsa.monitor.artifacts import read_table
from nsa.monitor.csv_files import SELECTION_COLUMNS, SelectionCsv
from nsa.monitor.health import HealthRecorder
from nsa.monitor.observer import StepRecord
from nsa.spec import NSASpec
from tests.monitor.records import (
    NO_FREE_PICKS,
    files_no_longer_than,
    make_health,
    make_info,
    make_record,
)


def healthy(step: int, layers: int = 2) -> StepRecord:
    return make_record(step, health=make_health(layers, overlap=step / 64))


def log(run_dir: Path, records: list[StepRecord], start_step: int = 0) -> None:
    observer = SelectionCsv()
    observer.on_start(make_info(run_dir, start_step=start_step))
    for record in records:
        observer.on_step(record)


def test_each_logged_step_has_one_row_per_layer_that_reads_back(tmp_path: Path) -> None:
    unchosen = make_health(1, **NO_FREE_PICKS)
    log(tmp_path, [healthy(1), make_record(7, health=unchosen)])
    rows = read_table(tmp_path / "selection.csv").rows
    assert [(row["step"], row["layer"]) for row in rows] == [(1, 0), (1, 1), (7, 0)]
    second, last = rows[1], rows[2]
    assert [second[f"gate_{branch}"] for branch in ("cmp", "sel", "win")] == [0.125, 0.25, 0.375]
    assert second["gate_sel_std"] == pytest.approx(1 / 3, rel=1e-5)
    assert second["gate_win_saturated"] == 0.25
    assert (second["choosing"], second["forced"], second["entropy"]) == (0.75, 0.1875, 0.5625)
    assert (second["overlap"], second["distance"]) == (1 / 64, 6.5)
    assert (second["distance_from_1"], second["distance_from_4"]) == (0.5, 0)
    assert second["distance_from_512"] == 0.5
    assert set(SELECTION_COLUMNS) - last.keys() == {
        "entropy",
        "overlap",
        *(name for name in SELECTION_COLUMNS if "distance" in name),
    }


def test_a_resumed_run_reads_as_an_uninterrupted_one(tmp_path: Path) -> None:
    log(tmp_path / "uninterrupted", [healthy(step) for step in range(1, 9)])
    log(tmp_path / "resumed", [healthy(step) for step in range(1, 7)])
    table = tmp_path / "resumed/selection.csv"
    table.write_text(table.read_text() + "7,0,0.1")
    log(tmp_path / "resumed", [healthy(step) for step in range(5, 9)], start_step=4)
    assert table.read_text() == (tmp_path / "uninterrupted/selection.csv").read_text()


def test_a_run_without_sparse_layers_gets_no_file(tmp_path: Path) -> None:
    log(tmp_path, [make_record(1), make_record(2)])
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_does_not_fit_on_the_disk_writes_none_of_its_rows(tmp_path: Path) -> None:
    observer = SelectionCsv()
    observer.on_start(make_info(tmp_path))
    observer.on_step(healthy(1))
    one_and_a_half_rows = (tmp_path / "selection.csv").stat().st_size + 150
    with files_no_longer_than(one_and_a_half_rows), pytest.raises(OSError, match="were written"):
        observer.on_step(healthy(2))
    observer.on_step(healthy(3))
    rows = read_table(tmp_path / "selection.csv").rows
    assert [row["step"] for row in rows] == [1, 1, 3, 3]


def test_a_run_with_the_selector_loss_has_a_column_for_it(tmp_path: Path) -> None:
    spec = NSASpec(8, 4, 8, select_top=3, init_blocks=1, local_blocks=1, window=16)
    attention = AttentionConfig(spec=spec, selector_loss=1.0)
    sizes = {"vocab_size": 64, "layers": 2, "width": 32, "heads": 4, "head_dim": 8}
    model = LanguageModel(ModelConfig(**sizes, mlp_width=32, attention=attention))
    recorder = HealthRecorder(model.sparse_layers(), spec)
    recorder.arm()
    ids = torch.randint(64, (1, 96))
    model(ids, labels=ids).backward()
    health = recorder.read()
    assert health is not None
    csv = SelectionCsv(selector_loss=True)
    csv.on_start(make_info(tmp_path))
    csv.on_step(make_record(1, health=health))
    rows = read_table(tmp_path / "selection.csv").rows
    assert [row["layer"] for row in rows] == [0, 1]
    assert all(0 < row["selector_loss"] < 10 for row in rows)
    assert [*rows[0]][-1] == "selector_loss"
