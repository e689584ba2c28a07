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
    on_two_ranks,
    read_metrics,
    succeed,
    weights,
)

STEPS = [*TINY, "--set=data.seq_len=256", "--profile=demo", "--steps=7"]
STEPS += ["--set=train.dense_steps=3", "--set=attention.spec.select_top=6"]
STEPS += ["--set=checkpoint.every=1", "--set=checkpoint.keep=9"]
STEPS += ["--set=monitor.log_every=1", "--set=train.eval_every=2"]
MATRIX = {"0_debug": (), "1_pcie": (), "1_bf16acc": (), "2_overlap": (), "3": ()}
FLOATS = {"0_debug": "fp32", "1_pcie": "fp32"}


def train(folder: Path, run: str, zero: str, *flags: str) -> dict[int, float]:
    """Train, and return the losses; the log says when attention is dense."""
    new = [] if "--resume" in flags else STEPS
    log = succeed(
        on_two_ranks(
            known_peak.__file__,
            *new,
            f"--run-dir={run}",
            ds_config(f"zero{zero}"),
            *flags,
            folder=folder,
        )
    )
    assert "attention is dense in the first 3 of 7 steps" in log
    if new and not any(flag.startswith("--until") for flag in flags):
        assert "step 3: attention is sparse from here on" in log
        selection = read_table(folder / run / "selection.csv").rows
        assert {row["step"] for row in selection} == {4, 5, 6, 7}
    return losses(folder / run)


@pytest.mark.parametrize(
    ("zero", "precision"),
    [
        ("2_pcie", "bf16"),
        *(pytest.param(zero, "bf16", marks=pytest.mark.full) for zero in MATRIX),
        *(pytest.param(zero, x, marks=pytest.mark.full) for zero, x in FLOATS.items()),
    ],
)
def test_attention_is_dense_first_then_sparse_and_the_run_resumes(
    zero: str, precision: str, tmp_path: Path
) -> None:
    """Resumed before the switch and at it, the run has the same bits."""
    expected = train(tmp_path, "run", zero, f"--set=train.precision={precision}")
    cut_back(tmp_path / "run", 2, tmp_path / "cut")
    for until in (["--until=3"], []):
        resumed = train(tmp_path, "cut", zero, "--resume", *until)
    assert resumed == expected
    config = resolve_config(RunConfig(), tmp_path / "run/config.yaml")
    for run, first_steps in (("run", {1}), ("cut", {1, 3, 4})):  # of a process: warm-up
        rows = [row for row in read_metrics(tmp_path / run) if row["mfu"] is not None]
        assert {row["step"] for row in rows} == set(range(1, 8)) - first_steps
        for row in rows:
            of_a_rank = executed_flops(config, row["step"] - 1) / (2 * known_peak.PEAK)
            assert row["mfu"] / row["tokens_per_s"] == pytest.approx(of_a_rank, rel=1e-3)
    last, again = (weights(tmp_path / run, 7) for run in ("run", "cut"))
    assert all(torch.equal(again[name], last[name]) for name in last)
    start, before = (weights(tmp_path / "run", step) for step in (1, 3))
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
