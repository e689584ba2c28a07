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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Optimizer and losses of each shipped config and precision, and of other projects' configs."""
    cases = [f"{precision}={name}" for name in NAMES for precision in ("bf16", "fp32")]
    folder = tmp_path_factory.mktemp("stock")
    for name, config in STOCK.items():
        text = json.dumps(fixed(config, refused_keys(config)))
        (folder / name).with_suffix(".json").write_text(text)
        cases.append(f"bf16={folder / name}")
    (output,) = launch(WORKER, *cases, world_size=1, timeout=120)
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('["')]
    return {(Path(name).name, precision): result for name, precision, result in rows}


def test_the_engine_trains_with_shipped_configs_and_with_other_projects_once_fixed(
    trained: Results,
) -> None:
    shipped = {(name, precision) for name in NAMES for precision in ("bf16", "fp32")}
    assert trained.keys() == shipped | {(name, "bf16") for name in STOCK}
    for case, result in trained.items():
        assert result["losses"][-1] < 0.5 * result["losses"][0], case


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
