"""The weights of a checkpoint of any layout are those that were trained, to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nsa.checkpoint.weights import find_weights, load_weights, read_weights
from tests.ranks import launch

STAGES = (0, 1, 2, 3)
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each stage, of two ranks."""
    folder = tmp_path_factory.mktemp("weights")
    launch(Path(__file__).with_name("weights_ranks.py"), str(folder))
    return folder


def checkpoint(root: Path, stage: int) -> Path:
    return root / str(stage) / "step00000003"


def same(found: Weights, wanted: Weights) -> bool:
    assert found.keys() == wanted.keys()
    return all(
        found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name])
        for name in wanted
    )


@pytest.mark.parametrize("stage", STAGES)
def test_weights_are_read_as_they_were_trained(root: Path, stage: int) -> None:
    told = torch.load(root / f"{stage}.pt", weights_only=True)
    assert same(read_weights(find_weights(checkpoint(root, stage))), told["trained"])


@pytest.mark.parametrize("stage", STAGES)
def test_in_float32_they_are_those_that_the_optimizer_keeps(root: Path, stage: int) -> None:
    told = torch.load(root / f"{stage}.pt", weights_only=True)
    found = read_weights(checkpoint(root, stage), torch.float32)
    assert same(found, told["exact"])
    rounded = {name: weight.bfloat16() for name, weight in found.items()}
    assert same(rounded, told["trained"])
    assert not torch.equal(found["0.weight"], rounded["0.weight"].float()), "no more than rounded"


def test_weights_outlive_the_checkpoint_that_they_were_read_from(
    root: Path, tmp_path: Path
) -> None:
    """A run that goes on removes its old ones."""
    copied = tmp_path / "step00000003"
    shutil.copytree(checkpoint(root, 1), copied)
    found = read_weights(copied)
    for file in copied.glob("*.pt"):
        file.write_bytes(bytes(file.stat().st_size))
    assert same(found, torch.load(root / "1.pt", weights_only=True)["trained"])


def test_a_broken_checkpoint_is_passed_over_with_a_word(root: Path, tmp_path: Path) -> None:
    older, newer = (tmp_path / "checkpoints" / f"step0000000{step}" for step in (3, 4))
    for path in (older, newer):
        shutil.copytree(checkpoint(root, 3), path)
    with pytest.warns(UserWarning, match=r"passed over: step00000004: manifest.json is that of"):
        assert find_weights(tmp_path) == older
    (older / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"step00000004: .*; step00000003: state.json has"):
        find_weights(tmp_path)
    with pytest.raises(ValueError, match=r"step00000003': state.json has"):
        find_weights(older)


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_of_safetensors_have_our_names(sharded: bool, tmp_path: Path) -> None:
    """Of one file or several, as transformers writes them and as we do."""
    weights = {"embed.weight": torch.ones(3), "blocks.0.mlp.up.weight": torch.zeros(2)}
    if sharded:
        index = {f"model.{name}": f"model-{i}.safetensors" for i, name in enumerate(weights)}
        for (name, file), weight in zip(index.items(), weights.values(), strict=True):
            save_file({name: weight}, tmp_path / file)
        text = json.dumps({"weight_map": index})
        (tmp_path / "model.safetensors.index.json").write_text(text)
    else:
        save_file(weights, tmp_path / "model.safetensors")
    assert same(read_weights(find_weights(tmp_path)), weights)
    double = read_weights(tmp_path, torch.float64)
    assert {weight.dtype for weight in double.values()} == {torch.float64}


def test_weights_that_do_not_fit_or_are_damaged_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(3, 2), "bias": torch.ones(3)}, file)
    with pytest.raises(ValueError, match=r"bias is \(3,\) there and None here; set model\.\*"):
        load_weights(torch.nn.Linear(2, 3, bias=False), tmp_path)
    with pytest.raises(ValueError, match=r"weight is \(3, 2\) there and \(3, 4\) here"):
        load_weights(torch.nn.Linear(4, 3), tmp_path)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        read_weights(tmp_path)
    file.unlink()
    for index in ("{}", "[]", '{"weight_map": []}', "{"):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ValueError, match=r"index.json is damaged: it has no weight_map"):
            read_weights(tmp_path)


def test_a_folder_without_weights_is_told_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither checkpoints/ nor model.safetensors.*name the"):
        find_weights(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"nothing is saved"):
        find_weights(tmp_path)
    with pytest.raises(ValueError, match=r"nowhere': there is no such folder"):
        find_weights(tmp_path / "nowhere")
