"""From a dense model to a sparse one: the selector's steps, the switch, and frozen parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nsa.checkpoint.weights import read_weights
from nsa.cli import main
from nsa.engine.config import RunConfig, TrainConfig
from tests.engine.runs import TINY, losses, on_one_rank, on_two_ranks, succeed
from tests.ranks import ROOT

LONG = ["--set=data.seq_len=256"]  # so long that a query cannot select all of its blocks
STEPS = ["--steps=6", "--set=train.selector_steps=3", "--set=checkpoint.every=1"]
STEPS += ["--set=checkpoint.keep=9", "--set=monitor.log_every=1", "--set=train.eval_every=0"]
STEPS += ["--set=train.eval_samples=8"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense run of a few steps, converted."""
    folder = tmp_path_factory.mktemp("sparsify")
    command = [*TINY, *LONG, "--profile=demo", "--steps=4", "--run-dir=dense"]
    succeed(on_one_rank("m7c_dense.py", *command, folder=folder))
    to = folder / "start"
    assert main(["import", str(folder / "dense"), "--to", str(to), "--attention=nsa"]) == 0
    return to


def sparsify(start: Path, folder: Path, run: str, zero: str, *flags: str) -> dict[int, float]:
    command = ["--profile=demo", f"--set=train.start_from={start}", *STEPS, f"--run-dir={run}"]
    if "--resume" in flags:
        command = [f"--run-dir={run}"]
    command += [f"--deepspeed_config={ROOT}/ds_configs/{zero}.json"]
    succeed(on_two_ranks("sparsify.py", *command, *flags, folder=folder))
    return losses(folder / run)


def weights(run: Path, step: int) -> dict[str, Tensor]:
    return read_weights(run / "checkpoints" / f"step{step:08d}", torch.float32)


def test_steps_without_a_selector_loss_are_refused() -> None:
    config = RunConfig(train=TrainConfig(selector_steps=5, steps=5))
    config.model.attention.selector_loss = 1.0
    with pytest.raises(ValueError, match=r"train\.selector_steps = 5: not below train\.steps = 5"):
        config.validate()
    config = RunConfig(train=TrainConfig(selector_steps=5))
    with pytest.raises(ValueError, match=r"train\.selector_steps = 5: trains by the selector loss"):
        config.validate()


def test_a_recipe_without_a_sparse_start_is_refused(start: Path, tmp_path: Path) -> None:
    dense = start.parent / "dense"
    run = on_one_rank("sparsify.py", f"--set=train.start_from={dense}", folder=tmp_path)
    assert run.returncode == 2
    assert "has dense attention; convert it: nsa import" in run.stderr
    assert not (tmp_path / "runs").exists()
