"""`nsa import`: exports, Llamas and dense runs become folders that training starts from."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nsa.cli import main
from nsa.data.config import DataConfig
from nsa.data.dataset import open_source
from nsa.data.tokenizer import Tokenizer, train_tokenizer
from nsa.engine.config import RunConfig
from nsa.engine.load_run import load_run
from nsa.engine.planner_inputs import batch_of, model_of, zero_of
from nsa.engine.resume import find_initial_weights
from nsa.export import logit_gap
from nsa.export.from_hf import read_model
from nsa.export.to_hf import export
from nsa.model import AttentionConfig, parameter_count
from nsa.model.hf import NSAForCausalLM
from nsa.monitor.csv_files import read_metrics
from nsa.planner.memory import memory
from tests.data.texts import open_store, texts, write_lines
from tests.engine.runs import TINY, on_one_rank, succeed
from tests.ranks import ROOT

# Selected and window branches see all of 32 tokens.
SPEC = ["block_len=8", "block_stride=4", "select_len=8", "select_top=4", "window=32"]
SMALL = [f"--set=attention.spec.{setting}" for setting in SPEC]
SHAPE: dict[str, Any] = {
    "vocab_size": 270,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_theta": 3e4, "rope_type": "default"},
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # so large that attention is far from uniform
}

LLAMA_3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR: dict[str, Any] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN["original_max_position_embeddings"] = 32
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # model_type and what differs from SHAPE
    "llama 2": ("llama", {"tie_word_embeddings": False}),
    "llama 3": ("llama", {"rope_parameters": LLAMA_3, "head_dim": 24}),
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral 0.1": ("mistral", {"sliding_window": 4_096}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    "smollm3": ("smollm3", {"pad_token_id": 0}),
}


def llama(folder: Path, shard: str = "1GB", **changes: Any) -> LlamaForCausalLM:
    """A Llama checkpoint with random weights, saved by transformers."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | changes)).eval()
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def full(*values: object) -> Any:
    """Parameters of a case that only the full test run has."""
    return pytest.param(*values, marks=pytest.mark.full)


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output = model(tokens)
    return output if isinstance(output, torch.Tensor) else output.logits


def tokens(length: int) -> torch.Tensor:
    return torch.randint(270, (2, length), generator=torch.Generator().manual_seed(1))


def command(folder: Path, to: Path, *arguments: str) -> list[str]:
    """An import; with bytes for a folder without a tokenizer."""
    tokenizer = [] if (folder / "tokenizer.json").exists() else ["--tokenizer=byte"]
    return ["import", str(folder), "--to", str(to), *tokenizer, *arguments]


def imported(folder: Path, to: Path, *arguments: str) -> Any:
    assert main(command(folder, to, *arguments)) == 0
    return load_run(to, device="cpu")


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    """Return the error, which must be one line; no file may be left."""
    to = folder.parent / "refused"
    assert main(command(folder, to, *arguments)) == 2
    assert [path for path in folder.parent.iterdir() if "refused" in path.name] == []
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "llama"
    llama(folder)
    return folder


def test_sequences_so_short_that_nothing_is_skipped_are_warned_about(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported(llama_folder, tmp_path / "short")  # 512 tokens, 8 blocks of 64
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nsa: warning: data.seq_len = 512: has 8 selection blocks and ")
    assert "every query selects all of its blocks; set data.seq_len above 1024" in line
    imported(llama_folder, tmp_path / "sparse", *SMALL)
    imported(llama_folder, tmp_path / "dense", "--attention=dense")
    assert capsys.readouterr().err == ""


@pytest.fixture(scope="module")
def dense_logits(llama_folder: Path) -> torch.Tensor:
    return logits(LlamaForCausalLM.from_pretrained(llama_folder).eval(), tokens(100))


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_an_imported_llama_computes_the_same_logits(shard: str, tmp_path: Path) -> None:
    original = llama(tmp_path / "llama", shard)
    assert (tmp_path / "llama/model.safetensors").exists() == (shard == "1GB")
    run = imported(tmp_path / "llama", tmp_path / "run", "--attention", "dense")
    expected = logits(original, tokens(100))
    assert (logits(run.model, tokens(100)) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert run.config.model.attention.kind == "dense"
    assert (run.config.data.seq_len, run.step) == (512, None)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_each_family_has_the_logits_that_transformers_computes(family: str, tmp_path: Path) -> None:
    """As dense attention, as NSA where its branches see all, and after an export and decoding."""
    model_type, changes = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **SHAPE | {"num_hidden_layers": 4} | changes)
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in original.named_parameters():  # some start as if they were not there
        if name.endswith("bias") or "norm" in name:
            parameter.add_(0.3 * torch.randn_like(parameter))
    original.save_pretrained(tmp_path / "original", max_shard_size="50KB")
    expected = logits(original, tokens(100))
    run = imported(tmp_path / "original", tmp_path / "dense", "--attention", "dense")
    assert (logits(run.model, tokens(100)) - expected).norm() < 1e-5 * expected.norm()
    run = imported(
        tmp_path / "original", tmp_path / "run", *SMALL, "--set=attention.compressor=pool"
    )
    short = logits(run.model, tokens(32))
    assert (short - logits(original, tokens(32))).norm() < 1e-5 * short.norm()
    exported = NSAForCausalLM.from_pretrained(export(tmp_path / "run", tmp_path / "hf")).eval()
    assert torch.equal(logits(exported, tokens(32)), short)
    text = exported.generate(tokens(20), max_new_tokens=12, do_sample=False, eos_token_id=-1)
    assert torch.equal(logits(exported, text)[:, 19:-1].argmax(-1), text[:, 20:])


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama 3"])
@torch.no_grad()
def test_a_family_in_bfloat16_has_the_error_of_bfloat16(family: str, tmp_path: Path) -> None:
    model_type, changes = FAMILIES[family]
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SHAPE | changes))
    original.eval().bfloat16().save_pretrained(tmp_path / "original")
    run = imported(tmp_path / "original", tmp_path / "run", "--attention", "dense")
    theirs, mine = logits(original, tokens(100)), logits(run.model, tokens(100))
    assert mine.dtype == torch.bfloat16
    exact = logits(original.float(), tokens(100))
    error, usual = ((x.float() - exact).norm() for x in (mine, theirs))
    assert error < 2 * usual


TRUE_SHAPES: dict[str, tuple[str, dict[str, Any], int]] = {  # and their parameters
    "SmolLM2-135M": (
        "llama",
        {
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1_536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
        134_515_008,
    ),
    "Qwen3-0.6B": (
        "qwen3",
        {
            "vocab_size": 151_936,
            "hidden_size": 1_024,
            "intermediate_size": 3_072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    "Llama-3.2-1B": (
        "llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 2_048,
            "intermediate_size": 8_192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA_3,
        },
        1_235_814_400,
    ),
}


@pytest.mark.parametrize("name", TRUE_SHAPES)
def test_a_model_of_its_true_shape_is_counted_and_planned(name: str, tmp_path: Path) -> None:
    """Without weights: transformers' and this package's are built on the meta device."""
    model_type, shape, parameters = TRUE_SHAPES[name]
    config = AutoConfig.for_model(model_type, **shape)
    with torch.device("meta"):
        original = AutoModelForCausalLM.from_config(config)
    assert original.num_parameters() == parameters
    config.save_pretrained(tmp_path)
    save_file({"unread": torch.ones(1)}, tmp_path / "model.safetensors")
    model = read_model(tmp_path).config.model
    assert parameter_count(model) == parameters
    sparse = replace(model, attention=AttentionConfig(compressor="pool", selector_loss=1.0))
    assert parameters < parameter_count(sparse) < 1.25 * parameters
    run = replace(RunConfig(), model=sparse)
    zero = zero_of(ROOT / "ds_configs/zero2_pcie.json", run, 2)
    peak = memory(model_of(run), zero, batch_of(run), 2).peak
    assert 16 * parameters / 2 < peak < 200e9


@pytest.mark.full
@pytest.mark.parametrize("name", TRUE_SHAPES)
def test_one_layer_of_the_true_width_has_the_same_logits_and_learns(
    name: str, tmp_path: Path
) -> None:
    """With the full vocabulary, up to 151,936 ids, in the loss and its gradient."""
    model_type, shape, _ = TRUE_SHAPES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **shape | {"num_hidden_layers": 1})
    original = AutoModelForCausalLM.from_config(config).eval()
    original.save_pretrained(tmp_path / "original")
    ids = torch.randint(shape["vocab_size"], (1, 600), generator=torch.Generator().manual_seed(1))
    expected = logits(original, ids)
    dense = imported(tmp_path / "original", tmp_path / "dense", "--attention=dense")
    assert (logits(dense.model, ids) - expected).norm() < 1e-5 * expected.norm()
    sparse = imported(tmp_path / "original", tmp_path / "sparse").model.train()
    loss = sparse(ids, labels=ids.roll(-1, 1))  # 600 tokens: selection includes all blocks
    with torch.no_grad():
        theirs = torch.nn.functional.cross_entropy(expected[0], ids.roll(-1, 1)[0])
    torch.testing.assert_close(loss, theirs)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in sparse.parameters())


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("gpt2", "learned positions"), ("olmo2", "norms after attention"), ("bloom", "must be one")],
)
def test_another_architecture_is_refused_by_what_differs(
    model_type: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "original"
    llama(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": model_type}))
    capsys.readouterr()
    error = refused(capsys, folder)
    assert reason in error
    assert f"model_type = '{model_type}'" in error


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ([], None),
        full([], "0,1,0"),
        ([], "0,0.25,0.75"),
        (["compressor=mlp"], None),
        full(["branches=sel+win"], None),
        full(["branches=cmp+sel"], None),
        (["branches=win"], None),
    ],
)
def test_nsa_starts_as_the_dense_model_where_its_branches_see_all(
    settings: list[str],
    shares: str | None,
    llama_folder: Path,
    dense_logits: torch.Tensor,
    tmp_path: Path,
) -> None:
    given = [f"--set=attention.{setting}" for setting in settings]
    given += [] if shares is None else ["--shares", shares]
    start = imported(llama_folder, tmp_path / "run", *SMALL, *given).model
    difference = (logits(start, tokens(100)) - dense_logits).abs().amax((0, 2))
    error = difference / dense_logits.abs().max()
    assert error[:32].max() < 1e-4
    assert error[-1] > 1e-3, "it is dense"


def test_shared_values_and_a_compressed_share_start_elsewhere(
    llama_folder: Path, tmp_path: Path
) -> None:
    """With one V no share can be 0; and the compressed branch may get a share."""
    dense = imported(llama_folder, tmp_path / "dense", "--attention=dense").model
    shared = imported(
        llama_folder, tmp_path / "shared", *SMALL, "--set=attention.shared_kv=true"
    ).model
    mixed = imported(llama_folder, tmp_path / "mixed", *SMALL, "--shares=0.2,0.4,0.4").model
    v = dense.blocks[1].attention.v.weight
    assert torch.allclose(shared.blocks[1].attention.v.weight, v * 2 / 3)
    assert torch.allclose(
        mixed.blocks[1].attention.v.weight, torch.cat([v * 0.4, v * 0.8, v * 0.8])
    )
    for start in (shared, mixed):
        first = tokens(7)  # no block is compressed yet
        assert not torch.allclose(logits(start, first), logits(dense, first), atol=1e-2)


def test_an_mlp_compressor_starts_as_the_mean(llama_folder: Path, tmp_path: Path) -> None:
    attention = (
        imported(llama_folder, tmp_path / "run", *SMALL, "--set=attention.compressor=mlp")
        .model.blocks[0]
        .attention
    )
    blocks = torch.randn(2, 3, 8, 2, 16)
    with torch.no_grad():
        assert torch.allclose(attention.compress.key(blocks), blocks.mean(2), atol=1e-6)
        assert torch.allclose(attention.compress.value(blocks), blocks.mean(2), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias = True: this model supports only False"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': this model supports only 'silu'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type = 'dynamic': this model supports only one of default, linear, llama3, yarn",
        ),
    ],
)
def test_an_unsupported_llama_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(tmp_path / "llama", **changes)
    capsys.readouterr()
    assert message in refused(capsys, tmp_path / "llama")


def test_an_untied_head_is_imported_exported_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original, ids = llama(tmp_path / "llama", tie_word_embeddings=False), tokens(100)
    run = imported(tmp_path / "llama", tmp_path / "run", "--attention", "dense")
    expected = logits(original, ids)
    assert (logits(run.model, ids) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert run.config.model.tied_head is False
    export(tmp_path / "run", tmp_path / "exported")
    model = NSAForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(logits(model, ids), logits(run.model, ids))
    again = imported(tmp_path / "exported", tmp_path / "again")
    assert torch.equal(logits(again.model, ids), logits(run.model, ids))
    sparse = imported(tmp_path / "llama", tmp_path / "sparse")
    assert torch.equal(sparse.model.head.weight, original.lm_head.weight)
    config = tmp_path / "llama/config.json"
    config.write_text(config.read_text().replace('embeddings": false', 'embeddings": true'))
    capsys.readouterr()
    assert "lm_head.weight differs from the embedding" in refused(capsys, tmp_path / "llama")


def test_a_tied_matrix_is_read_by_either_of_its_names(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """safetensors' save_model keeps only the head's name."""
    other = tmp_path / "llama"
    shutil.copytree(llama_folder, other)
    weights = load_file(llama_folder / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, other / "model.safetensors")
    model = imported(other, tmp_path / "run", "--attention=dense").model
    assert torch.equal(model.embed.weight, weights.pop("lm_head.weight"))
    save_file(weights, other / "model.safetensors")
    assert "has no weight model.embed_tokens.weight" in refused(capsys, other)


def test_a_missing_weight_is_named(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(llama_folder, tmp_path / "llama")
    weights = load_file(llama_folder / "model.safetensors")
    del weights["model.layers.1.self_attn.v_proj.weight"]
    save_file(weights, tmp_path / "llama/model.safetensors")
    assert "blocks.1.attention.v.weight is None there" in refused(capsys, tmp_path / "llama")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set=attention.compressor=mlp", "--set=attention.compressor_hidden=31"], "needs 32"),
        (["--shares=0,1"], "--shares 0,1: write a number for each branch, cmp,sel,win"),
        (["--shares=nan,0,1"], "--shares nan,0,1: each is a fraction of the dense output"),
        (["--shares=0,1e40,1"], "write numbers from -100 to 100"),
        (["--shares=0,1,0", "--set=attention.shared_kv=true"], "omit one of the two"),
        (["--set=attention.kind=dense"], "kind = 'dense': only --attention sets"),
        (["--attention=dense", "--set=model.attention.kind=nsa"], "give --attention nsa"),
        (["--attention=dense", "--shares=0,1,0"], "keeps its dense attention"),
        (["--gap=no/such/text"], "no/such/text"),
        (["--attention=dense", "--gap=embedded"], "keeps its dense attention"),
        (["--set=model.layers=3"], "blocks.2."),
        (["--set=model.layer=3"], "did you mean model.layers"),
    ],
)
def test_invalid_arguments_are_refused_with_the_fix(
    arguments: list[str], message: str, llama_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, llama_folder, *arguments)


def test_folders_that_cannot_be_imported_are_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    assert "holds neither checkpoints/ nor model.safetensors" in refused(capsys, folder)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    assert "config.json without model.safetensors; save the model with" in refused(capsys, folder)
    save_file({"wte.weight": torch.ones(2)}, folder / "model.safetensors")
    assert "model_type = 'gpt2': has learned positions" in refused(capsys, folder)
    (folder / "config.json").write_text("[]")
    assert "not the JSON of a configuration" in refused(capsys, folder)
    assert main(["import", str(folder), "--to", str(folder)]) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_name_of_the_hub_is_refused_with_the_command_that_downloads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["import", "org/Small-1B", "--to", "run"]) == 2
    error = capsys.readouterr().err
    assert "hf download org/Small-1B --local-dir models/Small-1B" in error


def test_training_from_a_folder_of_transformers_names_the_import(llama_folder: Path) -> None:
    config = RunConfig()
    config.train.start_from = str(llama_folder)
    with pytest.raises(ValueError, match=f"nsa import {llama_folder} --to"):
        find_initial_weights(config)


def test_the_target_may_be_a_link_but_not_the_working_directory(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
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
    assert main(command(llama_folder, Path("."))) == 2
    assert "--to .: cannot be replaced; name a new folder inside it" in capsys.readouterr().err
    imported(llama_folder, Path("new"), "--attention=dense")


def add_tokenizer(folder: Path) -> Tokenizer:
    """Train a tokenizer of 300 ids and save it in a model's folder."""
    source = write_lines(folder.parent / "lines.jsonl", texts(40))
    tokenizer = train_tokenizer(open_source(DataConfig(), source), 300, folder.parent / "bpe")
    for file in (folder.parent / "bpe").iterdir():
        file.replace(folder / file.name)
    return tokenizer


def test_a_folder_without_a_tokenizer_is_refused_unless_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, to = tmp_path / "llama", tmp_path / "refused"
    llama(folder, vocab_size=300)
    (folder / "tokenizer_config.json").write_text("{}")  # holds no vocabulary
    capsys.readouterr()
    for gap in ([], ["--gap=synthetic"]):
        assert main(["import", str(folder), "--to", str(to), *gap]) == 2
        error = capsys.readouterr().err
        assert f"{folder}: has no tokenizer.json; save the model's tokenizer" in error
        assert error.count("\n") == 1
        assert not to.exists()
    assert "data.tokenizer = 'bytes': choose byte" in refused(capsys, folder, "--tokenizer=bytes")
    for flag in ("--tokenizer=byte", "--set=data.tokenizer=byte"):
        run = imported(folder, tmp_path / flag[2:5], flag)
        assert run.config.data.tokenizer == "byte"
    add_tokenizer(folder.rename(tmp_path / "other"))
    named = imported(tmp_path / "other", tmp_path / "own")
    assert named.config.data.tokenizer == f"hf:{tmp_path / 'own'}"


def test_the_byte_tokenizer_is_refused_for_a_smaller_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(tmp_path / "llama", vocab_size=258)
    capsys.readouterr()
    error = refused(capsys, tmp_path / "llama", "--tokenizer=byte")
    assert "--tokenizer byte: has 259 ids, but the vocabulary of" in error
    assert "has 258" in error


def test_a_llamas_tokenizer_is_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The new folder does not need the old one; the gap's text is read with the tokenizer."""
    monkeypatch.setattr(logit_gap, "TOKENS", 64)
    text = ["--gap=synthetic", "--set=data.synthetic_bytes=20000", "--attention=nsa", *SMALL]
    folder = tmp_path / "llama"
    llama(folder, vocab_size=300)
    expected = add_tokenizer(folder)
    imported(folder, tmp_path / "dense", "--attention=dense")
    for source, to in ((tmp_path / "dense", "sparse"), (folder, "run")):
        imported(source, tmp_path / to, *text)
        assert len(re.findall(r"^ +\d+ .*%$", capsys.readouterr().out, re.M)) == 3
    shutil.rmtree(folder)
    (tmp_path / "run").rename(tmp_path / "moved")
    run = load_run(tmp_path / "moved")
    assert run.tokenizer is not None
    assert run.tokenizer.fingerprint == expected.fingerprint
    assert run.config.data.tokenizer == f"hf:{tmp_path / 'run'}"


CHAT = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chat_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose tokenizer starts each text with a token and has a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "llama"
    llama(folder, vocab_size=270, eos_token_id=[1, 3])
    add_chat_tokenizer(folder)
    return folder


def add_chat_tokenizer(folder: Path) -> None:
    """Save a tokenizer of bytes with four special tokens and a chat template."""
    vocab = {
        letter: number + 4 for number, letter in enumerate(sorted(bytes_to_unicode().values()))
    }
    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    backend = Backend(
        models.BPE(vocab=dict(zip(specials, range(4), strict=True)) | vocab, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(specials)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=specials[2:],
        chat_template=CHAT,
    )
    tokenizer.save_pretrained(folder)


def test_a_tokenizers_special_tokens_and_chat_template_travel(
    chat_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = imported(chat_llama, tmp_path / "run")
    assert run.tokenizer.start_id == 0
    assert run.tokenizer.eos_id == 1
    ids = run.tokenizer.encode(b"a<s>b")
    assert 0 not in ids, "a text cannot spell a special token"
    text = tmp_path / "text.jsonl"
    write_lines(text, [b"one", b"two"])
    stored = open_store(replace(run.config.data, source=str(text), held_out=0.4), "train")
    stream = stored.read(0, len(stored)).tolist()
    assert [stream.count(id) for id in (0, 1, 2)] == [2, 2, 0]
    assert [stream[0], stream[-1]] == [0, 1]

    folder = export(tmp_path / "run", tmp_path / "hf")
    for again in (load_run(folder, device="cpu"), imported(folder, tmp_path / "again")):
        assert again.tokenizer.fingerprint == run.tokenizer.fingerprint
        assert again.tokenizer.start_id == 0
    source, exported = (AutoTokenizer.from_pretrained(path) for path in (chat_llama, folder))
    messages = [{"role": "user", "content": "hello <|im_end|> you"}]
    for text_of in (
        lambda tokenizer: tokenizer("a <|im_start|> b").input_ids,
        lambda tokenizer: tokenizer.apply_chat_template(messages, add_generation_prompt=True)[
            "input_ids"
        ],
    ):
        assert text_of(exported) == text_of(source)
    assert exported.chat_template == CHAT
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [1, 3]
    assert (settings["bos_token_id"], settings["pad_token_id"]) == (0, 1)

    capsys.readouterr()
    command = ["generate", str(folder), "--temperature=0", "--max-new-tokens=8", "--device=cpu"]
    assert main([*command, "--chat", "--prompt=hello <|im_end|> you"]) == 0
    mine = capsys.readouterr().out
    prompt = source.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = NSAForCausalLM.from_pretrained(folder).eval()
    theirs = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    expected = theirs[0, prompt["input_ids"].shape[1] :]
    assert mine == source.decode(expected, skip_special_tokens=True) + "\n"


def test_the_card_names_the_models_origin_and_license(chat_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small-llama"
    shutil.copytree(chat_llama, folder)
    (folder / "README.md").write_text("---\nlicense: llama3.2\n---\n# A model\n")
    imported(folder, tmp_path / "run")
    card = (export(tmp_path / "run", tmp_path / "hf") / "README.md").read_text()
    assert "license: llama3.2" in card
    assert "Its weights come from small-llama, whose license is llama3.2." in card
    assert str(tmp_path) not in card


def test_weights_that_are_not_finite_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(tmp_path / "llama")
    file = tmp_path / "llama/model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = math.nan
    save_file(weights, file, metadata={"format": "pt"})
    capsys.readouterr()
    error = refused(capsys, tmp_path / "llama")
    assert "weight blocks.1.mlp.up.weight is not finite everywhere" in error


def test_a_tokenizer_larger_than_the_embedding_is_refused(
    chat_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(tmp_path / "llama", vocab_size=200)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(chat_llama / name, tmp_path / "llama" / name)
    capsys.readouterr()
    error = refused(capsys, tmp_path / "llama")
    assert "has ids up to 259, but the model's vocabulary is 200" in error


def test_a_chat_without_a_template_is_refused(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported(llama_folder, tmp_path / "run")
    assert main(["generate", str(tmp_path / "run"), "--chat", "--prompt=hello"]) == 2
    assert "--chat: the tokenizer 'byte' has no chat template" in capsys.readouterr().err


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the dense twin with sequences shorter than the demo's window."""
    folder = tmp_path_factory.mktemp("runs")
    succeed(on_one_rank("m7c_dense.py", *TINY, "--steps=4", "--run-dir=dense", folder=folder))
    return folder / "dense"


def test_a_recipe_continues_a_dense_run_as_nsa(dense_run: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    imported(dense_run, start, "--attention=nsa")
    settings = [f"--config={start / 'config.yaml'}", "--steps=1"]
    settings += ["--set=train.learning_rate=1e-9", "--set=train.min_learning_rate=0"]
    output = succeed(on_one_rank("m7c.py", *settings, "--run-dir=run", folder=tmp_path))
    assert f"initial weights: {start}" in output
    before, after = (read_metrics(run / "metrics.csv")[-1] for run in (dense_run, tmp_path / "run"))
    assert after["val_loss"] == pytest.approx(before["val_loss"], rel=2e-4)  # rounded to bf16
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["model"]["attention"] == (
        yaml.safe_load((dense_run / "config.yaml").read_text())["model"]["attention"]
        | {"kind": "nsa", "compressor": "pool", "selector_loss": 1.0}
    )


def test_the_logit_gap_is_measured_on_short_and_long_texts(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(logit_gap, "TOKENS", 64)
    text = ["--gap=synthetic", "--set=data.synthetic_bytes=20000"]
    imported(llama_folder, tmp_path / "start", *text, *SMALL)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [row[0] for row in rows] == ["16", "32", "64"]
    assert [row[3:] for row in rows[:2]] == [["+0.0000", "0.0000", "100.0%"]] * 2
    dense, sparse, increase, kl = map(float, rows[2][1:5])
    assert increase == pytest.approx(sparse - dense, abs=2e-4)
    assert kl > 0.01


def test_a_gap_with_the_wrong_tokenizer_is_refused_after_the_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "llama"
    llama(folder, vocab_size=60)
    add_tokenizer(folder)
    text = ["--gap=synthetic", "--set=data.synthetic_bytes=20000", *SMALL]
    text += [f"--tokenizer=hf:{folder}"]  # named, so the import does not compare it
    assert main(command(folder, tmp_path / "run", *text)) == 2
    assert "vocabulary is 60; set data.tokenizer" in capsys.readouterr().err
    assert load_run(tmp_path / "run", device="cpu").config.model.vocab_size == 60


def test_the_gaps_dataset_is_checked_before_the_weights(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(llama_folder, tmp_path / "llama")
    (tmp_path / "llama/model.safetensors").write_bytes(b"damaged")
    assert "'no/such/text': no such" in refused(capsys, tmp_path / "llama", "--gap=no/such/text")
    assert "is damaged" in refused(capsys, tmp_path / "llama")


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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first = export(dense_run, tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(first)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(tmp_path / "tuned")
    AutoTokenizer.from_pretrained(first).save_pretrained(tmp_path / "tuned")
    run = imported(tmp_path / "tuned", tmp_path / "run")
    assert torch.equal(run.model.norm.weight, model.model.norm.weight)
    assert run.config.model.attention.kind == "dense"
    assert run.config.data.tokenizer == f"hf:{tmp_path / 'run'}"
    assert run.tokenizer.encode("héllo".encode()).tolist() == list("héllo".encode())
