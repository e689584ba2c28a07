"""Tokenizers: bytes, those of the `tokenizers` library, and trained ones."""

import json
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer

from nsa.data.config import DataConfig
from nsa.data.source import DataError
from nsa.data.tokenizer import (
    CHARS_PER_PIECE,
    ByteTokenizer,
    HubTokenizer,
    Tokenizer,
    build_tokenizer,
    name_in_errors,
    split_text,
    stop_ids,
)
from tests.data.texts import train_bpe, train_tokenizer
from tests.disks import set_fields
from tests.ranks import ROOT, free_port, spawn_ranks

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trained tokenizer."""
    out = tmp_path_factory.mktemp("tokenizer") / "saved"
    train_tokenizer([PROSE.encode() * 3, b"once upon a time\n" * 9], 420, out)
    return out


@pytest.fixture(scope="module")
def trained(folder: Path) -> Tokenizer:
    return build_tokenizer(DataConfig(tokenizer=f"hf:{folder}"))


@pytest.fixture(scope="module")
def gpt4_like() -> HubTokenizer:
    """Splits text into words as GPT-4 does: newlines belong to the punctuation before them."""
    split = pre_tokenizers.Split(Regex(GPT4_WORDS), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend = train_bpe([GIANT.encode()], 500, pre_tokenizers.Sequence([split, bytewise]))
    return HubTokenizer("gpt4-like", backend.to_str(), "<|endoftext|>")


def test_specials_are_in_the_vocabulary_and_decode_to_nothing(trained: Tokenizer) -> None:
    tokenizer = ByteTokenizer()
    specials = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    assert len(set(specials)) == 3
    assert all(256 <= special < tokenizer.vocab_size for special in specials)
    assert tokenizer.decode(np.array([specials[0], *b"ab", *specials[1:], -100, 50_303])) == b"ab"
    ids = trained.encode(b"ab")
    assert trained.decode([trained.eos_id, *ids, -100, trained.vocab_size, 50_303]) == b"ab"


@settings(deadline=None)
@given(text=st.text(max_size=300))
def test_any_text_survives_a_trained_tokenizer(trained: Tokenizer, text: str) -> None:
    ids = trained.encode(text.encode())
    assert ids.dtype == np.uint16
    assert trained.eos_id not in ids
    assert ids.max(initial=0) < trained.vocab_size
    assert trained.decode(ids) == text.encode()


def test_encode_many_equals_encode(trained: HubTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [PROSE.encode(), b"", b"x", b"\xff\xfe", PROSE.encode() * 5]
    for tokenizer in (trained, ByteTokenizer()):
        alone = [tokenizer.encode(text) for text in texts]
        for one, other in zip(tokenizer.encode_many(texts), alone, strict=True):
            assert one.dtype == other.dtype == np.uint16
            assert np.array_equal(one, other)
    assert trained.encode_many([]) == []
    many = Mock(side_effect=trained._backend.encode_batch_fast)
    monkeypatch.setattr(trained, "_backend", SimpleNamespace(encode_batch_fast=many))
    trained.encode_many([b"x"] * 130)
    assert many.call_count == 3, "each call uses all cores"


def test_ctrl_c_while_a_text_is_encoded_is_no_error_of_the_tokenizer() -> None:
    with pytest.raises(KeyboardInterrupt), name_in_errors("data.tokenizer"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("stops", "expected"), [(5, {5}), ([5, 6], {5, 6}), (["6", -1, True, 10**6, None], set())]
)
def test_a_text_ends_at_the_stops_of_the_models_files(
    stops: object, expected: set[int], folder: Path, tmp_path: Path
) -> None:
    copy = edited(folder, tmp_path / "copy", {})
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    tokenizer = build_tokenizer(DataConfig(tokenizer=f"hf:{copy}"))
    assert set(stop_ids(tokenizer)) == {tokenizer.eos_id, *expected}


def test_invalid_utf8_becomes_the_replacement_character(trained: Tokenizer) -> None:
    assert trained.decode(trained.encode(b"caf\xe9 \xf0\x9f time")) == "caf� � time".encode()


@pytest.mark.parametrize("words", ["gpt2", "gpt4"])
def test_splitting_a_giant_text_does_not_change_its_ids(
    trained: Tokenizer, gpt4_like: Tokenizer, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = trained if words == "gpt2" else gpt4_like
    expected = tokenizer.encode(GIANT.encode())
    for longest in range(200, 250):
        pieces = list(split_text(GIANT, longest))
        assert "".join(pieces) == GIANT
        assert max(map(len, pieces)) <= longest
        ids = tokenizer.encode_many([piece.encode() for piece in pieces])
        assert np.array_equal(expected, np.concatenate(ids))
    # encode() itself splits a text longer than CHARS_PER_PIECE.
    monkeypatch.setattr("nsa.data.tokenizer.PIECES_PER_CALL", 3)
    monkeypatch.setattr("nsa.data.tokenizer.split_text", lambda text: split_text(text, 200))
    both = tokenizer.encode_many([GIANT.encode(), b"it was"])
    assert np.array_equal(both[0], expected)
    assert np.array_equal(both[1], tokenizer.encode(b"it was"))


def test_a_giant_text_without_spaces_is_encoded_in_bounded_pieces(
    trained: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(map(len, split_text("語" * (2 * CHARS_PER_PIECE + 5)))) == CHARS_PER_PIECE
    monkeypatch.setattr("nsa.data.tokenizer.split_text", lambda text: split_text(text, 1_000))
    text = "語" * 2_005
    assert trained.decode(trained.encode(text.encode())) == text.encode()


def word_tokenizer(words: int) -> HubTokenizer:
    """A tokenizer with ids for w0, w2, w3, ... and above them one for the end of text."""
    eos = {"id": words, "content": "<eos>", "special": True, "single_word": False}
    vocabulary = {f"w{number}": number for number in range(words) if number != 1} | {"<eos>": words}
    definition = {
        "version": "1.0",
        "added_tokens": [{**eos, "lstrip": False, "rstrip": False, "normalized": False}],
        "pre_tokenizer": {"type": "Whitespace"},
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }
    return HubTokenizer("words", json.dumps(definition), "<eos>")


def test_a_vocabulary_above_65536_uses_four_bytes_per_id() -> None:
    two, four = word_tokenizer(65_535), word_tokenizer(65_536)
    assert (two.vocab_size, two.eos_id) == (65_536, 65_535)
    assert two.encode(b"w65534").dtype == np.uint16
    assert (four.vocab_size, four.eos_id) == (65_537, 65_536)
    assert four.encode(b"w65535").dtype == np.uint32
    assert four.encode(b"w65535").tolist() == [65_535]


def test_fingerprints_differ_if_ids_differ(
    trained: Tokenizer, gpt4_like: Tokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    named = build_tokenizer(DataConfig(tokenizer=f"hf:~/{folder.name}"))
    assert named.fingerprint == trained.fingerprint
    assert build_tokenizer(DataConfig(tokenizer=named.name)) is named, "for each source of a run"
    definition = json.loads((folder / "tokenizer.json").read_text())
    same = HubTokenizer("elsewhere", json.dumps(definition), "<|endoftext|>")
    assert same.fingerprint == trained.fingerprint
    merges = definition["model"]["merges"][:-1]
    fewer = {**definition, "model": {**definition["model"], "merges": merges}}
    fingerprints = {
        trained.fingerprint,
        ByteTokenizer.fingerprint,
        gpt4_like.fingerprint,
        HubTokenizer("fewer", json.dumps(fewer), "<|endoftext|>").fingerprint,
    }
    assert len(fingerprints) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in fingerprints)
    assert ByteTokenizer.fingerprint[:16] == "2f3592dc4a08701e", (
        "checkpoints and prepared folders hold it"
    )
    assert word_tokenizer(9).fingerprint[:16] == "5b6c77b14bb5e171"


def test_a_pickled_tokenizer_needs_no_files_and_keeps_its_start_of_a_document(
    trained: Tokenizer, folder: Path, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    pickled = pickle.dumps(build_tokenizer(DataConfig(tokenizer=f"hf:{moved}")))
    shutil.rmtree(moved)
    copy, text = pickle.loads(pickled), PROSE.encode() + b"<|endoftext|>"
    assert np.array_equal(copy.encode(text), trained.encode(text))
    name, backend, eos, _ = copy.definition
    tokenizer = HubTokenizer(name, backend, eos, start="a")
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.start_id == tokenizer.start_id is not None
    assert again.fingerprint == tokenizer.fingerprint != copy.fingerprint


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("words", r"data\.tokenizer = 'words'.*byte"),
        ("hf:/no/where", r"data\.tokenizer = 'hf:/no/where'.*no such folder"),
        (f"hf:{ROOT}/ds_configs", rf"data\.tokenizer = 'hf:{ROOT}/ds_configs'.*save_pretrained"),
    ],
)
def test_a_name_or_folder_that_is_no_tokenizer_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        build_tokenizer(DataConfig(tokenizer=name))


def test_a_tokenizer_without_an_end_of_text_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = edited(folder, tmp_path / "copy", {})
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match=r"no end-of-text token.*eos_token"):
        build_tokenizer(DataConfig(tokenizer=f"hf:{copy}"))


def test_a_tokenizer_whose_end_of_text_can_be_spelled_is_refused(folder: Path) -> None:
    definition = json.loads((folder / "tokenizer.json").read_text())
    for token in definition["added_tokens"]:
        token["special"] = False
    with pytest.raises(DataError, match=r"'<\|endoftext\|>' would end the document"):
        HubTokenizer("careless", json.dumps(definition), "<|endoftext|>")


@pytest.mark.parametrize(
    ("part", "rules", "complaint"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "YWJj"}, "cannot be read"),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "chunk size must be non-zero"),
        (
            "decoder",
            {"type": "Strip", "content": "a", "start": 5, "stop": 5},
            "index out of bounds",
        ),
        ("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}, "Missing"),
    ],
)
def test_a_tokenizer_that_fails_inside_its_library_is_refused_by_name(
    folder: Path, tmp_path: Path, part: str, rules: dict[str, Any], complaint: str
) -> None:
    """Most are panics of Rust, which are no Exception."""
    copy = edited(folder, tmp_path / "copy", {part: rules})

    def use() -> None:
        tokenizer = build_tokenizer(DataConfig(tokenizer=f"hf:{copy}"))
        tokenizer.decode(tokenizer.encode(b"a"))

    with pytest.raises(DataError, match=rf"^data\.tokenizer = 'hf:{copy}'.*{complaint}"):
        use()


def edited(folder: Path, copy: Path, changes: dict[str, Any]) -> Path:
    """Copy a tokenizer with other parts in its tokenizer.json."""
    shutil.copytree(folder, copy)
    set_fields(copy / "tokenizer.json", **changes)
    return copy


def test_a_saved_limit_of_length_cuts_no_text(
    trained: Tokenizer, folder: Path, tmp_path: Path
) -> None:
    """As in the tokenizer.json of models that were fine-tuned."""
    truncation = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    padding = {"strategy": {"Fixed": 9_999}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    copy = edited(folder, tmp_path / "copy", {"truncation": truncation, "padding": padding})
    limited = build_tokenizer(DataConfig(tokenizer=f"hf:{copy}"))
    assert limited.encode(PROSE.encode()).tolist() == trained.encode(PROSE.encode()).tolist()


LOAD_OFFLINE = """
import socket, sys
def refuse(*_): raise SystemExit("it used the network")
socket.socket.connect = socket.getaddrinfo = refuse
from nsa.data.config import DataConfig
from nsa.data.tokenizer import build_tokenizer
tokenizer = build_tokenizer(DataConfig(tokenizer=f"hf:{sys.argv[1]}"))
print(len(tokenizer.encode(b"once upon a time " * 9_000)) > 9_000)
"""


def test_a_fresh_process_loads_a_folder_without_network_or_warning(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "load.py").write_text(LOAD_OFFLINE)
    home = {"HF_HOME": str(tmp_path)}
    run = spawn_ranks(tmp_path / "load.py", str(folder), ranks=0, environment=home)
    assert (run.codes(60), run.text("out"), run.text("err")) == ([0], "True\n", "")


def test_a_tokenizer_of_the_hub_is_looked_for_in_the_cache_and_then_downloaded_without_its_code(
    trained: Tokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline = []

    def from_pretrained(name: str, local_files_only: bool, trust_remote_code: bool) -> Any:
        assert name == "some/name"
        assert not trust_remote_code
        offline.append(local_files_only)
        if local_files_only:
            raise OSError("not in the cache")
        return AutoTokenizer.from_pretrained(folder)

    loader = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setattr("transformers.AutoTokenizer", loader)
    monkeypatch.setattr("nsa.data.tokenizer.probe", Mock())
    loaded = build_tokenizer(DataConfig(tokenizer="hf: some/name"))
    assert loaded.fingerprint == trained.fingerprint
    assert offline == [True, False]


def test_an_unreachable_hub_is_reported_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("HF_ENDPOINT", hub)
    with pytest.raises(DataError) as refused:
        build_tokenizer(DataConfig(tokenizer="hf:nobody/nothing"))
    for part in ("data.tokenizer = 'hf:nobody/nothing'", hub, "cannot be reached", "hf:<folder>"):
        assert part in str(refused.value)
