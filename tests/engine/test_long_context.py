"""Sequence parallelism, and runs that start from another run's weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.runs import (
    TINY,
    ds_config,
    on_one_rank,
    on_two_ranks,
    read_metrics,
    refused,
    succeed,
)

SAME = [
    *TINY,
    "--set=model.kv_heads=2",
    "--set=train.micro_batch=2",
    "--set=train.accumulation=2",
    "--set=train.precision=fp32",
    "--set=train.eval_samples=3",
    "--set=data.packing=documents",
    "--set=data.seq_len=256",  # so long that a query cannot select all of its blocks
    "--set=attention.selector_loss=1",
    "--steps=4",
]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps in one process."""
    folder = tmp_path_factory.mktemp("alone")
    succeed(on_one_rank("m7c.py", *SAME, "--run-dir=run", folder=folder))
    return folder / "run"


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ("zero2_pcie", "reentrant"),
        pytest.param("zero2_overlap", "selective", marks=pytest.mark.full),
    ],
)
def test_two_ranks_that_share_sequences_train_like_one(
    config: str, mode: str, one_rank: Path, tmp_path: Path
) -> None:
    """Losses of packed documents, with the selector's, and gradient norms, step by step."""
    settings = [
        ds_config(config),
        f"--set=model.activation_checkpointing={mode}",
        "--set=train.sequence_parallel=2",
    ]
    succeed(on_two_ranks("m7c.py", *SAME, *settings, "--run-dir=run", folder=tmp_path))
    expected, shared = (read_metrics(run) for run in (one_rank, tmp_path / "run"))
    for column in ("step", "tokens", "loss", "val_loss", "grad_norm"):
        left, right = (
            [row[column] for row in rows if row[column] is not None] for rows in (expected, shared)
        )
        assert right == pytest.approx(left, rel=2e-5), column


def test_the_32k_recipe_continues_its_short_run_on_four_times_the_tokens(tmp_path: Path) -> None:
    small = [*TINY[:3], *TINY[4:6], "--set=train.eval_every=0", "--set=train.eval_samples=2"]
    small += ["--set=train.warmup_steps=2"]
    short = ["--profile=demo_short", "--steps=12", "--set=data.seq_len=64", "--run-dir=short"]
    succeed(on_one_rank("m7c_32k.py", *small, *short, folder=tmp_path))
    start = ["--set=train.start_from=short", "--set=data.seq_len=256", "--run-dir=long"]
    run = on_two_ranks("m7c_32k.py", *small, "--steps=2", *start, folder=tmp_path)
    assert "initial weights: short/checkpoints/step00000012" in succeed(run)
    short_run, long_run = (read_metrics(tmp_path / n) for n in ("short", "long"))
    assert long_run[0]["tokens"] == 2 * 256
    assert long_run[0]["loss"] < short_run[0]["loss"] - 0.2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set=train.start_from=nowhere"], ["train.start_from = 'nowhere'", "no such folder"]),
        (["--set=train.start_from={run}", "--set=model.layers=3"], ["blocks.2.", "set model.*"]),
        (
            ["--set=train.sequence_parallel=2"],
            ["does not divide the world size, 1", "--num_gpus 2"],
        ),
    ],
)
def test_an_impossible_start_is_refused_with_the_fix(
    arguments: list[str], words: list[str], one_rank: Path, tmp_path: Path
) -> None:
    arguments = [argument.format(run=one_rank) for argument in arguments]
    line = refused(on_one_rank("m7c.py", *SAME, *arguments, "--run-dir=run", folder=tmp_path))
    assert all(word in line for word in words), line
    assert not (tmp_path / "run").exists()
