"""DeepSpeed's engine with the shipped configs: it trains and behaves as the checks assume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nsa.engine.config import RunConfig
from nsa.engine.ds_config import load_ds_config, resolve_ds_config
from tests.engine.stock_configs import STOCK, fixed, refused_keys
from tests.ranks import launch

WORKER = Path(__file__).with_name("ds_config_ranks.py")
FOLDER = Path(__file__).parents[2] / "ds_configs"
Results = dict[tuple[str, str], dict[str, Any]]  # by config and precision
NAMES = ("zero0_debug", "zero1_pcie", "zero1_bf16acc", "zero2_pcie", "zero2_overlap", "zero3")


def resolved(name: str, precision: str) -> dict[str, Any]:
    config = RunConfig()
    config.train.precision = precision
    return resolve_ds_config(load_ds_config(FOLDER / f"{name}.json"), config, world_size=1)


def rows(output: str) -> list[Any]:
    return [json.loads(line) for line in output.splitlines() if line.startswith('["')]


@pytest.fixture(scope="module")
def trained() -> Results:
    """Optimizer and losses of each config and precision."""
    (output,) = launch(WORKER, "bf16,fp32", *NAMES, world_size=1, timeout=120)
    return {(name, precision): result for name, precision, result in rows(output)}


def test_the_engine_trains_with_the_shipped_configs(trained: Results) -> None:
    assert trained.keys() == {(name, x) for name in NAMES for x in ("bf16", "fp32")}
    for case, result in trained.items():
        assert result["losses"][-1] < 0.5 * result["losses"][0], case


def test_the_engine_trains_with_the_fixed_configs_of_other_projects(tmp_path: Path) -> None:
    files = []
    for name, config in STOCK.items():
        refused = refused_keys(config)
        files.append(tmp_path / name)
        files[-1].with_suffix(".json").write_text(json.dumps(fixed(config, refused)))
    (output,) = launch(WORKER, "bf16", *map(str, files), world_size=1, timeout=120)
    results = {Path(name).name: result for name, _, result in rows(output)}
    for name in STOCK:
        losses = results[name]["losses"]
        assert losses[-1] < 0.5 * losses[0], name


def test_adam_starts_one_step_ahead_in_stage_0_with_bf16(trained: Results) -> None:
    """DeepSpeed steps once with zero gradients at start (see ds_configs/README.md)."""
    ahead, others = (trained[name, "bf16"]["losses"] for name in ("zero0_debug", "zero1_bf16acc"))
    assert ahead[0] == others[0]
    assert ahead[1] > 1.2 * others[1]  # its first step is about a quarter shorter


@pytest.mark.parametrize(
    ("name", "precision", "optimizer"),
    [
        ("zero0_debug", "fp32", "AdamW"),
        ("zero1_pcie", "bf16", "BF16_Optimizer"),
        ("zero1_pcie", "fp32", "DeepSpeedZeroOptimizer"),
        ("zero1_bf16acc", "bf16", "DeepSpeedZeroOptimizer"),
        ("zero3", "bf16", "DeepSpeedZeroOptimizer_Stage3"),
    ],
)
def test_deepspeed_builds_the_optimizer_that_the_refusals_assume(
    trained: Results, name: str, precision: str, optimizer: str
) -> None:
    assert trained[name, precision]["optimizer"] == optimizer
    in_buckets = "DeepSpeedZero" in optimizer
    zero = resolved(name, precision)["zero_optimization"]
    assert ("reduce_bucket_size" in zero) == in_buckets


def test_zero_1_and_2_place_the_weights_of_a_fused_product_adjacently() -> None:
    """What `parallel_linear` needs to copy none, and what `tests/operations.py` counts."""
    names = "zero1_pcie", "zero1_bf16acc", "zero2_pcie"
    for output in launch(WORKER, "layout", *names, timeout=120):
        assert rows(output) == [[name, [True] * 4] for name in names]
