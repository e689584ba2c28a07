"""`nsa import`: what others, and we ourselves, have trained becomes what a run begins with."""

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
from transformers import LlamaConfig, LlamaForCausalLM

from nsa.cli import main
from nsa.data.config import DataConfig
from nsa.data.factory import open_source
from nsa.data.tokenizer import train_tokenizer
from nsa.engine.load_run import load_run
from nsa.export import logit_gap
from nsa.export.to_hf import export
from nsa.monitor.metrics_csv import read_metrics
from tests.data.texts import texts, write_lines
from tests.engine.runs import TINY, alone, succeed

# Both branches that attend to tokens see all of 32.
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
    "initializer_range": 0.3,  # far from a mean of all: what is attended to matters
}


def llama(folder: Path, shard: str = "1GB", **changes: Any) -> LlamaForCausalLM:
    """A checkpoint as transformers leaves it, with random weights."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | changes)).eval()
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, torch.Tensor) else found.logits


def tokens(length: int) -> torch.Tensor:
    return torch.randint(270, (2, length), generator=torch.Generator().manual_seed(1))


def imported(place: Path, to: Path, *arguments: str) -> Any:
    assert main(["import", str(place), "--to", str(to), *arguments]) == 0
    return load_run(to, device="cpu")


def refused(capsys: pytest.CaptureFixture[str], place: Path, *arguments: str) -> str:
    """The line that a user reads; nothing may be left behind."""
    to = place.parent / "refused"
    assert main(["import", str(place), "--to", str(to), *arguments]) == 2
    assert [path for path in place.parent.iterdir() if "refused" in path.name] == []
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "llama"
    llama(folder)
    return folder


@pytest.fixture(scope="module")
def dense_logits(place: Path) -> torch.Tensor:
    return logits(LlamaForCausalLM.from_pretrained(place).eval(), tokens(100))


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_a_llama_computes_here_what_it_computes_there(shard: str, tmp_path: Path) -> None:
    theirs = llama(tmp_path / "llama", shard)
    assert (tmp_path / "llama/model.safetensors").exists() == (shard == "1GB")
    ours = imported(tmp_path / "llama", tmp_path / "run", "--attention", "dense")
    wanted = logits(theirs, tokens(100))
    assert (logits(ours.model, tokens(100)) - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert ours.config.model.attention.kind == "dense"
    assert (ours.config.data.seq_len, ours.step) == (512, None)


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ([], None),
        ([], "0,1,0"),
        ([], "0,0.25,0.75"),
        (["compressor=mlp"], None),
        (["branches=sel+win"], None),
        (["branches=cmp+sel"], None),
        (["branches=win"], None),
    ],
)
def test_nsa_begins_as_the_dense_model_where_its_branches_see_all(
    settings: list[str],
    shares: str | None,
    place: Path,
    dense_logits: torch.Tensor,
    tmp_path: Path,
) -> None:
    given = [f"--set=attention.{setting}" for setting in settings]
    given += [] if shares is None else ["--shares", shares]
    start = imported(place, tmp_path / "run", *SMALL, *given).model
    found, wanted = logits(start, tokens(100)), dense_logits
    apart = (found - wanted).abs().amax((0, 2)) / wanted.abs().max()
    assert apart[:32].max() < 1e-4
    assert apart[-1] > 1e-3, "it is dense"


def test_shared_values_and_other_shares_begin_elsewhere(place: Path, tmp_path: Path) -> None:
    """One V cannot be left out of one branch; and asked for it, the compressed one takes part."""
    dense = imported(place, tmp_path / "dense", "--attention=dense").model
    shared = imported(place, tmp_path / "shared", *SMALL, "--set=attention.shared_kv=true").model
    mixed = imported(place, tmp_path / "mixed", *SMALL, "--shares=0.2,0.4,0.4").model
    v = dense.blocks[1].attention.v.weight
    assert torch.allclose(shared.blocks[1].attention.v.weight, v * 2 / 3)
    assert torch.allclose(
        mixed.blocks[1].attention.v.weight, torch.cat([v * 0.4, v * 0.8, v * 0.8])
    )
    for start in (shared, mixed):
        first = tokens(7)  # no block is compressed yet
        assert not torch.allclose(logits(start, first), logits(dense, first), atol=1e-2)


def test_an_mlp_begins_as_the_mean(place: Path, tmp_path: Path) -> None:
    attention = (
        imported(place, tmp_path / "run", *SMALL, "--set=attention.compressor=mlp")
        .model.blocks[0]
        .attention
    )
    blocks = torch.randn(2, 3, 8, 2, 16)
    with torch.no_grad():
        assert torch.allclose(attention.compress.key(blocks), blocks.mean(2), atol=1e-6)
        assert torch.allclose(attention.compress.value(blocks), blocks.mean(2), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings = false: its head is not"),
        ({"attention_bias": True}, "attention_bias = True: this model supports only False"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': this model supports only 'silu'"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type = 'linear': this model supports only a base",
        ),
    ],
)
def test_a_llama_that_computes_something_else_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(tmp_path / "llama", **changes)
    capsys.readouterr()
    assert words in refused(capsys, tmp_path / "llama")


def test_an_untied_head_that_is_the_embedding_all_the_same_is_taken(tmp_path: Path) -> None:
    llama(tmp_path / "llama", tie_word_embeddings=False)
    file = tmp_path / "llama/model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file)
    imported(tmp_path / "llama", tmp_path / "run")


def test_a_tied_matrix_is_taken_by_either_of_its_names(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """safetensors' save_model keeps the head's alone."""
    other = tmp_path / "llama"
    shutil.copytree(place, other)
    weights = load_file(place / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, other / "model.safetensors")
    found = imported(other, tmp_path / "run", "--attention=dense").model
    assert torch.equal(found.embed.weight, weights.pop("lm_head.weight"))
    save_file(weights, other / "model.safetensors")
    assert "its files hold no model.embed_tokens.weight" in refused(capsys, other)


def test_a_weight_that_is_not_in_the_files_is_named(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place, tmp_path / "llama")
    weights = load_file(place / "model.safetensors")
    del weights["model.layers.1.self_attn.v_proj.weight"]
    save_file(weights, tmp_path / "llama/model.safetensors")
    assert "blocks.1.attention.v.weight is None there" in refused(capsys, tmp_path / "llama")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set=attention.compressor=mlp", "--set=attention.compressor_hidden=31"], "needs 32"),
        (["--shares=0,1"], "--shares 0,1: write a number for each branch, cmp,sel,win"),
        (["--shares=nan,0,1"], "--shares nan,0,1: each is a fraction of the dense output"),
        (["--shares=0,1e40,1"], "write numbers from -100 to 100"),
        (["--shares=0,1,0", "--set=attention.shared_kv=true"], "leave one of the two out"),
        (["--set=attention.kind=dense"], "kind = 'dense': only --attention sets"),
        (["--attention=dense", "--set=model.attention.kind=nsa"], "give --attention nsa"),
        (["--attention=dense", "--shares=0,1,0"], "keeps its dense attention"),
        (["--gap=no/such/text"], "no/such/text"),
        (["--attention=dense", "--gap=embedded"], "keeps its dense attention"),
        (["--set=model.layers=3"], "blocks.2."),
        (["--set=model.layer=3"], "did you mean model.layers"),
    ],
)
def test_what_cannot_become_a_run_is_refused_with_the_mend(
    arguments: list[str], words: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, place, *arguments)


def test_folders_of_others_are_refused_by_what_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "other"
    place.mkdir()
    assert "holds neither checkpoints/ nor model.safetensors" in refused(capsys, place)
    (place / "config.json").write_text('{"model_type": "gpt2"}')
    assert "no model.safetensors; save the model with" in refused(capsys, place)
    save_file({"wte.weight": torch.ones(2)}, place / "model.safetensors")
    assert "model_type = 'gpt2'; only nsa and llama" in refused(capsys, place)
    (place / "config.json").write_text("[]")
    assert "not the JSON of a configuration" in refused(capsys, place)
    assert main(["import", str(place), "--to", str(place)]) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_new_folder_may_be_called_by_a_link(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Where one stands cannot be replaced: the shell would be left in the folder that was."""
    (tmp_path / "empty").mkdir()
    for link, target in (("to_empty", "empty"), ("to_nothing", "nothing")):
        (tmp_path / link).symlink_to(tmp_path / target)
        imported(place, tmp_path / link, "--attention=dense")
        assert (tmp_path / link).is_symlink()
        assert not (tmp_path / target).is_symlink()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["import", str(place), "--to", "."]) == 2
    assert "--to .: this folder cannot be replaced; name a new one in it" in capsys.readouterr().err
    imported(place, Path("new"), "--attention=dense")


def test_a_llamas_tokenizer_comes_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The new folder is complete: the other may go. The gap's text is read by it."""
    monkeypatch.setattr(logit_gap, "TOKENS", 64)
    text = ["--gap=synthetic", "--set=data.synthetic_bytes=20000", "--attention=nsa", *SMALL]
    place = tmp_path / "llama"
    llama(place, vocab_size=300)
    source = write_lines(tmp_path / "lines.jsonl", texts(40))
    wanted = train_tokenizer(open_source(DataConfig(), source), 300, tmp_path / "bpe")
    for file in (tmp_path / "bpe").iterdir():
        file.replace(place / file.name)
    imported(place, tmp_path / "dense", "--attention=dense")
    for source, to in ((tmp_path / "dense", "sparse"), (place, "run")):
        imported(source, tmp_path / to, *text)
        assert len(re.findall(r"^ +\d+ .*%$", capsys.readouterr().out, re.M)) == 3
    shutil.rmtree(place)
    (tmp_path / "run").rename(tmp_path / "moved")
    found = load_run(tmp_path / "moved")
    assert found.tokenizer is not None
    assert found.tokenizer.fingerprint == wanted.fingerprint
    assert found.config.data.tokenizer == f"hf:{tmp_path / 'run'}"


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the dense twin; its sequences are shorter than the demo's window."""
    folder = tmp_path_factory.mktemp("runs")
    succeed(alone("m7c_dense.py", *TINY, "--steps=4", "--run-dir=dense", folder=folder))
    return folder / "dense"


def test_a_recipe_goes_on_as_nsa_where_the_dense_run_ended(dense_run: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    imported(dense_run, start, "--attention=nsa")
    settings = [f"--config={start / 'config.yaml'}", "--steps=1"]
    settings += ["--set=train.learning_rate=1e-9", "--set=train.min_learning_rate=0"]
    said = succeed(alone("m7c.py", *settings, "--run-dir=run", folder=tmp_path))
    assert f"initial weights: {start}" in said
    before, after = (read_metrics(run / "metrics.csv")[-1] for run in (dense_run, tmp_path / "run"))
    assert after["val_loss"] == pytest.approx(before["val_loss"], rel=2e-4)  # rounded to bf16
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["model"]["attention"] == (
        yaml.safe_load((dense_run / "config.yaml").read_text())["model"]["attention"]
        | {"kind": "nsa"}
    )


def test_the_gap_is_measured_on_short_and_long_texts(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(logit_gap, "TOKENS", 64)
    text = ["--gap=synthetic", "--set=data.synthetic_bytes=20000"]
    imported(place, tmp_path / "start", *text, *SMALL)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [row[0] for row in rows] == ["16", "32", "64"]
    assert [row[3:] for row in rows[:2]] == [["+0.0000", "0.0000", "100.0%"]] * 2
    dense, start, more, kl = map(float, rows[2][1:5])
    assert more == pytest.approx(start - dense, abs=2e-4)
    assert kl > 0.01


def test_text_of_another_tokenizer_is_refused_and_the_import_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(tmp_path / "llama", vocab_size=60)
    text = ["--gap=synthetic", "--set=data.synthetic_bytes=20000", *SMALL]
    assert main(["import", str(tmp_path / "llama"), "--to", str(tmp_path / "run"), *text]) == 2
    assert "vocabulary is 60; set data.tokenizer" in capsys.readouterr().err
    assert load_run(tmp_path / "run", device="cpu").config.model.vocab_size == 60


def test_the_gaps_text_is_looked_for_before_the_weights(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place, tmp_path / "llama")
    (tmp_path / "llama/model.safetensors").write_bytes(b"damaged")
    assert "'no/such/text': no such" in refused(capsys, tmp_path / "llama", "--gap=no/such/text")
    assert "is damaged" in refused(capsys, tmp_path / "llama")


def test_the_gap_is_that_of_the_distributions() -> None:
    """Against probabilities written out: KL(½ ½, ¼ ¾) and the losses of the second token."""
    half, quarter = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    found = logit_gap.compare(
        half.repeat(2, 1), quarter.repeat(2, 1), torch.tensor([1, -100])
    ).tolist()
    kl = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert found == pytest.approx([math.log(2), math.log(4 / 3), kl, 0, 1])


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_an_export_comes_back_equal_to_the_bit(
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


def test_what_transformers_made_of_an_export_is_imported(dense_run: Path, tmp_path: Path) -> None:
    """It knows the shape, and nothing of how the run was trained."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first = export(dense_run, tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(first)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(tmp_path / "tuned")
    AutoTokenizer.from_pretrained(first).save_pretrained(tmp_path / "tuned")
    found = imported(tmp_path / "tuned", tmp_path / "run")
    assert torch.equal(found.model.norm.weight, model.model.norm.weight)
    assert found.config.model.attention.kind == "dense"
    assert found.config.data.tokenizer == f"hf:{tmp_path / 'run'}"
    assert found.tokenizer.encode("héllo".encode()).tolist() == list("héllo".encode())
