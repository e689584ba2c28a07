"""`nsa tasks` trains every contender, writes what it found, and draws it."""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest

from nsa.cli import main
from nsa.evaluate.tasks import examination, learning
from nsa.evaluate.tasks.examination import DEPTHS, FACTS, WITHOUT_CHOICE, lines
from nsa.evaluate.tasks.learning import CONTENDERS
from tests.data.processes import gone
from tests.engine.runs import BIN
from tests.ranks import start_ranks

PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one tiny call has written."""
    out = tmp_path_factory.mktemp("tasks") / "deep/er"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "BATCH", 128)
        patch.setattr(examination, "SEQUENCES", 4)
        call = ["tasks", "--steps", "2", "--seeds", "4", "5", "--seq-len", "64", "--out", str(out)]
        assert main(call) == 0
    return out


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "tasks.json").read_text())


def test_every_model_is_asked_the_same_with_every_seed(result: dict[str, Any]) -> None:
    asked = [(row["seed"], row["model"]) for row in result["rows"]]
    models = {*CONTENDERS, WITHOUT_CHOICE}
    assert sorted(asked) == sorted((seed, model) for seed in (4, 5) for model in models)
    for row in result["rows"]:
        assert [cell["facts"] for cell in row["by_facts"]] == list(FACTS)
        grid = [(cell["seq_len"], cell["depth"]) for cell in row["needle"]]
        assert grid == [(length, depth) for length in (32, 64) for depth in DEPTHS]
        for cell in row["needle"]:
            assert cell["distance"] == pytest.approx((1 - cell["depth"]) * cell["seq_len"], abs=2)
        edges = [(cell["from"], cell["below"]) for cell in row["by_distance"]]
        assert edges == [(1, 8), (8, 16), (16, 32), (32, 64)]
        shares = [cell["right"] for cell in [*row["needle"], *row["by_distance"]]]
        assert all(0 <= share <= 1 for share in shares)


def test_several_at_a_time_find_what_one_after_the_other_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examination, "CONTENDERS", ("dense", "win"))
    told: list[list[dict[str, Any]]] = []
    for jobs in (1, 2):
        rows = examination.examine(64, 1, [4], jobs, _unheard)["rows"]
        told.append([{**row, "seconds": None} for row in rows])
    assert told[0] == told[1]


def _unheard(name: str, seed: int, step: int, loss: float) -> None:
    """At the top of a module, so that another process can be given it."""


def test_what_ends_it_ends_its_workers_at_once_and_quietly(tmp_path: Path) -> None:
    command = ("tasks", "--jobs", "2", "--out", str(tmp_path))
    by_ctrl_c, by_kill = started = [start_ranks(BIN / "nsa", *command, ranks=0) for _ in range(2)]
    try:
        workers = [_workers(process.pids[0]) for process in started]
        by_ctrl_c.started[0].kill(signal.SIGSTOP)  # so that the workers would hear it first
        os.killpg(by_ctrl_c.pids[0], signal.SIGINT)  # as a terminal does
        time.sleep(1)
        by_ctrl_c.started[0].kill(signal.SIGCONT)
        by_kill.started[0].kill(signal.SIGTERM)
        assert [process.codes(20) for process in started] == [[130], [130]]
        assert all(gone(worker) for worker in chain(*workers))
    finally:
        for process in started:
            process.end(signal.SIGKILL)
    assert [process.text("err") for process in started] == ["", ""]


def _workers(pid: int) -> list[int]:
    """The two of a process, as soon as it has them, and who looks after what they share."""
    deadline = time.monotonic() + 120
    found: list[psutil.Process] = []
    while len(found) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
        found = psutil.Process(pid).children()
    return [process.pid for process in found]


def test_pictures_are_drawn(folder: Path) -> None:
    for name in ("recall.png", "needle.png"):
        assert (folder / name).read_bytes().startswith(PNG)


def test_the_table_counts_needles_beyond_the_reach_alone() -> None:
    def cell(seq_len: int, distance: int, share: float) -> dict[str, float]:
        return {"seq_len": seq_len, "distance": distance, "right": share}

    near, far = cell(64, 30, 0.9), cell(64, 31, 0.3)
    rows = [
        {"model": "win", "seed": seed, "parameters": 1_234, "seconds": 10.0,
         "by_facts": [{"facts": facts, "all": 0.8, "far": far_share} for facts in FACTS],
         "needle": [near, far, cell(32, 31, 0.7)]}
        for seed, far_share in ((1, 0.25), (2, 0.5))
    ]  # fmt: skip
    found = lines({"seq_len": 64, "reach": 30, "rows": rows})[2]
    cells = [text.strip() for text in found.strip("|").split("|")]
    assert cells == ["win", *["37.5% (25.0% to 50.0%)"] * 4, "30.0%", "1,234", "10"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--steps", "0"], "--steps 0: must be 1 or more"),
        (["--jobs", "0"], "--jobs 0: must be 1 or more"),
        (["--seq-len", "48"], "--seq-len 48: take a multiple of 32, 64 or more"),
    ],
)
def test_flags_that_cannot_work_are_refused_in_one_line(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tasks", *flags, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [f"nsa: {says}"]
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_results_place_is_named_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examination, "examine", None)
    (tmp_path / "file").touch()
    for out in ("file", "file/below"):
        assert main(["tasks", "--out", str(tmp_path / out)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"nsa: --out {tmp_path / out}: no folder can be made there (")
