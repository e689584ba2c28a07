"""`train.compile`: refused where it cannot work, and a run logs the eager losses and health."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engine.runs import TINY, ds_config, losses, on_one_rank, on_two_ranks, succeed
from tests.engine.small import small_request

MODES = ["none", "reentrant", "non_reentrant", "deepspeed"]


@pytest.mark.parametrize(
    ("settings", "zero", "fix"),
    [
        (
            ["model.activation_checkpointing=selective"],
            "zero1_pcie",
            "activation_checkpointing=reentrant",
        ),
        (
            ["attention.kind=dense", "data.packing=documents"],
            "zero1_pcie",
            "set data.packing=concat",
        ),
        ([], "zero3", "use ds_configs/zero1_pcie.json"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_fix(
    settings: list[str], zero: str, fix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = [f"--set={setting}" for setting in ("train.compile=true", *settings)]
    flags += [f"--run-dir={tmp_path}", ds_config(zero)]
    with pytest.raises(ValueError, match=re.escape("train.compile = true: not with")) as refused:
        small_request(*flags)
    assert fix in str(refused.value)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "zero"), [*((mode, "zero1_pcie") for mode in MODES), ("reentrant", "zero2_pcie")]
)
def test_two_compiled_ranks_log_the_losses_of_eager_ones(
    tmp_path: Path, mode: str, zero: str
) -> None:
    common = [*TINY, "--profile", "demo", "--steps", "4"]
    common += [f"--set=model.activation_checkpointing={mode}", "--set=data.packing=documents"]
    common += ["--set=train.precision=fp32", ds_config(zero)]
    for compiled in ("true", "false"):
        folder = ["--run-dir", str(tmp_path / compiled), f"--set=train.compile={compiled}"]
        succeed(on_two_ranks("m7c.py", *common, *folder, folder=tmp_path))
    assert losses(tmp_path / "true") == pytest.approx(losses(tmp_path / "false"), rel=1e-4)
    eager, compiled = (
        (tmp_path / name / "selection.csv").read_text().splitlines() for name in ("false", "true")
    )
    assert len(compiled) == len(eager) > 1


@pytest.mark.full
def test_a_compiled_run_resumes_from_an_eager_ones_checkpoint(tmp_path: Path) -> None:
    arguments = [*TINY, "--profile", "demo", "--steps", "6", "--run-dir", str(tmp_path / "run")]
    succeed(on_one_rank("m7c.py", *arguments, "--until", "3", folder=tmp_path))
    resumed = on_one_rank(
        "m7c.py", *arguments, "--resume", "--set=train.compile=true", folder=tmp_path
    )
    assert "steps 4 to 6" in succeed(resumed)
