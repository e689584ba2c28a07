"""Weights of a checkpoint of any layout equal the trained ones, bit for bit.

No command runs code from a checkpoint: each file that DeepSpeed reads is attacked.
"""

import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from nsa.checkpoint.commit import find_problem
from nsa.checkpoint.state_file import read_state_file
from nsa.checkpoint.universal import to_universal
from nsa.checkpoint.weights import find_weights, read_weights, set_weights
from nsa.untrusted import data_only
from tests.checkpoint.conftest import forked_converter
from tests.checkpoint.planted_code import KINDS, Code, plant, rehash

Weights = dict[str, torch.Tensor]


def checkpoint(stages: Path, stage: int) -> Path:
    return stages / str(stage) / "step00000003"


def equal(weights: Weights, expected: Weights) -> bool:
    assert weights.keys() == expected.keys()
    return all(
        weights[name].dtype == expected[name].dtype and torch.equal(weights[name], expected[name])
        for name in expected
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_equal_the_trained_ones_and_in_float32_the_optimizers(
    stages: Path, stage: int, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = torch.load(stages / f"{stage}.pt", weights_only=True)
    assert equal(read_weights(find_weights(checkpoint(stages, stage))), expected["trained"])
    weights = read_weights(checkpoint(stages, stage), torch.float32)
    assert equal(weights, expected["master"])
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    assert equal(rounded, expected["trained"])
    assert not torch.equal(weights["0.weight"], rounded["0.weight"].float()), "only rounded weights"
    assert capfd.readouterr() == ("", ""), "what DeepSpeed prints would be in the output of a verb"


def test_files_are_mapped_and_weights_do_not_depend_on_them_after_reading(
    stages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training run removes old checkpoints."""
    copied = tmp_path / "step00000003"
    shutil.copytree(checkpoint(stages, 1), copied)
    load = Mock(side_effect=torch.load)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", load)
        weights = read_weights(copied)
    assert all(call.kwargs["mmap"] for call in load.mock_calls), "other tensors are not read"
    for file in copied.glob("*.pt"):
        file.write_bytes(bytes(file.stat().st_size))
    assert equal(weights, torch.load(stages / "1.pt", weights_only=True)["trained"])


def test_a_damaged_checkpoint_is_skipped_with_a_warning(stages: Path, tmp_path: Path) -> None:
    older, newer = (tmp_path / "checkpoints" / f"step0000000{step}" for step in (3, 4))
    for path in (older, newer):
        shutil.copytree(checkpoint(stages, 3), path)
    with pytest.warns(UserWarning, match=r"skipped: step00000004: manifest.json has step = "):
        assert find_weights(tmp_path) == older
    (older / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"step00000004: .*; step00000003: state.json has"):
        find_weights(tmp_path)
    with pytest.raises(ValueError, match=r"step00000003': state.json has"):
        find_weights(older)


@pytest.mark.parametrize("sharded", [False, True])
def test_safetensors_are_read_under_our_names(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one file as we write it, and from several as transformers writes them."""
    weights = {"embed.weight": torch.ones(3), "blocks.0.mlp.up.weight": torch.zeros(2)}
    if sharded:
        index = {f"model.{name}": f"model-{i}.safetensors" for i, name in enumerate(weights)}
        for (name, file), weight in zip(index.items(), weights.values(), strict=True):
            save_file({name: weight}, tmp_path / file)
        text = json.dumps({"weight_map": index})
        (tmp_path / "model.safetensors.index.json").write_text(text)
    else:
        save_file(weights, tmp_path / "model.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert equal(read_weights(find_weights(Path("~") / tmp_path.name)), weights)
    double = read_weights(tmp_path, torch.float64)
    assert {weight.dtype for weight in double.values()} == {torch.float64}


def test_unfitting_or_damaged_weights_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(3, 2), "bias": torch.ones(3)}, file)
    with pytest.raises(ValueError, match=r"bias is \(3,\) there and None here; set model\.\*"):
        set_weights(torch.nn.Linear(2, 3, bias=False), read_weights(tmp_path), tmp_path)
    with pytest.raises(ValueError, match=r"weight is \(3, 2\) there and \(3, 4\) here"):
        set_weights(torch.nn.Linear(4, 3), read_weights(tmp_path), tmp_path)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        read_weights(tmp_path)
    file.unlink()
    for index in ("{}", "[]", '{"weight_map": []}', "{"):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ValueError, match=r"index.json is damaged: it has no weight_map"):
            read_weights(tmp_path)


def test_an_index_cannot_name_a_file_outside_its_folder(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3)}, tmp_path / "outside.safetensors")
    (folder := tmp_path / "model").mkdir()
    index = '{"weight_map": {"weight": "../outside.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match="No such file"):
        read_weights(folder)


def test_a_folder_without_weights_is_refused_naming_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither checkpoints/ nor model.safetensors.*name the"):
        find_weights(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"nothing is saved"):
        find_weights(tmp_path)
    with pytest.raises(ValueError, match=r"nowhere': there is no such folder"):
        find_weights(tmp_path / "nowhere")


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
    state = checkpoint / "state.json"
    state.write_text(state.read_text().replace('"1 or 2"', '"3"'))
    rehash(checkpoint)
    assert read_state_file(checkpoint).topology.layout == "3"
    with pytest.raises(ValueError, match=REFUSED):
        read_weights(checkpoint)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_conversion_to_another_number_of_ranks_refuses_code(stages: Path, kind: str) -> None:
    refusal = pytest.raises(ValueError, match=r"could not be converted: .*could run code")
    with forked_converter(), refusal:
        to_universal(read_state_file(stages / f"1_{kind}" / "step00000003"))
    assert not (stages / "ran").exists()
    assert not list((stages / f"1_{kind}").glob(".*")), "no draft is left"


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
