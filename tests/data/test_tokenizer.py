"""Tokenizers: bytes, those of the `tokenizers` library, and those that are trained here."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from nsa.data.builtin import Listed, synthetic
from nsa.data.config import DataConfig
from nsa.data.source import DataError, Document, Source
from nsa.data.tokenizer import (
    PIECE,
    ByteTokenizer,
    HubTokenizer,
    Tokenizer,
    build_tokenizer,
    cut,
    train_tokenizer,
)

PROSE = (
    "It was the best of times, it was the worst of times;\n\nit wasn't THE age of 1,859 things.\r\n"
    "\tdef run(self) -> None:\n\t\treturn 'naïve' + \"日本語のテキスト\"  # 😀\n\n\n"
)
GIANT = (PROSE + "it was, wasn't it;;\n\n 12 345  6\n once _upon_ a time ...\n was it ") * 20
# How the tokenizers of GPT-4 and Llama 3 split text into words.
GPT4_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts_source(texts: Sequence[bytes]) -> Source:
    return Listed("texts", range(len(texts)), lambda at: Document(texts[at], f"text {at}"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer that was trained and saved by us."""
    out = tmp_path_factory.mktemp("tokenizer") / "saved"
    train_tokenizer(texts_source([PROSE.encode() * 3, b"once upon a time\n" * 9]), 420, out)
    return out


@pytest.fixture(scope="module")
def trained(folder: Path) -> Tokenizer:
    return build_tokenizer(DataConfig(tokenizer=f"hf:{folder}"))


@pytest.fixture(scope="module")
def other_words() -> HubTokenizer:
    """One that splits text into words as GPT-4 does: newlines belong to punctuation before them."""
    backend = Backend(models.BPE())
    split = pre_tokenizers.Split(Regex(GPT4_WORDS), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([GIANT], trainer)
    return HubTokenizer("gpt4-like", backend.to_str(), "<|endoftext|>")


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_survive_a_round_trip(text: bytes) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_specials_are_in_the_vocabulary_and_spell_nothing(trained: Tokenizer) -> None:
    tokenizer = ByteTokenizer()
    specials = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    assert len(set(specials)) == 3
    assert all(256 <= special < tokenizer.vocab_size for special in specials)
    assert tokenizer.decode(np.array([specials[0], *b"ab", *specials[1:], -100, 50_303])) == b"ab"
    ids = trained.encode(b"ab")
    assert trained.decode([trained.eos_id, *ids, -100, trained.vocab_size, 50_303]) == b"ab"


@settings(deadline=None)
@given(text=st.text(max_size=300))
def test_any_text_survives_a_tokenizer_that_was_trained_here(trained: Tokenizer, text: str) -> None:
    ids = trained.encode(text.encode())
    assert ids.dtype == np.uint16
    assert trained.eos_id not in ids
    assert ids.max(initial=0) < trained.vocab_size
    assert trained.decode(ids) == text.encode()


def test_many_texts_become_what_each_of_them_becomes(trained: Tokenizer) -> None:
    texts = [PROSE.encode(), b"", b"x", b"\xff\xfe", PROSE.encode() * 5]
    for tokenizer in (trained, ByteTokenizer()):
        alone = [tokenizer.encode(text) for text in texts]
        for one, other in zip(tokenizer.encode_many(texts), alone, strict=True):
            assert one.dtype == other.dtype == np.uint16
            assert np.array_equal(one, other)
    assert trained.encode_many([]) == []


def test_text_that_spells_the_end_of_text_does_not_end_it(trained: Tokenizer) -> None:
    text = b"before <|endoftext|> after<|endoftext|>"
    ids = trained.encode(text)
    assert trained.eos_id not in ids
    assert trained.decode(ids) == text


def test_what_is_not_utf8_becomes_the_replacement_character(trained: Tokenizer) -> None:
    assert trained.decode(trained.encode(b"caf\xe9 \xf0\x9f time")) == "caf� � time".encode()


@pytest.mark.parametrize("words", ["gpt2", "gpt4"])
def test_a_giant_text_cut_into_pieces_gives_the_ids_of_the_whole(
    trained: Tokenizer, other_words: Tokenizer, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = trained if words == "gpt2" else other_words
    whole = tokenizer.encode(GIANT.encode())
    for longest in range(200, 250):
        pieces = list(cut(GIANT, longest))
        assert "".join(pieces) == GIANT
        assert max(map(len, pieces)) <= longest
        ids = tokenizer.encode_many([piece.encode() for piece in pieces])
        assert np.array_equal(whole, np.concatenate(ids))
    # ... and that is how encode() itself treats one that is longer than PIECE.
    monkeypatch.setattr("nsa.data.tokenizer.AT_ONCE", 500)
    monkeypatch.setattr("nsa.data.tokenizer.cut", lambda text: cut(text, 200))
    both = tokenizer.encode_many([GIANT.encode(), b"it was"])
    assert np.array_equal(both[0], whole)
    assert np.array_equal(both[1], tokenizer.encode(b"it was"))


def test_a_giant_text_without_a_space_is_encoded_in_bounded_pieces(
    trained: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(map(len, cut("語" * (2 * PIECE + 5)))) == PIECE
    monkeypatch.setattr("nsa.data.tokenizer.cut", lambda text: cut(text, 1_000))
    text = "語" * 2_005
    assert trained.decode(trained.encode(text.encode())) == text.encode()


def test_a_tokenizer_that_marks_the_start_of_a_text_is_never_given_half_of_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = json.loads((folder / "tokenizer.json").read_text())
    made["normalizer"] = {"type": "Prepend", "prepend": "once"}
    tokenizer = HubTokenizer("prepending", json.dumps(made), "<|endoftext|>")
    monkeypatch.setattr("nsa.data.tokenizer.cut", lambda text: cut(text, 100))
    assert tokenizer.decode(tokenizer.encode(PROSE.encode() * 9)) == b"once" + PROSE.encode() * 9


def words_and_an_end(words: int) -> HubTokenizer:
    """A tokenizer with ids for w0, w1, ... and, above them all, for the end of text."""
    eos = {"id": words, "content": "<eos>", "special": True, "single_word": False}
    vocabulary = {f"w{number}": number for number in range(words)}
    made = {
        "version": "1.0",
        "added_tokens": [{**eos, "lstrip": False, "rstrip": False, "normalized": False}],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }
    return HubTokenizer("words", json.dumps(made), "<eos>")


def test_more_ids_than_two_bytes_hold_take_four() -> None:
    two, four = words_and_an_end(65_535), words_and_an_end(65_536)
    assert (two.vocab_size, two.eos_id) == (65_536, 65_535)
    assert two.encode(b"w65534").dtype == np.uint16
    assert (four.vocab_size, four.eos_id) == (65_537, 65_536)
    assert four.encode(b"w65535").dtype == np.uint32
    assert four.encode(b"w65535").tolist() == [65_535]


def test_fingerprints_differ_where_ids_differ(
    trained: Tokenizer, other_words: Tokenizer, folder: Path
) -> None:
    made = json.loads((folder / "tokenizer.json").read_text())
    same = HubTokenizer("elsewhere", json.dumps(made), "<|endoftext|>")
    assert same.fingerprint == trained.fingerprint
    fewer = {**made, "model": {**made["model"], "merges": made["model"]["merges"][:-1]}}
    prints = {
        trained.fingerprint,
        ByteTokenizer.fingerprint,
        other_words.fingerprint,
        HubTokenizer("fewer", json.dumps(fewer), "<|endoftext|>").fingerprint,
    }
    assert len(prints) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", found) for found in prints)


def test_another_process_gets_the_same_tokenizer_without_its_files(trained: Tokenizer) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        text = PROSE.encode() + b"<|endoftext|>"
        ids = pool.apply(trained.encode, (text,))
    assert np.array_equal(ids, trained.encode(text))


def test_an_unknown_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"data\.tokenizer = 'words'.*byte"):
        build_tokenizer(DataConfig(tokenizer="words"))
    with pytest.raises(DataError, match=r"data\.tokenizer = 'hf:/no/where'.*no such folder"):
        build_tokenizer(DataConfig(tokenizer="hf:/no/where"))


def test_a_folder_that_holds_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"data\.tokenizer = 'hf:{tmp_path}'.*save_pretrained"):
        build_tokenizer(DataConfig(tokenizer=f"hf:{tmp_path}"))


def test_a_tokenizer_without_an_end_of_text_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match=r"no end-of-text token.*eos_token"):
        build_tokenizer(DataConfig(tokenizer=f"hf:{tmp_path}"))


def test_a_tokenizer_that_no_text_can_spell_the_end_of_is_required(folder: Path) -> None:
    made = json.loads((folder / "tokenizer.json").read_text())
    for token in made["added_tokens"]:
        token["special"] = False
    with pytest.raises(DataError, match=r"'<\|endoftext\|>' would end the document"):
        HubTokenizer("careless", json.dumps(made), "<|endoftext|>")


def test_a_folder_is_loaded_without_any_network_or_warning(folder: Path, tmp_path: Path) -> None:
    code = (
        "import socket, sys\n"
        "def refuse(*_): raise SystemExit('it asked the network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from nsa.data.config import DataConfig\n"
        "from nsa.data.tokenizer import build_tokenizer\n"
        f"tokenizer = build_tokenizer(DataConfig(tokenizer='hf:{folder}'))\n"
        "print(len(tokenizer.encode(b'once upon a time ' * 9_000)) > 9_000)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (run.stdout, run.stderr, run.returncode) == ("True\n", "", 0)


def test_an_unreachable_hub_is_said_within_30_seconds(tmp_path: Path, free_port: int) -> None:
    code = (
        "from nsa.data.config import DataConfig\n"
        "from nsa.data.tokenizer import build_tokenizer\n"
        "try:\n"
        "    build_tokenizer(DataConfig(tokenizer='hf:nobody/nothing'))\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    environment["HF_ENDPOINT"] = f"http://127.0.0.1:{free_port}"
    began = time.monotonic()
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert time.monotonic() - began < 30
    assert "data.tokenizer = 'hf:nobody/nothing'" in run.stdout
    assert f"http://127.0.0.1:{free_port}" in run.stdout
    assert "cannot be reached" in run.stdout
    assert "hf:<folder>" in run.stdout


def test_training_again_gives_the_same_tokenizer(tmp_path: Path) -> None:
    for name in ("first", "again"):
        learned = train_tokenizer(synthetic(50_000), 500, tmp_path / name)
        assert learned.vocab_size == 500
    first, again = (tmp_path / name / "tokenizer.json" for name in ("first", "again"))
    assert first.read_bytes() == again.read_bytes()
    text = b" ".join(document.text for document in synthetic(50_000).read())
    assert len(learned.encode(text)) < 0.8 * len(text)
    assert learned.decode(learned.encode(text)) == text


def test_training_refuses_what_cannot_become_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--vocab-size 256: must be 257 or more"):
        train_tokenizer(synthetic(1_000), 256, tmp_path / "small")
    with pytest.raises(DataError, match=r"there are files in it already"):
        train_tokenizer(synthetic(1_000), 300, folder)
    with pytest.raises(DataError, match=r"texts has no documents to learn from"):
        train_tokenizer(texts_source([]), 300, tmp_path / "empty")
    assert not list(tmp_path.iterdir())
