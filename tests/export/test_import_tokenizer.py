"""`nsa import`: a model's tokenizer, its special tokens and its chat template."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from nsa.cli import main
from nsa.data.config import DataConfig
from nsa.data.tokenizer import build_tokenizer
from nsa.engine.load_run import load_run
from nsa.evaluate.chat import render_chat
from nsa.export.from_hf import read_model
from nsa.export.to_hf import export
from nsa.model.hf import NSAForCausalLM
from tests.data.texts import open_store, write_lines
from tests.export.llamas import (
    CHAT,
    DOUBLE,
    LONGEST,
    SMALL,
    Refused,
    add_chat_tokenizer,
    add_tokenizer,
    imported,
    llama,
)


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
    add_tokenizer(folder.rename(tmp_path / "other"))
    named = imported(tmp_path / "other", tmp_path / "own")
    assert named.config.data.tokenizer == f"hf:{tmp_path / 'own'}"


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
    for source, to in ((tmp_path / "dense", "sparse"), (folder, "run")):
        imported(source, tmp_path / to, "--attention=nsa", *SMALL)
    shutil.rmtree(folder)
    (tmp_path / "run").rename(tmp_path / "moved")
    run = load_run(tmp_path / "moved")
    assert run.tokenizer is not None
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
    definition = json.loads((tmp_path / "run/tokenizer.json").read_text())
    shutil.copytree(tmp_path / "run", tmp_path / "unmarked")
    file = tmp_path / "unmarked/tokenizer.json"
    file.write_text(json.dumps(definition | {"post_processor": None}))
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
    file = chat_run / "tokenizer.json"
    others = {"type": "Split", "pattern": {"Regex": "[^€]"}, "behavior": "Removed", "invert": False}
    panics = [others, {"type": "FixedLength", "length": 0}]
    definition = json.loads(file.read_text())
    definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": panics}
    file.write_text(json.dumps(definition))
    capsys.readouterr()
    command = ["generate", str(chat_run), "--chat", "--max-new-tokens=1"]
    assert main([*command, "--prompt=5 €"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"nsa: data.tokenizer = 'hf:{chat_run}': cannot be read")
    assert main([*command, "--prompt=5 $"]) == 0
