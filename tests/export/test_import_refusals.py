"""`nsa import` refuses what it cannot convert, in one line with the fix."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nsa.engine.config import RunConfig
from nsa.engine.resume import find_initial_weights
from nsa.export.from_hf import read_model
from tests.export.llamas import Refused, command, imported


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2': has learned positions"),
        ({"model_type": "olmo2"}, "model_type = 'olmo2': has norms after attention"),
        ({"model_type": "bloom"}, "model_type = 'bloom': must be one"),
        ({"attention_bias": True}, "attention_bias = True: this model supports only False"),
        ({"mlp_bias": True}, "mlp_bias = True: this model supports only False"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1: this model supports only 0"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5: this model supports only 1",
        ),
        (
            {"model_type": "mistral", "sliding_window": 511},
            "sliding_window = 511: this model supports only None, or 512 and more",
        ),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': this model supports only 'silu'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type = 'dynamic': this model supports only one of default, linear, llama3, yarn",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config = {'quant_method': 'fp8'}",
        ),
    ],
)
def test_an_unsupported_model_is_refused_by_what_differs(
    changes: dict[str, Any], message: str, llama_folder: Path, tmp_path: Path, refused: Refused
) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "llama")
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | changes))
    assert message in refused(folder)


def test_layers_without_rope_must_be_every_nth(llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(llama_folder / "model.safetensors")
    tree = json.loads((llama_folder / "config.json").read_text()) | {"model_type": "smollm3"}
    for layers, every in (([1, 1, 0, 1, 1, 0, 1], 3), ([1, 1, 1], 0), ([1, 0, 0], None)):
        config = tree | {"no_rope_layers": layers, "num_hidden_layers": len(layers)}
        (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": None}))
        if every is None:
            with pytest.raises(ValueError, match="supports only every n-th layer without RoPE"):
                read_model(tmp_path)
        else:
            assert read_model(tmp_path).config.model.no_rope_every == every


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "blocks.1.mlp.up.weight is None there"),
        ("nan", "weight blocks.1.mlp.up.weight has infinite or NaN elements"),
        ("other", "weight layers.1.mlp.router.weight: this model has no such weight"),
        ("fp8", "blocks.1.mlp.up.weight is torch.float8_e4m3fn; save the model in bfloat16"),
    ],
)
def test_a_weight_that_cannot_be_imported_is_named(
    change: str, message: str, llama_folder: Path, tmp_path: Path, refused: Refused
) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "llama")
    weights, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del weights[name]
    elif change == "nan":
        weights[name][3, 4] = math.nan
    elif change == "other":
        weights["model.layers.1.mlp.router.weight"] = torch.ones(2)
    else:
        weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert message in refused(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set=attention.compressor=mlp"], "compressor = 'mlp': compresses keys with values"),
        (["--set=attention.branches=cmp+sel+win"], "one set of keys and values; set branches=sel"),
        (["--set=attention.spec.window=128"], "window = 128: branches=sel has no window"),
        (["--set=attention.kind=dense"], "kind = 'dense': only --attention sets"),
        (["--attention=dense", "--set=model.attention.kind=nsa"], "give --attention nsa"),
        (["--set=model.layers=3"], "blocks.2."),
        (["--set=model.layer=3"], "did you mean model.layers"),
    ],
)
def test_invalid_arguments_are_refused_with_the_fix(
    arguments: list[str], message: str, llama_folder: Path, refused: Refused
) -> None:
    assert message in refused(llama_folder, *arguments)


def test_folders_that_cannot_be_imported_are_refused_with_the_reason(
    tmp_path: Path, refusal: Refused, refused: Refused
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    assert "holds neither checkpoints/ nor model.safetensors" in refused(folder)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    assert "config.json without model.safetensors; save the model with" in refused(folder)
    save_file({"wte.weight": torch.ones(2)}, folder / "model.safetensors")
    (folder / "config.json").write_text("[]")
    assert "not the JSON of a configuration" in refused(folder)
    assert "already exists" in refusal("import", folder, "--to", folder)


def test_a_name_of_the_hub_is_refused_with_the_command_that_downloads_it(
    tmp_path: Path, refusal: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, fix in (
        ("org/Small-1B", "hf download org/Small-1B --local-dir models/Small-1B"),
        ("/nowhere", "there is no such folder; name a folder of transformers' save_pretrained"),
    ):
        assert fix in refusal("import", name, "--to", "run")


def test_training_from_a_folder_of_transformers_names_the_import(llama_folder: Path) -> None:
    config = RunConfig()
    config.train.start_from = str(llama_folder)
    with pytest.raises(ValueError, match=f"nsa import {llama_folder} --to"):
        find_initial_weights(config)


def test_the_target_may_be_a_link_but_not_the_working_directory(
    llama_folder: Path, tmp_path: Path, refusal: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacing the working directory would leave the shell in a deleted folder."""
    (tmp_path / "empty").mkdir()
    for link, target in (("to_empty", "empty"), ("to_nothing", "nothing")):
        (tmp_path / link).symlink_to(tmp_path / target)
        imported(llama_folder, tmp_path / link, "--attention=dense")
        assert (tmp_path / link).is_symlink()
        assert not (tmp_path / target).is_symlink()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    error = refusal(*command(llama_folder, Path(".")))
    assert "--to .: cannot be replaced; name a new folder inside it" in error
    imported(llama_folder, Path("new"), "--attention=dense")
