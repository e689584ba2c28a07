"""Runs with the selector loss and sequence parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.runs import TINY, losses, on_two_ranks, succeed
from tests.ranks import ROOT

CHOOSING = ["--set=data.seq_len=256", "--set=monitor.log_every=1"]


@pytest.mark.parametrize("zero", ["zero1_pcie", "zero2_pcie"])
def test_two_ranks_that_share_sequences_train_as_one_rank_does(tmp_path: Path, zero: str) -> None:
    """In fp32, with the same sequences per step."""
    common = [*TINY, *CHOOSING, "--profile=demo", "--set=model.kv_heads=2", "--steps=4"]
    common += ["--set=model.attention.selector_loss=1", "--set=train.precision=fp32"]
    common += [
        "--set=model.activation_checkpointing=reentrant",
        f"--deepspeed_config={ROOT}/ds_configs/{zero}.json",
    ]
    for name, ranks, micro_batch in (("data", 1, 1), ("sequence", 2, 2)):
        settings = [
            f"--set=train.sequence_parallel={ranks}",
            f"--set=train.micro_batch={micro_batch}",
            f"--run-dir={name}",
        ]
        succeed(on_two_ranks("m7c.py", *common, *settings, folder=tmp_path))
    one, two = losses(tmp_path / "data"), losses(tmp_path / "sequence")
    assert two == pytest.approx(one, rel=1e-4)
