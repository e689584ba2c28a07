"""`nsa import`: exports, Llamas and dense runs, with their tokenizers and chat templates."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import nsa.model.hf  # noqa: F401 (registers its classes with transformers)
from nsa.cli import main
from nsa.data.config import DataConfig
from nsa.data.tokenizer import build_tokenizer
from nsa.engine.config import RunConfig, TrainConfig
from nsa.engine.load_run import load_run
from nsa.engine.resume import find_initial_weights
from nsa.evaluate.chat import render_chat
from nsa.export.from_hf import read_model
from nsa.export.to_hf import export
from nsa.model import AttentionConfig
from nsa.model.hf import NSAForCausalLM
from nsa.spec import NSASpec
from tests.data.texts import open_store, write_lines
from tests.disks import set_fields
from tests.evaluate.models import write_model
from tests.export.llamas import (
    CHAT,
    DOUBLE,
    FAMILIES,
    LONGEST,
    SHAPE,
    SMALL,
    Refused,
    add_chat_tokenizer,
    add_tokenizer,
    command,
    imported,
    llama,
    logits,
    tokens,
)


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


@pytest.fixture
def copy(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy of the Llama's folder, which a test edits."""
    return Path(shutil.copytree(llama_folder, tmp_path / "llama"))


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
    model_type: str, changes: dict[str, Any], seq_len: int, copy: Path
) -> None:
    set_fields(copy / "config.json", model_type=model_type, **changes)
    assert read_model(copy).config.data.seq_len == seq_len


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
    copy: Path, tmp_path: Path, refused: Refused
) -> None:
    """safetensors' save_model keeps only the head's name."""
    file = copy / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # of old checkpoints
    save_file(weights, file)
    model = imported(copy, tmp_path / "run", "--attention=dense").model
    head = weights.pop("lm_head.weight")
    assert torch.equal(model.embed.weight, head)
    both = {"lm_head.weight": head, "model.embed_tokens.weight": 2 * head}
    save_file(weights | both, file)
    assert "lm_head.weight differs from the embedding" in refused(copy)
    save_file(weights, file)
    assert "has no weight model.embed_tokens.weight" in refused(copy)


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
        ({"model_type": ["llama"]}, "model_type = ['llama']: must be one"),
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
    changes: dict[str, Any], message: str, copy: Path, refused: Refused
) -> None:
    set_fields(copy / "config.json", **changes)
    assert message in refused(copy)


def test_layers_without_rope_must_be_every_nth(copy: Path) -> None:
    for layers, every in (([1, 1, 0, 1, 1, 0, 1], 3), ([1, 1, 1], 0), ([1, 0, 0], None)):
        count = {"num_hidden_layers": len(layers), "layer_types": None}
        set_fields(copy / "config.json", model_type="smollm3", no_rope_layers=layers, **count)
        if every is None:
            with pytest.raises(ValueError, match="supports only every n-th layer without RoPE"):
                read_model(copy)
        else:
            assert read_model(copy).config.model.no_rope_every == every


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
    change: str, message: str, copy: Path, refused: Refused
) -> None:
    weights, name = load_file(copy / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del weights[name]
    elif change in ("nan", "-inf"):
        weights[name][3, 4] = float(change)
    elif change == "other":
        weights["model.layers.1.mlp.router.weight"] = torch.ones(2)
    else:
        weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert message in refused(copy)


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


def test_a_folder_without_a_tokenizer_is_refused_unless_one_is_named(
    tmp_path: Path, refusal: Refused, refused: Refused
) -> None:
    folder = tmp_path / "llama"
    llama(folder, vocab_size=300)
    (folder / "tokenizer_config.json").write_text("{}")  # holds no vocabulary
    error = refusal("import", folder, "--to", tmp_path / "to")
    assert f"{folder}: has no tokenizer.json; save the model's tokenizer" in error
    assert not (tmp_path / "to").exists()
    for name in ("vocab.json", "tokenizer.model"):  # each is enough for some tokenizers
        (folder / name).touch()
        assert read_model(folder).has_tokenizer
        (folder / name).unlink()
    assert "data.tokenizer = 'bytes': choose byte" in refused(folder, "--tokenizer=bytes")
    for flag in ("--tokenizer=byte", "--set=data.tokenizer=byte"):
        run = imported(folder, tmp_path / flag[2:5], flag)
        assert run.config.data.tokenizer == "byte"


def test_the_byte_tokenizer_is_refused_for_a_smaller_vocabulary(
    tmp_path: Path, refused: Refused
) -> None:
    llama(tmp_path / "llama", vocab_size=258)
    error = refused(tmp_path / "llama", "--tokenizer=byte")
    assert "--tokenizer byte: has 259 ids, but the vocabulary of" in error
    assert "has 258" in error
    llama(tmp_path / "enough", vocab_size=259)
    assert imported(tmp_path / "enough", tmp_path / "run").config.data.tokenizer == "byte"


def test_a_llamas_tokenizer_is_copied(tmp_path: Path) -> None:
    """The new folder does not need the old one."""
    folder = tmp_path / "llama"
    llama(folder, vocab_size=300)
    expected = add_tokenizer(folder)
    imported(folder, tmp_path / "dense", "--attention=dense")
    shutil.rmtree(folder)
    imported(tmp_path / "dense", tmp_path / "run", "--attention=nsa", *SMALL)
    (tmp_path / "run").rename(tmp_path / "moved")
    run = load_run(tmp_path / "moved")
    assert run.tokenizer.fingerprint == expected.fingerprint
    assert run.config.data.tokenizer == f"hf:{tmp_path / 'run'}"


@pytest.fixture(scope="module")
def chat_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose tokenizer starts each text with a token and has a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "llama"
    llama(folder, vocab_size=270, eos_token_id=[1, 3])
    add_chat_tokenizer(folder)
    return folder


@pytest.fixture
def chat_run(chat_llama: Path, tmp_path: Path) -> Path:
    """A copy of an import of it, which is made once."""
    run = chat_llama.with_name("run")
    if not run.exists():
        imported(chat_llama, run)
    return Path(shutil.copytree(run, tmp_path / "run"))


def test_a_tokenizers_special_tokens_and_chat_template_travel(
    chat_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = imported(chat_llama, tmp_path / "run")
    assert run.tokenizer.start_id == 0
    fresh = build_tokenizer(DataConfig(tokenizer=f"hf:{chat_llama}"))
    assert fresh.start_id is None, "a run that imports no model has no start of a document"
    assert run.tokenizer.eos_id == 1
    shutil.copytree(tmp_path / "run", tmp_path / "unmarked")
    set_fields(tmp_path / "unmarked/tokenizer.json", post_processor=None)
    unmarked = build_tokenizer(DataConfig(tokenizer=f"hf:{tmp_path / 'unmarked'}"))
    assert unmarked.start_id is None, "its <s> begins no text"
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
    assert settings == json.loads((chat_llama / "generation_config.json").read_text())

    capsys.readouterr()
    command = ["generate", str(folder), "--temperature=0", "--max-new-tokens=8", "--device=cpu"]
    assert main([*command, "--chat", "--prompt=hello <|im_end|> you"]) == 0
    mine = capsys.readouterr().out
    prompt = source.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = NSAForCausalLM.from_pretrained(folder).eval()
    greedy: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    theirs = model.generate(**prompt, **greedy)
    expected = theirs[0, prompt["input_ids"].shape[1] :]
    assert mine == source.decode(expected, skip_special_tokens=True) + "\n"
    assert main([*command, "--prompt=hello"]) == 0  # starts with <s>, as a text in training
    started = model.generate(**source("hello", return_tensors="pt"), **greedy)
    continued = source.decode(started[0, 6:], skip_special_tokens=True)
    assert capsys.readouterr().out == continued + "\n"


def test_a_tokenizer_larger_than_the_embedding_is_refused(
    chat_llama: Path, tmp_path: Path, refused: Refused
) -> None:
    llama(tmp_path / "llama", vocab_size=259)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(chat_llama / name, tmp_path / "llama" / name)
    error = refused(tmp_path / "llama")
    assert "has ids up to 259, but the model's vocabulary is 259" in error
    named = imported(tmp_path / "llama", tmp_path / "run", "--tokenizer=byte")
    assert named.config.data.tokenizer == "byte"


def test_a_chat_without_a_template_is_refused(
    llama_folder: Path, tmp_path: Path, refusal: Refused, refused: Refused
) -> None:
    imported(llama_folder, tmp_path / "run")
    error = refusal("generate", tmp_path / "run", "--chat", "--prompt=hello")
    assert "--chat: the tokenizer 'byte' has no chat template" in error


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 9 ** (9 ** 9) }}", "TimeoutError: no text after 0.5 seconds"),
        (DOUBLE, "MemoryError"),
        (LONGEST + "!", "more than 16,777,216 characters"),
        ("{{ raise_exception('only two turns') }}", "TemplateError: only two turns"),
        ("{{ messages[0].content / 2 }}", "TypeError"),
        ("{% for %}", "TemplateSyntaxError"),
    ],
)
def test_a_chat_template_that_fails_or_never_ends_is_one_line_with_its_file(
    template: str,
    reason: str,
    chat_run: Path,
    refusal: Refused,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = 0.5 if "Timeout" in reason else 100
    monkeypatch.setattr("nsa.evaluate.chat.TEMPLATE_SECONDS", seconds)
    file = chat_run / "chat_template.jinja"
    file.write_text(template)
    error = refusal("generate", chat_run, "--chat", "--prompt=hello")
    assert f"nsa: {file}: the chat template ends with {reason}" in error


def test_a_chat_may_have_as_many_characters_as_the_limit() -> None:
    """And a template of its own for tools."""
    tokenizer = SimpleNamespace(
        get_chat_template=lambda tools: LONGEST if tools else "", special_tokens_map={}
    )
    assert len(render_chat(tokenizer, [], tools=[{"name": "weather"}])) == 2**24


def test_a_tokenizer_that_panics_at_a_rendered_chat_is_one_line(
    chat_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its panic is no Exception, and comes with a text that has the euro sign."""
    others = {"type": "Split", "pattern": {"Regex": "[^€]"}, "behavior": "Removed", "invert": False}
    panics = [others, {"type": "FixedLength", "length": 0}]
    panics = {"type": "Sequence", "pretokenizers": panics}
    set_fields(chat_run / "tokenizer.json", pre_tokenizer=panics)
    capsys.readouterr()
    command = ["generate", str(chat_run), "--chat", "--max-new-tokens=1"]
    assert main([*command, "--prompt=5 €"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"nsa: data.tokenizer = 'hf:{chat_run}': cannot be read")
    assert main([*command, "--prompt=5 $"]) == 0
