"""Runs that start from another run's weights, at another length; impossible starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.runs import TINY, on_one_rank, on_two_ranks, read_metrics, refused, succeed

SMALL = [*TINY[:3], *TINY[4:6], "--set=train.eval_every=0", "--set=train.eval_samples=2"]
SMALL += ["--set=train.warmup_steps=2"]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twelve steps on short sequences."""
    folder = tmp_path_factory.mktemp("short")
    flags = ["--profile=demo_short", "--steps=12", "--set=data.seq_len=64", "--run-dir=short"]
    succeed(on_one_rank("m7c_32k.py", *SMALL, *flags, folder=folder))
    return folder / "short"


def test_the_32k_recipe_continues_its_short_run_on_four_times_the_tokens(
    short: Path, tmp_path: Path
) -> None:
    start = [f"--set=train.start_from={short}", "--set=data.seq_len=256", "--run-dir=long"]
    run = on_two_ranks("m7c_32k.py", *SMALL, "--steps=2", *start, folder=tmp_path)
    assert f"initial weights: {short}/checkpoints/step00000012" in succeed(run)
    short_run, long_run = (read_metrics(folder) for folder in (short, tmp_path / "long"))
    assert long_run[0]["tokens"] == 2 * 2 * 256
    assert long_run[0]["loss"] < short_run[0]["loss"] - 0.2


def test_weights_of_another_model_are_refused_with_the_fix(short: Path, tmp_path: Path) -> None:
    flags = [*SMALL, "--profile=demo_short", f"--set=train.start_from={short}", "--run-dir=run"]
    run = on_one_rank("m7c_32k.py", *flags, "--set=model.layers=3", folder=tmp_path)
    line = refused(run)
    assert "blocks.2." in line
    assert "set model.*" in line
    assert not (tmp_path / "run").exists()
