"""train.dense_steps: dense attention first, the switch, and a bit-exact resume around it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nsa.checkpoint.weights import read_weights
from nsa.engine.config import RunConfig, TrainConfig, learning_rate
from nsa.model import AttentionConfig, LanguageModel
from nsa.spec import NSASpec
from tests.engine.runs import TINY, losses, on_two_ranks, succeed
from tests.model.models import tiny, tokens
from tests.ranks import ROOT

STEPS = [*TINY, "--set=data.seq_len=256", "--profile=demo", "--steps=7"]
STEPS += ["--set=train.dense_steps=3", "--set=checkpoint.every=1"]
STEPS += ["--set=checkpoint.keep=9", "--set=monitor.log_every=1", "--set=train.eval_every=2"]
SELECTOR = ["--set=attention.compressor=pool", "--set=attention.selector_loss=1"]
MATRIX = {"0_debug": (), "1_pcie": (), "1_bf16acc": (), "1_muon": (), "2_overlap": (), "3": ()}
FLOATS = {"0_debug": "fp32", "1_pcie": "fp32"}


KEYS = [f"blocks.{layer}.attention.k.weight" for layer in range(2)]


def train(folder: Path, run: str, zero: str, *flags: str) -> dict[int, float]:
    config = f"--deepspeed_config={ROOT}/ds_configs/zero{zero}.json"
    new = [] if "--resume" in flags else [*STEPS, *SELECTOR]
    succeed(on_two_ranks("m7c.py", *new, f"--run-dir={run}", config, *flags, folder=folder))
    return losses(folder / run)


def weights(run: Path, step: int) -> dict[str, Tensor]:
    return read_weights(run / "checkpoints" / f"step{step:08d}", torch.float32)


@pytest.mark.parametrize(
    ("zero", "precision"),
    [
        ("2_pcie", "bf16"),
        *(pytest.param(zero, "bf16", marks=pytest.mark.full) for zero in MATRIX),
        *(pytest.param(zero, x, marks=pytest.mark.full) for zero, x in FLOATS.items()),
    ],
)
def test_the_window_takes_over_the_selected_keys_and_the_run_resumes(
    zero: str, precision: str, tmp_path: Path
) -> None:
    """Resumed before the switch, at it, and after it, the run has the same bits."""
    flags = [f"--set=train.precision={precision}"]
    expected = train(tmp_path, "run", zero, *flags)
    train(tmp_path, "cut", zero, *flags, "--until=2")
    for until in (["--until=3"], ["--until=4"], ["--until=6"], []):
        resumed = train(tmp_path, "cut", zero, "--resume", *until)
    assert resumed == expected
    last, again = (weights(tmp_path / run, 7) for run in ("run", "cut"))
    assert all(torch.equal(again[name], last[name]) for name in last)
    before, switched = (weights(tmp_path / "run", step) for step in (3, 4))
    for name in before:
        if name.endswith("attention.v.weight"):
            for values in before[name].chunk(3)[::2]:
                assert not values.any()  # the selected branch alone has values
            assert all(values.any() for values in last[name].chunk(3))
        if name.endswith("attention.k.weight"):
            _, selected, window = before[name].chunk(3)
            assert not torch.equal(selected, window)
            _, selected, window = switched[name].chunk(3)
            assert not torch.equal(selected, window)  # one has a gradient, the other has none yet
        if name.endswith("gates.weight"):
            assert not before[name].any()
            assert last[name].any()


@pytest.mark.parametrize(
    "zero", ["2_pcie", *(pytest.param(x, marks=pytest.mark.full) for x in ("1_bf16acc", "3"))]
)
def test_the_window_starts_with_the_selected_keys_and_their_moments(
    zero: str, tmp_path: Path
) -> None:
    """Its first update has no gradient: it is the selected keys' previous one, decayed."""
    train(tmp_path, "run", zero, "--set=train.weight_decay=0", "--set=train.adam_eps=1e-20")
    at_2, at_3, at_4 = (weights(tmp_path / "run", step) for step in (2, 3, 4))
    config = TrainConfig(steps=7, warmup_steps=2, learning_rate=1.0, min_learning_rate=0.1)
    rates = [learning_rate(step, config) for step in range(4)]
    one, two = 0.9, 0.95  # Adam's betas
    m = one * (1 - one**3) / (1 - one**4)
    v = two * (1 - two**3) / (1 - two**4)
    for name in KEYS:
        previous = (at_3[name] - at_2[name]).chunk(3)[1]
        update = at_4[name].chunk(3)[2] - at_3[name].chunk(3)[1]
        expected = previous * rates[3] / rates[2] * m / v**0.5
        torch.testing.assert_close(update, expected, rtol=1e-3, atol=1e-7)
        assert update.abs().mean() > 1e-5


def test_the_dense_steps_are_those_of_dense_attention() -> None:
    """The model equals its sparse self where that selects all blocks."""
    spec = NSASpec(4, 2, 4, 8, 1, 1, 6)
    torch.manual_seed(0)
    model = LanguageModel(tiny(AttentionConfig(spec=spec, compressor="pool"))).double()
    for layer in model.sparse_layers().values():
        layer.start_dense()
    short, long = tokens(32), tokens(90)
    sparse = [model(ids) for ids in (short, long)]
    model.attend_densely(True)
    torch.testing.assert_close(model(short), sparse[0])
    assert not torch.allclose(model(long), sparse[1])
    packed = torch.tensor([0, 40, 90], dtype=torch.int32)
    parts = [model(long[:, :40]), model(long[:, 40:])]
    torch.testing.assert_close(model(long, cu_seqlens=packed), torch.cat(parts, 1))
    model(long, labels=long).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("attention", "steps", "reason"),
    [
        (AttentionConfig(kind="dense"), 5, "needs the keys and values of three branches"),
        (AttentionConfig(shared_kv=True), 5, "needs the keys and values of three branches"),
        (AttentionConfig(branches="sel+win"), 5, "needs the keys and values of three branches"),
        (AttentionConfig(), 50_000, "never becomes sparse"),
    ],
)
def test_models_that_cannot_switch_are_refused(
    attention: AttentionConfig, steps: int, reason: str
) -> None:
    config = RunConfig(train=TrainConfig(dense_steps=steps))
    config.model.attention = attention
    with pytest.raises(ValueError, match=rf"train\.dense_steps = {steps}: .*{reason}"):
        config.validate()


def test_the_selectors_steps_are_refused_beside_dense_ones() -> None:
    config = RunConfig(train=TrainConfig(dense_steps=5, selector_steps=5))
    config.model.attention.selector_loss = 1.0
    with pytest.raises(ValueError, match=r"train\.selector_steps = 5: not with train\.dense_steps"):
        config.validate()
