"""ZeRO stage x activation checkpointing x accumulation x dtype; checkpoints across configs."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from nsa.engine.config import RunConfig
from nsa.engine.ds_config import load_ds_config, resolve_ds_config
from nsa.model.config import ACTIVATION_CHECKPOINTING
from tests.engine.matrix_ranks import ZERO
from tests.ranks import ROOT, launch_rows

Cell = tuple[str, str, int, str]

EVERYTHING: list[Cell] = list(
    itertools.product(ZERO, ACTIVATION_CHECKPOINTING, (1, 2), ("fp32", "bf16"))
)
# Every stage once; the modes, accumulation and dtype alternate.
STAGES: list[Cell] = [
    (zero, ACTIVATION_CHECKPOINTING[mode], 1 + row % 2, ("fp32", "bf16")[(row // 2) % 2])
    for (row, zero), mode in zip(enumerate(ZERO), (0, 1, 2, 3, 1, 4, 1), strict=True)
]
# A block that two segments share, which crashes DDP (test_checks.py).
SHARED: list[Cell] = [
    *((zero, "shared reentrant", 2, "fp32") for zero in ("0", "1", "1-fp32acc")),
    *((zero, "shared non_reentrant", 1, "fp32") for zero in ZERO if zero != "3"),
]
SOME_SHARED = [SHARED[2], SHARED[-1]]  # stages 1 and 2, either mode
BOUND = 3  # in multiples of the rounding error, see matrix_ranks.worst_error


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param([*STAGES, *SOME_SHARED], id="every stage"),
        pytest.param(SHARED, id="shared blocks", marks=pytest.mark.full),
        pytest.param(EVERYTHING, id="everything", marks=pytest.mark.full),
    ],
)
def test_two_ranks_end_with_the_parameters_of_one_process(cells: list[Cell]) -> None:
    program = Path(__file__).with_name("matrix_ranks.py")
    rows, other_rows = launch_rows(program, json.dumps(cells), timeout=900)
    assert rows == other_rows, "the ranks ended with different parameters"
    assert [tuple(row["cell"]) for row in rows] == cells
    assert [row for row in rows if row["error"] > BOUND] == []
    assert [row for row in rows if row["wrong"] < 2 * BOUND] == [], "a lost batch would pass"


SHARDED = ("zero1_pcie", "zero1_bf16acc", "zero2_pcie", "zero2_overlap")
ALL = (*SHARDED, "zero0_debug", "zero3")
DEFAULT = ("zero1_pcie", "zero2_overlap", "zero0_debug", "zero3")
SOME = [
    *((name, name) for name in DEFAULT),
    *itertools.permutations(DEFAULT[:2], 2),
    *(("zero0_debug", "zero1_pcie"), ("zero1_pcie", "zero3")),
]
PAIRS = [
    pytest.param(*pair, marks=[] if pair in SOME else pytest.mark.full)
    for pair in itertools.product(ALL, ALL)
]


@pytest.fixture(scope="module")
def rows(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What switching_ranks.py prints; the same on both ranks, except an error's text."""
    pairs = [*itertools.product(ALL, ALL)] if request.config.getoption("--full") else SOME
    program = Path(__file__).with_name("switching_ranks.py")
    first, second = launch_rows(program, str(tmp_path_factory.mktemp("saved")), json.dumps(pairs))
    for one, other in zip(first, second, strict=True):
        assert ("error" in one) == ("error" in other), "one rank failed, the other continued"
        assert one == other or "error" in one, "the ranks have different weights"
    return first


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_checkpoint_resumes_unchanged_or_is_refused_with_the_fix(
    rows: list[dict[str, Any]], source: str, target: str
) -> None:
    (row,) = (row for row in rows if (row.get("from"), row.get("to")) == (source, target))
    if source == target or {source, target} <= set(SHARDED):
        assert row["weights"], "the weights are not the saved ones"
        # The next step equals that of the saved run, so Adam's moments were loaded; without them
        # it would differ by its own size. Configs may sum in another order.
        assert row["next_step"] < (1e-6 if source == target else 1e-2)
    else:
        assert "ValueError" in row["error"]
        assert "ZeRO stage" in row["error"]
        assert "choose a DeepSpeed config of ZeRO stage" in row["error"]


def test_zero_1_and_2_place_the_weights_of_a_product_adjacently(rows: list[dict[str, Any]]) -> None:
    """What `parallel_linear` needs to copy none, and what `tests/operations.py` counts."""
    layouts = {row["layout"]: row["adjacent"] for row in rows if "layout" in row}
    assert layouts == dict.fromkeys(("zero1_pcie", "zero1_bf16acc", "zero2_pcie"), [True] * 4)


def test_deepspeeds_checkpointing_has_the_settings_of_the_json(rows: list[dict[str, Any]]) -> None:
    assert rows[-1] == {"cpu_checkpointing": True}


def test_deepspeed_reduces_in_buckets_where_a_size_is_filled_in(rows: list[dict[str, Any]]) -> None:
    """BF16_Optimizer, and Adam without ZeRO, ignore `reduce_bucket_size`."""
    for name, optimizer in ((row["config"], row["optimizer"]) for row in rows if "config" in row):
        raw = load_ds_config(ROOT / f"ds_configs/{name}.json")
        zero = resolve_ds_config(raw, RunConfig(), world_size=2)["zero_optimization"]
        assert ("reduce_bucket_size" in zero) == ("DeepSpeedZero" in optimizer), (name, optimizer)
