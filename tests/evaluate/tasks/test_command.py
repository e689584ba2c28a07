"""`nsa tasks` trains every variant, writes results and plots, and ends cleanly."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from nsa.cli import main
from nsa.evaluate.tasks import evaluate, report, train
from nsa.evaluate.tasks.command import MODELS, OTHERS
from nsa.evaluate.tasks.data import recall
from nsa.evaluate.tasks.evaluate import FACT_COUNTS, WITHOUT_SELECTION, evaluate_all
from nsa.evaluate.tasks.report import lines, summary_json
from nsa.evaluate.tasks.train import VARIANTS
from tests.data.processes import ends_soon
from tests.engine.runs import BIN
from tests.ranks import spawn_ranks

PNG = b"\x89PNG\r\n"
DEPTHS = (0.0, 0.5, 1.0)
SEEDS = (4, 5)
TinyRun = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A tiny run's folder, and its result before it was summarised for tasks.json."""
    out, results = tmp_path_factory.mktemp("tasks") / "deep/er", list[dict[str, Any]]()

    def keep(result: dict[str, Any]) -> str:
        results.append({**result, "rows": [*result["rows"]]})
        return summary_json(result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "BATCH", 128)
        patch.setattr(evaluate, "SEQUENCES", 4)
        patch.setattr(evaluate, "DEPTHS", DEPTHS)
        patch.setattr(report, "summary_json", keep)
        seeds = [str(seed) for seed in SEEDS]
        call = ["tasks", "--steps", "2", "--seeds", *seeds, "--seq-len", "64", "--out", str(out)]
        assert main(call) == 0
    saved = [len(result["rows"]) for result in results]
    assert saved[0] == 1
    assert len(set(saved)) == len(MODELS) * len(SEEDS), "saved after each model"
    return out, results[-1]


def test_every_variant_is_evaluated_alike_with_every_seed(tiny_run: TinyRun) -> None:
    rows = tiny_run[1]["rows"]
    assert tuple(VARIANTS) == MODELS
    models = {*MODELS, WITHOUT_SELECTION}
    evaluated = [(row["seed"], row["model"]) for row in rows]
    assert sorted(evaluated) == sorted((seed, model) for seed in SEEDS for model in models)
    for row in rows:
        assert [cell["facts"] for cell in row["by_facts"]] == list(FACT_COUNTS)
        grid = [(cell["seq_len"], cell["depth"]) for cell in row["needle"]]
        assert grid == [(length, depth) for length in (32, 64) for depth in DEPTHS]
        for cell in row["needle"]:
            assert cell["distance"] == pytest.approx((1 - cell["depth"]) * cell["seq_len"], abs=2)
        edges = [(cell["from"], cell["below"]) for cell in row["by_distance"]]
        assert edges == [(1, 8), (8, 16), (16, 32), (32, 64)]
        accuracies = [cell["right"] for cell in [*row["needle"], *row["by_distance"]]]
        assert all(0 <= accuracy <= 1 for accuracy in accuracies)


def test_tasks_json_has_one_line_for_each_model_and_seed(tiny_run: TinyRun) -> None:
    folder, result = tiny_run
    text = (folder / "tasks.json").read_text()
    summary = json.loads(text)
    assert len(text.splitlines()) == len(result["rows"]) + len(result) + 3
    assert {**summary, "rows": None} == {**result, "rows": None}
    for row, full in zip(summary["rows"], result["rows"], strict=True):
        assert row.keys() == full.keys()
        assert [cell["far"] for cell in row["by_facts"]] == pytest.approx(
            [cell["far"] for cell in full["by_facts"]], abs=1e-4
        )
        longest = [cell for cell in full["needle"] if cell["seq_len"] == 64]
        far = [cell["right"] for cell in longest if cell["distance"] > result["reach"]]
        assert row["needle"][1] == {
            "seq_len": 64,
            "all": pytest.approx(sum(cell["right"] for cell in longest) / 3, abs=1e-4),
            "far": pytest.approx(sum(far) / len(far), abs=1e-4),
        }


def test_two_hops_have_no_needles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "BATCH", 128)
    monkeypatch.setattr(evaluate, "SEQUENCES", 4)
    call = ["--hops=2", "--models=win", "--steps=1", "--seeds", "1", "--seq-len=64"]
    assert main(["tasks", *call, "--out", str(tmp_path)]) == 0
    assert "needles of" not in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recall.png", "tasks.json"]
    assert json.loads((tmp_path / "tasks.json").read_text())["hops"] == 2


@pytest.mark.full
def test_parallel_jobs_give_the_same_results() -> None:
    pairs = [(4, "dense"), (4, "win")]
    results = [
        [
            {**row, "seconds": None}
            for rows in evaluate_all(train.Task(64), 1, pairs, jobs)
            for row in rows
        ]
        for jobs in (1, 2)
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_a_signal_ends_all_workers_at_once_and_quietly(
    number: signal.Signals, tmp_path: Path
) -> None:
    started = spawn_ranks(BIN / "nsa", "tasks", "--jobs", "2", "--out", str(tmp_path), ranks=0)
    try:
        workers = _workers(started.pids[0])
        if number == signal.SIGINT:
            started.started[0].kill(signal.SIGSTOP)  # so that the workers receive it first
            os.killpg(started.pids[0], signal.SIGINT)  # as a terminal does
            time.sleep(1)
            started.started[0].kill(signal.SIGCONT)
        else:
            started.started[0].kill(signal.SIGTERM)
        assert started.codes(20) == [130]
        assert all(ends_soon(worker) for worker in workers)
    finally:
        started.end(signal.SIGKILL)
    assert started.text("err") == ""


def _workers(pid: int) -> list[int]:
    """Wait for a process's two workers and their resource tracker; return the pids."""
    deadline = time.monotonic() + 120
    children: list[psutil.Process] = []
    while len(children) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
        children = psutil.Process(pid).children()
    return [process.pid for process in children]


def test_random_selection_is_how_often_random_blocks_include_the_fact() -> None:
    task = train.Task(2_048, pattern="recipe")
    spec, generator = task.spec, torch.Generator().manual_seed(evaluate.SEED)
    batch = recall(generator, evaluate.SEQUENCES, 2_048, 16)
    rows, queries = (batch.distance > task.reach).nonzero(as_tuple=True)
    included = []
    for row, query in zip(rows.tolist()[::7], queries.tolist()[::7], strict=True):
        own, fact = query // 64, (query - int(batch.distance[row, query])) // 64
        forced = {0, own - 1, own}
        free = [block for block in range(own + 1) if block not in forced]
        drawn = torch.randperm(len(free), generator=generator)[: spec.select_top - 3].tolist()
        included.append(fact in forced | {free[index] for index in drawn})
    assert evaluate.random_selection(task) == pytest.approx(statistics.fmean(included), abs=0.02)


def test_plots_are_drawn(tiny_run: TinyRun) -> None:
    for name in ("recall.png", "needle.png"):
        assert (tiny_run[0] / name).read_bytes().startswith(PNG)


def test_the_table_counts_only_needles_beyond_the_reach() -> None:
    def cell(seq_len: int, distance: int, accuracy: float) -> dict[str, float]:
        return {"seq_len": seq_len, "distance": distance, "right": accuracy}

    near, far = cell(64, 30, 0.9), cell(64, 31, 0.3)
    rows = [
        {"model": "win", "seed": seed, "parameters": 1_234, "seconds": 10.0,
         "by_facts": [{"facts": facts, "all": 0.8, "far": accuracy} for facts in FACT_COUNTS],
         "twice_as_long": 0.1, "needle": [near, far, cell(32, 31, 0.7)]}
        for seed, accuracy in ((1, 0.25), (2, 0.5), (3, 0.75))
    ]  # fmt: skip
    row = lines({"seq_len": 64, "reach": 30, "rows": rows})[2]
    cells = [text.strip() for text in row.strip("|").split("|")]
    # Student's t with 2 degrees of freedom: 4.303 * 0.25 / √3 = 0.621
    facts, equal = ["50.0% ± 62.1, least 25.0%"] * 4, "{0} ± 0.0, least {0}"
    assert cells == ["win", *facts, equal.format("10.0%"), equal.format("30.0%"), "1,234", "10"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps 0: must be 1 or more"),
        (["--jobs", "0"], "--jobs 0: must be 1 or more"),
        (["--seq-len", "48"], "--seq-len 48: take a multiple of 32, 64 or more"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tasks", *flags, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.splitlines() == [f"nsa: {message}"]
    assert not (tmp_path / "out").exists()


def test_an_unknown_model_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tasks", "--models", "dense,lstm"])
    assert ended.value.code == 2
    assert f"'lstm': choose from {', '.join([*MODELS, *OTHERS])}" in capsys.readouterr().err


def test_an_impossible_out_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "evaluate_all", None)
    (tmp_path / "file").touch()
    for out in ("file", "file/below"):
        assert main(["tasks", "--out", str(tmp_path / out)]) == 2
        stderr = capsys.readouterr().err
        assert stderr.startswith(f"nsa: --out {tmp_path / out}: the folder cannot be created (")


def test_a_sparsified_model_is_evaluated_after_each_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "BATCH", 128)
    monkeypatch.setattr(train, "SPARSIFY_STEPS", (0.5, 1.0))
    monkeypatch.setattr(evaluate, "SEQUENCES", 4)
    monkeypatch.setattr(evaluate, "DEPTHS", DEPTHS)
    call = ["tasks", "--models=sparsified", "--compressor=pool", "--steps=4", "--seeds=1"]
    assert main([*call, "--seq-len=64", f"--out={tmp_path}"]) == 0
    rows = json.loads((tmp_path / "tasks.json").read_text())["rows"]
    stages = ["dense", "converted", "after 2 steps of the selector", "and 4 of all weights"]
    assert [row["model"] for row in rows] == stages
    dense, *sparse = rows
    assert len({row["parameters"] for row in sparse}) == 1
    assert sparse[0]["parameters"] > dense["parameters"]
    assert len({row["loss"] for row in rows[1:]}) == 3
