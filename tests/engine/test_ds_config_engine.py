"""DeepSpeed's engine with the shipped configs: it trains and behaves as the checks assume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nsa.engine.config import RunConfig
from nsa.engine.ds_config import load_ds_config, resolve_ds_config
from nsa.engine.zero_mode import zero_mode
from tests.engine.stock_configs import STOCK, fixed, refused_keys
from tests.ranks import launch

WORKER = Path(__file__).with_name("ds_config_ranks.py")
FOLDER = Path(__file__).parents[2] / "ds_configs"
NOISE = {"bf16": 0.05, "fp32": 1e-5}  # relative, of the loss after a few steps
Results = dict[tuple[str, str, str], dict[str, Any]]

TOLERATED = {  # shipped config: (a second gradient, a missing one)
    "zero0_debug": (True, True),
    "zero1_pcie": (True, False),
    "zero1_bf16acc": (True, False),
    "zero2_pcie": (False, False),
    "zero2_overlap": (False, False),
    "zero3": (False, False),
}


def resolved(name: str, precision: str) -> dict[str, Any]:
    config = RunConfig()
    config.train.precision = precision
    return resolve_ds_config(load_ds_config(FOLDER / f"{name}.json"), config, world_size=1)


def rows(output: str) -> list[Any]:
    return [json.loads(line) for line in output.splitlines() if line.startswith('["')]


@pytest.fixture(scope="module")
def trained() -> Results:
    """Losses or error of each config, precision and number of uses of the middle layer."""
    (output,) = launch(WORKER, "steps", *TOLERATED, world_size=1, timeout=120)
    return {(name, precision, middle): result for name, precision, middle, result in rows(output)}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", TOLERATED)
def test_the_engine_trains_with_a_shipped_config(
    trained: Results, name: str, precision: str
) -> None:
    losses = trained[name, precision, "once"]["losses"]
    assert losses[-1] < 0.5 * losses[0]


def test_the_engine_trains_with_the_fixed_configs_of_other_projects(tmp_path: Path) -> None:
    files = []
    for name, config in STOCK.items():
        refused = refused_keys(config)
        files.append(tmp_path / name)
        files[-1].with_suffix(".json").write_text(json.dumps(fixed(config, refused)))
    (output,) = launch(WORKER, "once", *map(str, files), world_size=1, timeout=120)
    results = {Path(name).name: result for name, _, _, result in rows(output)}
    for name in STOCK:
        losses = results[name]["losses"]
        assert losses[-1] < 0.5 * losses[0], name


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", TOLERATED)
def test_a_second_gradient_is_tolerated_exactly_where_zero_mode_says_so(
    trained: Results, name: str, precision: str
) -> None:
    mode = zero_mode(resolved(name, precision))
    assert (mode.tolerates_twice, mode.tolerates_missing) == TOLERATED[name]
    result = trained[name, precision, "twice"]
    if not TOLERATED[name][0]:
        assert "error" in result
    elif result["optimizer"] != "FP16_UnfusedOptimizer":  # its Adam is one step ahead, see below
        # Stage 0 in fp32 leaves the gradient to autograd: the reference.
        reference = trained["zero0_debug", "fp32", "twice"]["losses"]
        assert result["losses"] == pytest.approx(reference, rel=NOISE[precision])


def test_adam_starts_one_step_ahead_in_stage_0_with_bf16(trained: Results) -> None:
    """DeepSpeed steps once with zero gradients at start (see ds_configs/README.md)."""
    ahead, others = (
        trained[name, "bf16", "once"]["losses"] for name in ("zero0_debug", "zero1_bf16acc")
    )
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
    assert trained[name, precision, "once"]["optimizer"] == optimizer
    in_buckets = "DeepSpeedZero" in optimizer
    zero = resolved(name, precision)["zero_optimization"]
    assert ("reduce_bucket_size" in zero) == in_buckets


def test_only_stage_0_agrees_on_grad_norm_when_a_rank_lacks_a_gradient() -> None:
    first, second = (
        dict(rows(output))
        for output in launch(WORKER, "missing", "zero0_debug", "zero1_pcie", timeout=120)
    )
    assert first["zero0_debug"] == second["zero0_debug"]
    assert first["zero1_pcie"] != second["zero1_pcie"]


def test_zero_1_and_2_place_the_weights_of_a_fused_product_adjacently() -> None:
    """What `parallel_linear` needs to copy none, and what `tests/operations.py` counts."""
    names = "zero1_pcie", "zero1_bf16acc", "zero2_pcie"
    for output in launch(WORKER, "layout", *names, timeout=120):
        assert rows(output) == [[name, [True] * 4] for name in names]
