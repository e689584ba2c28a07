"""Phases: dense attention first, a selector alone first, a run that starts from another's weights.

Each resumes bit for bit.
"""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nsa.checkpoint.weights import read_weights
from nsa.cli import main
from nsa.engine.config import RunConfig, resolve_config
from nsa.engine.load_run import load_run
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
    validation_loss,
    weights,
)
from tests.model.models import build, flop_counter, tiny, tokens

DENSE = [*TINY, "--set=data.seq_len=256", "--profile=demo", "--steps=5"]
DENSE += ["--set=train.dense_steps=2", "--set=attention.spec.select_top=6"]
DENSE += ["--set=checkpoint.every=1", "--set=checkpoint.keep=9"]
DENSE += ["--set=monitor.log_every=1", "--set=train.eval_every=2"]
MATRIX = "0_debug", "1_pcie", "1_bf16acc", "2_overlap", "3"


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
        *(pytest.param(zero, "fp32", 2, marks=pytest.mark.full) for zero in MATRIX[:2]),
    ],
)
def test_attention_is_dense_first_then_sparse_and_the_run_resumes(
    zero: str, precision: str, ranks: int, tmp_path: Path
) -> None:
    """Resumed before the switch and at it, the run has the same bits."""
    expected = train(tmp_path, "run", zero, ranks, *DENSE, f"--set=train.precision={precision}")
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


LONG = ["--set=data.seq_len=256"]  # so long that a query cannot select all of its blocks
SELECTOR = ["--steps=4", "--set=train.selector_steps=2", "--set=checkpoint.every=1"]
SELECTOR += ["--set=checkpoint.keep=9", "--set=monitor.log_every=1", "--set=train.eval_every=2"]
SELECTOR += ["--set=train.eval_samples=8", TINY[-1]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense run of a few steps, converted; in float32, to numbers that bfloat16 would round."""
    folder = tmp_path_factory.mktemp("sparsify")
    command = [*TINY, *LONG, "--profile=demo", "--steps=4", "--run-dir=dense"]
    command += ["--set=attention.spec.select_top=6"]
    succeed(on_one_rank("m7c_dense.py", *command, folder=folder))
    to = folder / "start"
    assert main(["import", str(folder / "dense"), "--to", str(to), "--attention=nsa"]) == 0
    rounded = read_weights(to, torch.float32)
    save_file({name: x * (1 + 2**-12) for name, x in rounded.items()}, to / "model.safetensors")
    return to


@pytest.mark.parametrize(
    ("zero", "ranks"),
    [
        ("zero2_pcie", 1),
        *(pytest.param(f"zero{x}", 2, marks=pytest.mark.full) for x in ("1_pcie", "2_pcie", "3")),
    ],
)
def test_the_index_learns_first(zero: str, ranks: int, start: Path, tmp_path: Path) -> None:
    """Other weights keep each bit until the switch; a run resumes bit for bit.

    Not with stage 0: DeepSpeed initializes its optimizer there by a step that decays all weights.
    """
    sparsify = partial(on_one_rank if ranks == 1 else on_two_ranks, "sparsify.py", folder=tmp_path)
    flags = ["--profile=demo", f"--set=train.start_from={start}", *SELECTOR, ds_config(zero)]
    log = succeed(sparsify(*flags, "--run-dir=run"))
    assert "attention is dense in the first 2 of 4 steps, in which only the index learns" in log
    assert "step 2: attention is sparse from here on" in log
    first, selected, last = (
        read_weights(start, torch.float32),
        *(weights(tmp_path / "run", step) for step in (2, 4)),
    )
    assert first.keys() == selected.keys() == last.keys()
    for name, weight in first.items():
        assert torch.equal(selected[name], weight) != (".index." in name), name
        assert not torch.equal(last[name], selected[name]), name
    rows = read_table(tmp_path / "run/selection.csv").rows
    assert [row["step"] for row in rows] == [step for step in range(1, 5) for _ in range(2)]
    for row in rows:
        assert 0 < row["recall_random"] < 1
        assert 0 < row["recall"] <= 1
        assert row["choosing"] > 0
    loaded = load_run(tmp_path / "run/checkpoints/step00000002")
    logged = read_metrics(tmp_path / "run")[1]["val_loss"]
    sparse = validation_loss(loaded, tmp_path / "run")
    loaded.model.set_dense(True)
    dense = validation_loss(loaded, tmp_path / "run")
    assert abs(sparse - logged) < abs(dense - logged) / 10, "validation is sparse in all steps"
    cut_back(tmp_path / "run", 1, tmp_path / "cut")
    succeed(sparsify("--run-dir=cut", "--resume"))
    assert losses(tmp_path / "cut") == losses(tmp_path / "run")
    again = weights(tmp_path / "cut", 4)
    assert all(torch.equal(again[name], last[name]) for name in last)


def test_a_selectors_step_has_no_backward_pass_through_the_model() -> None:
    """It recomputes nothing, costs about half of a step, and trains the index as a step does."""
    flops, gradients = {}, {}
    ids = tokens(63)  # so few that the loss has all queries in either kind of step
    for mode in ("none", "reentrant"):
        model = build(tiny("index", activation_checkpointing=mode))
        for alone in (False, True):
            model.zero_grad()
            with flop_counter() as counter:
                model(ids, labels=ids, selector_only=alone).backward()
            flops[mode, alone] = counter.get_total_flops()
            gradients[mode, alone] = [
                weight.grad for name, weight in model.named_parameters() if ".index." in name
            ]
    assert flops["reentrant", True] == flops["none", True] < 0.55 * flops["none", False]
    for some in gradients.values():
        for gradient, expected in zip(some, gradients["none", False], strict=True):
            assert torch.equal(gradient, expected)


@pytest.mark.parametrize("attention", ["index", "mean"])
def test_selector_steps_train_what_ranks_blocks_and_report_the_loss(attention: str) -> None:
    """The index, or the first third of k: the compressed branch's keys."""
    config = tiny(attention)
    config.attention.selector_loss = 2.0
    model, ids = build(config), tokens(90)
    both, alone = (model(ids, labels=ids, selector_only=only) for only in (False, True))
    assert torch.equal(both, alone)
    alone.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        if attention == "mean" and name.endswith("attention.k.weight"):
            rows = parameter.grad.any(-1)
            assert rows[: len(rows) // 3].all()
            assert not rows[len(rows) // 3 :].any()
        else:
            assert parameter.grad.any() == (".index." in name), name
    (math.nan * model(ids, labels=ids, selector_only=True)).backward()  # a rejected loss
    assert all(parameter.grad.isnan().all() for parameter in model.parameters())


def test_a_selectors_step_learns_from_more_queries() -> None:
    """Its loss is the only gradient, so 32 queries a sequence would make it a noisy one."""
    model, ids = build(tiny("index")), tokens(1_024)
    for alone, stride in ((False, 32), (True, 4)):
        model(ids, labels=ids, selector_only=alone)
        for layer in model.sparse_layers().values():
            queries, _ = layer.selector_target
            assert queries.diff().unique().tolist() == [stride]
            assert len(queries) == 1_024 // stride


@pytest.mark.parametrize("profile", ["production", "demo"])
def test_a_converted_models_speed_is_not_judged_by_a_limit_of_the_recipes_own(profile: str) -> None:
    """Its size is that of train.start_from: a real model on a CPU is slower than the demo."""
    assert load_profile("m7c", profile).monitor.ladder.min_tokens_per_s > 0
    assert load_profile("sparsify", profile).monitor.ladder.min_tokens_per_s == 0


def test_the_32k_recipe_continues_its_short_run(tmp_path: Path) -> None:
    small = [*TINY[:3], *TINY[4:6], "--set=train.eval_every=0", "--set=train.eval_samples=2"]
    small += ["--set=train.warmup_steps=2"]
    flags = ["--profile=demo_short", "--steps=12", "--set=data.seq_len=64", "--run-dir=short"]
    succeed(on_one_rank("m7c_32k.py", *small, *flags, folder=tmp_path))
    start = ["--set=train.start_from=short", "--set=data.seq_len=256", "--run-dir=long"]
    run = on_two_ranks("m7c_32k.py", *small, "--steps=2", *start, folder=tmp_path)
    assert "initial weights: short/checkpoints/step00000012" in succeed(run)
    short_run, long_run = (read_metrics(tmp_path / name) for name in ("short", "long"))
    assert long_run[0]["tokens"] == 2 * 2 * 256
    assert long_run[0]["loss"] < short_run[0]["loss"] - 0.2
