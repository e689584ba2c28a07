"""Weights read from a checkpoint of any layout equal the trained ones, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nsa.checkpoint.weights import find_weights, read_weights, set_weights

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


def test_weights_do_not_depend_on_the_file_after_reading(stages: Path, tmp_path: Path) -> None:
    """A training run removes old checkpoints."""
    copied = tmp_path / "step00000003"
    shutil.copytree(checkpoint(stages, 1), copied)
    weights = read_weights(copied)
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


def test_a_folder_without_weights_is_refused_with_the_names_of_what_is_missing(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=r"neither checkpoints/ nor model.safetensors.*name the"):
        find_weights(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"nothing is saved"):
        find_weights(tmp_path)
    with pytest.raises(ValueError, match=r"nowhere': there is no such folder"):
        find_weights(tmp_path / "nowhere")
