"""`nsa import`: exports, Llamas and dense runs become folders that training starts from."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import nsa.model.hf  # noqa: F401 (registers its classes with transformers)
from nsa.cli import main
from nsa.engine.config import RunConfig, TrainConfig
from nsa.engine.load_run import load_run
from nsa.engine.resume import find_initial_weights
from nsa.export.from_hf import read_model
from nsa.export.to_hf import export
from nsa.model import AttentionConfig
from nsa.model.hf import NSAForCausalLM
from nsa.spec import NSASpec
from tests.evaluate.models import write_model
from tests.export.llamas import FAMILIES, SHAPE, SMALL, Refused, command, imported, logits, tokens


def test_sequences_so_short_that_nothing_is_skipped_are_warned_about(
    llama_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imported(llama_folder, tmp_path / "short")  # 512 tokens, 8 blocks of 64
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nsa: warning: data.seq_len = 512: has 8 selection blocks and ")
    assert "every query selects all of its blocks; set data.seq_len above 1408" in line
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "small.yaml").write_text("attention: {spec: {select_len: 8}}")
    imported(llama_folder, tmp_path / "sparse", "--config=~/small.yaml")
    imported(llama_folder, tmp_path / "dense", "--attention=dense")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("model_type", "changes", "seq_len"),
    [
        ("llama", {}, 512),
        ("llama", {"max_position_embeddings": 4_096}, 2_048),
        ("mistral", {"sliding_window": 512}, 512),  # all of its positions
        ("mistral", {"sliding_window": 4_096}, 512),  # no position is further
        ("mistral", {"sliding_window": 3_000, "max_position_embeddings": 8_192}, 2_048),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, 512),
    ],
)
def test_sequences_are_as_long_as_the_recipes_or_as_the_models_attention_sees(
    model_type: str, changes: dict[str, Any], seq_len: int, llama_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").symlink_to(llama_folder / "model.safetensors")
    tree = json.loads((llama_folder / "config.json").read_text()) | {"model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(tree | changes))
    assert read_model(tmp_path).config.data.seq_len == seq_len


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_each_family_has_the_logits_that_transformers_computes(family: str, tmp_path: Path) -> None:
    """Dense, with an index where all blocks are selected, exported, decoded, and dense again."""
    model_type, changes = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **SHAPE | changes)
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in original.named_parameters():  # some start as if they were not there
        if name.endswith("bias") or "norm" in name:
            parameter.add_(0.3 * torch.randn_like(parameter))
    original.save_pretrained(tmp_path / "original", max_shard_size="50KB")
    expected = logits(original, tokens(100))
    run = imported(tmp_path / "original", tmp_path / "dense", "--attention", "dense")
    assert (logits(run.model, tokens(100)) - expected).norm() < 1e-5 * expected.norm()
    run = imported(tmp_path / "original", tmp_path / "run", *SMALL)
    short = logits(run.model, tokens(32))
    assert (short - logits(original, tokens(32))).norm() < 1e-5 * short.norm()
    exported = NSAForCausalLM.from_pretrained(export(tmp_path / "run", tmp_path / "hf")).eval()
    assert torch.equal(logits(exported, tokens(32)), short)
    text = exported.generate(tokens(20), max_new_tokens=12, do_sample=False, eos_token_id=-1)
    assert torch.equal(logits(exported, text)[:, 19:-1].argmax(-1), text[:, 20:])
    plain = AutoModelForCausalLM.from_pretrained(
        export(tmp_path / "run", tmp_path / "d", dense=True)
    )
    assert not [*(tmp_path / "d").glob("*.py")]
    assert "nsa" not in type(plain).__module__
    assert (logits(plain, tokens(100)) - expected).norm() < 1e-5 * expected.norm()


@torch.no_grad()
def test_a_family_in_bfloat16_has_the_error_of_bfloat16(tmp_path: Path) -> None:
    model_type, changes = FAMILIES["qwen3"]
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SHAPE | changes))
    original.eval().bfloat16().save_pretrained(tmp_path / "original")
    run = imported(tmp_path / "original", tmp_path / "run", "--attention", "dense")
    theirs, mine = logits(original, tokens(100)), logits(run.model, tokens(100))
    assert mine.dtype == torch.bfloat16
    exact = logits(original.float(), tokens(100))
    error, usual = ((x.float() - exact).norm() for x in (mine, theirs))
    assert error < 2 * usual


def test_a_sparse_import_can_be_imported_as_the_dense_model(
    llama_folder: Path, tmp_path: Path
) -> None:
    dense = logits(LlamaForCausalLM.from_pretrained(llama_folder).eval(), tokens(100))
    sparse = logits(imported(llama_folder, tmp_path / "run", *SMALL).model, tokens(100))
    assert (sparse - dense)[:, -1].abs().max() > 1e-3 * dense.abs().max(), "it is dense"
    again = imported(tmp_path / "run", tmp_path / "again", "--attention=dense")
    assert (logits(again.model, tokens(100)) - dense).norm() < 1e-5 * dense.norm()


def test_a_converted_model_has_22_blocks_and_an_index_key_per_token_or_the_sizes_of_its_run(
    llama_folder: Path, dense_run: Path, tmp_path: Path
) -> None:
    attention = imported(llama_folder, tmp_path / "llama").config.model.attention
    spec = NSASpec(block_len=1, block_stride=1, select_top=22, local_blocks=8)
    assert attention == AttentionConfig(branches="sel", selector_loss=1.0, spec=spec)
    sizes = load_run(dense_run, device="cpu").config.model.attention.spec
    converted = imported(dense_run, tmp_path / "run", "--attention=nsa").config.model.attention
    spec = replace(sizes, window=NSASpec.window)
    expected = replace(attention, spec=spec, compressor="pool", backend="blockwise")
    assert converted == expected != attention


def test_a_tied_matrix_is_read_by_either_of_its_names_and_must_be_one(
    llama_folder: Path, tmp_path: Path, refused: Refused
) -> None:
    """safetensors' save_model keeps only the head's name."""
    other = tmp_path / "llama"
    shutil.copytree(llama_folder, other)
    weights = load_file(llama_folder / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # of old checkpoints
    save_file(weights, other / "model.safetensors")
    model = imported(other, tmp_path / "run", "--attention=dense").model
    head = weights.pop("lm_head.weight")
    assert torch.equal(model.embed.weight, head)
    both = {"lm_head.weight": head, "model.embed_tokens.weight": 2 * head}
    save_file(weights | both, other / "model.safetensors")
    assert "lm_head.weight differs from the embedding" in refused(other)
    save_file(weights, other / "model.safetensors")
    assert "has no weight model.embed_tokens.weight" in refused(other)


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of this package, whose pattern an index takes."""
    spec = [flag.removeprefix("--set=attention.") for flag in SMALL]
    settings = ["kind=dense", "compressor=pool", "backend=blockwise", *spec]
    folder = tmp_path_factory.mktemp("models") / "dense"
    recomputed = "model.activation_checkpointing=non_reentrant"
    return write_model(folder, recomputed, *(f"model.attention.{name}" for name in settings))


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_import_and_export_round_trip_bit_for_bit(
    attention: str, dense_run: Path, tmp_path: Path
) -> None:
    start, first, again, second = (tmp_path / name for name in ("start", "a", "again", "b"))
    imported(dense_run, start, f"--attention={attention}")
    export(start, first)
    imported(first, again)
    export(again, second)
    for file in ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json"):
        assert (first / file).read_bytes() == (second / file).read_bytes(), file
    before, after = (load_run(path).config for path in (start, again))
    train = replace(before.train, start_from=str(again))
    assert after == replace(before, train=train)
    assert json.loads((first / "config.json").read_text())["attention"]["kind"] == attention


def test_an_export_saved_again_by_transformers_is_imported(dense_run: Path, tmp_path: Path) -> None:
    """It records the shape of the model, but not how it was trained."""
    start = imported(dense_run, tmp_path / "start", "--attention=nsa")
    first = export(tmp_path / "start", tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(first)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(tmp_path / "tuned")
    AutoTokenizer.from_pretrained(first).save_pretrained(tmp_path / "tuned")
    run = imported(tmp_path / "tuned", tmp_path / "run")
    assert torch.equal(run.model.norm.weight, model.model.norm.weight)
    assert run.config.model.attention == replace(start.config.model.attention, backend="auto")
    assert run.config.data.seq_len == start.config.data.seq_len == 96
    assert run.config.data.tokenizer == f"hf:{tmp_path / 'run'}"
    assert run.tokenizer.encode("héllo".encode()).tolist() == list("héllo".encode())


SCRATCH = TrainConfig()


def test_an_import_continues_with_a_tenth_of_the_rate_and_of_the_steps(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = imported(llama_folder, tmp_path / "run")
    config, parameters = run.config, sum(x.numel() for x in run.model.parameters())
    assert config.train.learning_rate == pytest.approx(SCRATCH.learning_rate / 10)
    assert config.train.min_learning_rate == pytest.approx(SCRATCH.min_learning_rate / 10)
    assert (config.train.steps, config.train.warmup_steps) == (5_000, 200)
    output = capsys.readouterr().out
    assert output.startswith(f"{tmp_path / 'run'}: {parameters:,} parameters, nsa attention\n")
    settings = f"--config {tmp_path / 'run' / 'config.yaml'}"
    assert f"start a recipe from it: {settings} (5,000 steps at 6e-05)\n" in output
    recipe = f"python recipes/sparsify.py --set train.start_from={tmp_path / 'run'}\n"
    assert f"make it sparse: {recipe}" in output
    again = imported(tmp_path / "run", tmp_path / "again").config.train
    assert (again.steps, again.learning_rate) == (5_000, config.train.learning_rate)
    start = f"start a recipe from it: --config {tmp_path / 'again/config.yaml'} ("
    assert start in capsys.readouterr().out


def test_a_run_that_began_densely_can_be_continued(llama_folder: Path, tmp_path: Path) -> None:
    """train.dense_steps needs new weights, so an import must not keep it."""
    imported(llama_folder, tmp_path / "run")
    file = tmp_path / "run/config.yaml"
    tree = yaml.safe_load(file.read_text())
    tree["train"] |= {"dense_steps": 100, "steps": 300, "start_from": None}
    file.write_text(yaml.safe_dump(tree))
    assert main(command(tmp_path / "run", tmp_path / "again")) == 0
    train = yaml.safe_load((tmp_path / "again/config.yaml").read_text())["train"]
    assert (train["dense_steps"], train["steps"]) == (0, 30)


HALF_ROTARY = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
ONLY = "this model supports only"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2': has learned positions"),
        ({"model_type": "olmo2"}, "model_type = 'olmo2': has norms after attention"),
        ({"model_type": "bloom"}, "model_type = 'bloom': must be one"),
        ({"attention_bias": True}, f"attention_bias = True: {ONLY} False"),
        ({"mlp_bias": True}, f"mlp_bias = True: {ONLY} False"),
        ({"attention_dropout": 0.1}, f"attention_dropout = 0.1: {ONLY} 0"),
        ({"rope_parameters": HALF_ROTARY}, f"partial_rotary_factor = 0.5: {ONLY} 1"),
        ({"model_type": "mistral", "sliding_window": 511}, f"= 511: {ONLY} None, or 512 and more"),
        ({"hidden_act": "gelu"}, f"hidden_act = 'gelu': {ONLY} 'silu'"),
        ({"rope_parameters": DYNAMIC}, f"'dynamic': {ONLY} one of default, linear, llama3, yarn"),
        ({"quantization_config": {"quant_method": "fp8"}}, "_config = {'quant_method': 'fp8'}"),
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
        ("-inf", "weight blocks.1.mlp.up.weight has infinite or NaN elements"),
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
    elif change in ("nan", "-inf"):
        weights[name][3, 4] = float(change)
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
    error = refused(write_model(tmp_path / "run"), "--attention=dense")
    assert "has the keys and values of several branches, which cannot become dense; omit" in error


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
