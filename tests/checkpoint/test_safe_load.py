"""No command runs code from a checkpoint: each file that DeepSpeed reads is attacked."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from nsa.checkpoint.commit import find_problem
from nsa.checkpoint.state_file import read_state_file
from nsa.checkpoint.universal import to_universal
from nsa.checkpoint.weights import read_weights
from nsa.untrusted import data_only
from tests.checkpoint.conftest import forked_converter
from tests.checkpoint.planted_code import KINDS, Code, forge_layout, plant

REFUSED = r"step00000003: a file holds \S+, which could run code, and was not loaded; use a"


def test_loading_into_an_engine_refuses_code_in_any_file(stages: Path) -> None:
    """What `--resume` does. Stage 0 has no optimizer files."""
    expected = {f"{stage}_{kind}" for stage in range(4) for kind in KINDS} - {"0_optimizer"}
    for rank in range(2):
        errors = json.loads((stages / f"errors{rank}.json").read_text())
        assert errors.keys() == expected
        for name, error in errors.items():
            assert "which could run code, and was not loaded" in error, name
            assert len(error.splitlines()) == 1
    assert not (stages / "ran").exists()


@pytest.mark.parametrize(
    ("stage", "kind"),
    [*((stage, "model") for stage in range(4)), *((stage, "optimizer") for stage in (1, 2, 3))],
)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_reading_weights_never_runs_code(
    stages: Path, stage: int, kind: str, dtype: torch.dtype | None
) -> None:
    """What generate, eval, export and import do; files that are not needed are not opened."""
    opened = kind == "model" or stage == 3 or dtype == torch.float32
    checkpoint = stages / f"{stage}_{kind}" / "step00000003"
    assert find_problem(checkpoint) is None, "the hashes are right"
    if opened:
        with pytest.raises(ValueError, match=REFUSED):
            read_weights(checkpoint, dtype)
    else:
        read_weights(checkpoint, dtype)
    assert not (stages / "ran").exists()


def test_a_forged_layout_reads_no_pickles(stages: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step00000003"
    shutil.copytree(stages / "1" / "step00000003", checkpoint)
    plant(checkpoint, "model", tmp_path / "ran")
    plant(checkpoint, "optimizer", tmp_path / "ran")
    forge_layout(checkpoint, "3")
    with pytest.raises(ValueError, match=REFUSED):
        read_weights(checkpoint)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_conversion_to_another_number_of_ranks_refuses_code(stages: Path, kind: str) -> None:
    refusal = pytest.raises(ValueError, match=r"could not be converted: .*could run code")
    with forked_converter(), refusal:
        to_universal(read_state_file(stages / f"1_{kind}" / "step00000003"))
    assert not (stages / "ran").exists()


def test_the_attack_works_without_the_defence(tmp_path: Path) -> None:
    """Else the other tests prove nothing."""
    torch.save({"planted": Code(tmp_path / "ran")}, tmp_path / "file.pt")
    with pytest.raises(ValueError, match="could run code"), data_only(tmp_path):
        torch.load(tmp_path / "file.pt", weights_only=False)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", [None, "1"])
def test_loading_restores_the_settings_of_torch(
    value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(names[1], value)
    with data_only(tmp_path):
        assert [os.environ.get(name) for name in names] == ["1", None]
    assert [os.environ.get(name) for name in names] == [None, value]


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"PK\x03\x04 cut"])
def test_a_damaged_file_is_not_called_an_attack(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises((ValueError, RuntimeError)) as raised, data_only(tmp_path):
        torch.load(tmp_path / "file.pt", weights_only=False)
    assert "run code" not in str(raised.value)
