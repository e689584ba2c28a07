"""DeepSpeed configs on two ranks: checkpoints of one under another, fused weights."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from nsa.engine.config import RunConfig
from nsa.engine.ds_config import load_ds_config, resolve_ds_config
from tests.ranks import ROOT, launch_rows

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


def test_zero_1_and_2_place_the_weights_of_a_fused_product_adjacently(
    rows: list[dict[str, Any]],
) -> None:
    """What `parallel_linear` needs to copy none, and what `tests/operations.py` counts."""
    layouts = {row["layout"]: row["adjacent"] for row in rows if "layout" in row}
    assert layouts == dict.fromkeys(("zero1_pcie", "zero1_bf16acc", "zero2_pcie"), [True] * 4)


def test_deepspeeds_activation_checkpointing_has_the_settings_of_the_json(
    rows: list[dict[str, Any]],
) -> None:
    assert rows[-1] == {"cpu_checkpointing": True}


def test_deepspeed_reduces_in_buckets_where_a_size_is_filled_in(rows: list[dict[str, Any]]) -> None:
    """BF16_Optimizer, and Adam without ZeRO, ignore `reduce_bucket_size`."""
    for name, optimizer in ((row["config"], row["optimizer"]) for row in rows if "config" in row):
        raw = load_ds_config(ROOT / f"ds_configs/{name}.json")
        zero = resolve_ds_config(raw, RunConfig(), world_size=2)["zero_optimization"]
        assert ("reduce_bucket_size" in zero) == ("DeepSpeedZero" in optimizer), (name, optimizer)
