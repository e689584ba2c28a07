"""train.dense_steps: dense attention first, the switch, and a bit-exact resume around it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nsa.engine.config import RunConfig, resolve_config
from nsa.engine.loop import executed_flops
from nsa.monitor.artifacts import read_table
from tests.engine import known_peak
from tests.engine.runs import (
    TINY,
    cut_back,
    ds_config,
    load_profile,
    losses,
    on_one_rank,
    on_two_ranks,
    read_metrics,
    succeed,
    weights,
)

STEPS = [*TINY, "--set=data.seq_len=256", "--profile=demo", "--steps=5"]
STEPS += ["--set=train.dense_steps=2", "--set=attention.spec.select_top=6"]
STEPS += ["--set=checkpoint.every=1", "--set=checkpoint.keep=9"]
STEPS += ["--set=monitor.log_every=1", "--set=train.eval_every=2"]
MATRIX = {"0_debug": (), "1_pcie": (), "1_bf16acc": (), "2_overlap": (), "3": ()}
FLOATS = {"0_debug": "fp32", "1_pcie": "fp32"}


def train(folder: Path, run: str, zero: str, ranks: int, *flags: str) -> dict[int, float]:
    """Train, and return the losses; the log says when attention is dense."""
    start, flags = on_one_rank if ranks == 1 else on_two_ranks, (ds_config(f"zero{zero}"), *flags)
    log = succeed(start(known_peak.__file__, f"--run-dir={run}", *flags, folder=folder))
    assert "attention is dense in the first 2 of 5 steps" in log
    if "--resume" not in flags:
        assert "step 2: attention is sparse from here on" in log
        selection = read_table(folder / run / "selection.csv").rows
        assert {row["step"] for row in selection} == {3, 4, 5}
    return losses(folder / run)


@pytest.mark.parametrize(
    ("zero", "precision", "ranks"),
    [
        ("2_pcie", "bf16", 1),
        *(pytest.param(zero, "bf16", 2, marks=pytest.mark.full) for zero in MATRIX),
        *(pytest.param(zero, x, 2, marks=pytest.mark.full) for zero, x in FLOATS.items()),
    ],
)
def test_attention_is_dense_first_then_sparse_and_the_run_resumes(
    zero: str, precision: str, ranks: int, tmp_path: Path
) -> None:
    """Resumed before the switch and at it, the run has the same bits."""
    expected = train(tmp_path, "run", zero, ranks, *STEPS, f"--set=train.precision={precision}")
    cut_back(tmp_path / "run", 1, tmp_path / "cut")
    for until in (["--until=2"], []):
        resumed = train(tmp_path, "cut", zero, ranks, "--resume", *until)
    assert resumed == expected
    config = resolve_config(RunConfig(), tmp_path / "run/config.yaml")
    for run, first_steps in (("run", {1}), ("cut", {1, 2, 3})):  # of a process: warm-up
        rows = [row for row in read_metrics(tmp_path / run) if row["mfu"] is not None]
        assert {row["step"] for row in rows} == set(range(1, 6)) - first_steps
        for row in rows:
            of_a_rank = executed_flops(config, row["step"] - 1) / (ranks * known_peak.PEAK)
            assert row["mfu"] / row["tokens_per_s"] == pytest.approx(of_a_rank, rel=1e-3)
    last, again = (weights(tmp_path / run, 5) for run in ("run", "cut"))
    assert all(torch.equal(again[name], last[name]) for name in last)
    start, before = (weights(tmp_path / "run", step) for step in (1, 2))
    learned = [name for name in before if ".index." in name]
    assert learned
    assert not any(torch.equal(before[name], start[name]) for name in learned if "q.w" in name)


@pytest.mark.parametrize(
    ("recipe", "attention", "half_dense"),
    [
        ("m7c", ("sel", "pool", 1.0), True),
        ("m7c_paper", ("cmp+sel+win", "mlp", 0.0), False),
        ("m7c_classic", ("cmp+sel+win", "mean", 0.0), False),
    ],
)
def test_recipes_begin_dense_where_a_loss_trains_the_selection(
    recipe: str, attention: tuple[str, str, float], half_dense: bool
) -> None:
    for profile, steps in (("production", 50_000), ("demo", 300)):
        config = load_profile(recipe, profile).resolved()
        config.validate()
        model = config.model.attention
        assert (model.branches, model.compressor, model.selector_loss) == attention
        assert config.train.steps == steps
        assert config.train.dense_steps == (steps // 2 if half_dense else 0)
        assert config.train.value_rate == (0.5 if half_dense else 1.0)
        assert config.selects_all_note() is None
