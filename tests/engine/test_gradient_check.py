"""Gradient check: what crashed or hung under DDP (F1, F2 in docs/design/security.md) is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path

import deepspeed
import pytest

from tests.engine.runs import TINY
from tests.ranks import ROOT, launch, spawn_ranks

Reports = dict[str, dict[str, list[str]]]  # by model
PROGRAM = Path(__file__).with_name("gradient_check_ranks.py")


@pytest.fixture(scope="module")
def reports() -> Reports:
    by_rank = []
    for text in launch(PROGRAM, "inspect"):
        rows = [json.loads(line) for line in text.splitlines() if line[:1] == "{"]
        by_rank.append({row.pop("model"): row for row in rows})
    assert by_rank[0] == by_rank[1], "the ranks must agree, or one would stop and the other hang"
    return by_rank[0]


def test_a_sound_model_passes(reports: Reports) -> None:
    assert reports["sound"] == {"twice": [], "missing": []}


def test_a_block_shared_by_two_reentrant_segments_is_named(
    reports: Reports,
) -> None:
    assert "blocks.0.mlp.down.weight" in reports["shared block"]["twice"]
    assert reports["shared block"]["missing"] == []


def test_a_tied_head_inside_a_reentrant_segment_is_named(
    reports: Reports,
) -> None:
    assert reports["head inside"]["twice"] == ["embed.weight"]


def test_a_parameter_that_one_rank_skips_is_named_on_both(
    reports: Reports,
) -> None:
    missing = reports["skips on one rank"]["missing"]
    assert missing
    assert all(name.startswith("blocks.1.") for name in missing)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("shared block", "Expected to mark a variable ready only once"),
        ("sound", "backward passed"),
    ],
)
def test_ddp_fails_as_the_earlier_runs_did_where_a_parameter_fires_twice(
    model: str, expected: str
) -> None:
    for text in launch(PROGRAM, "ddp", model):
        assert expected in text


CELLS: list[tuple[str, str, int, str]] = [  # as in test_matrix.py: every way to reduce
    ("0", "reentrant", 2, "bf16"),
    ("1", "reentrant", 2, "bf16"),
    ("1-fp32acc", "none", 2, "bf16"),
    ("2-overlap", "reentrant", 2, "bf16"),
    ("3", "non_reentrant", 2, "bf16"),
]
MORE_CELLS: list[tuple[str, str, int, str]] = [
    ("0", "none", 1, "fp32"),
    ("2", "none", 1, "fp32"),
    ("2", "selective", 4, "bf16"),
]


BUGS = ["dropped", "scaled", "rank 0 alone"]  # of reduction_ranks.py
ONE_BUG = [(cell, BUGS[number % 3 :][:1]) for number, cell in enumerate(CELLS)]
EVERY_BUG = [(cell, BUGS) for cell in CELLS + MORE_CELLS]


@pytest.mark.parametrize("cells", [ONE_BUG, pytest.param(EVERY_BUG, marks=pytest.mark.full)])
def test_a_wrong_bucket_is_refused_and_a_sound_reduction_changes_no_digit(
    cells: list[tuple[tuple[str, str, int, str], list[str]]],
) -> None:
    texts = launch(PROGRAM.with_name("reduction_ranks.py"), json.dumps(cells))
    rows, others = (
        [json.loads(line) for line in text.splitlines() if line[:1] == "{"] for text in texts
    )
    assert [(tuple(row["cell"]), [*row["refusals"]]) for row in rows] == cells
    for row, other in zip(rows, others, strict=True):
        assert row["same"], f"{row['cell']}: the check changed the weights"
        assert row["refusals"] == other["refusals"], "one rank would stop and the other hang"
        for bug, refusal in row["refusals"].items():
            assert refusal is not None, (row["cell"], bug)
            assert refusal.startswith(f"DeepSpeed {deepspeed.__version__}: its reduced gradient")
            assert "launch/constraints.txt" in refusal


def test_a_run_with_a_dropped_bucket_ends_in_one_line_without_a_checkpoint(tmp_path: Path) -> None:
    program = PROGRAM.with_name("reduction_ranks.py")
    config = f"--deepspeed_config={ROOT}/ds_configs/zero2_pcie.json"
    flags = ["--profile=demo", "--steps=3", "--run-dir=run", config, *TINY]
    ranks = spawn_ranks(program, f"{ROOT}/recipes/m7c.py", *flags, folder=tmp_path)
    try:
        assert ranks.wait_for_failure(time.monotonic() + 120) == 0, ranks.text("err")[-3_000:]
    finally:
        ranks.end()  # by SIGTERM, as the launcher does when rank 0 has failed
    assert ranks.codes() == [3, 3], ranks.text("err")[-3_000:]
    (line,) = {line for line in ranks.text("err").splitlines() if "reduced gradient" in line}
    assert line.startswith(f"m7c: DeepSpeed {deepspeed.__version__}: its reduced gradient of ")
    assert not (tmp_path / "run/checkpoints/latest").exists()
