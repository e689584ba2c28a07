"""Tokenizers: bytes, or one of the `tokenizers` library from a folder or the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nsa.data.config import DataConfig
from nsa.data.hub import hub_url, probe
from nsa.data.source import DataError
from nsa.system import user_path
from nsa.text import first_line
from nsa.untrusted import matches, read_object

TokenArray = npt.NDArray[np.integer]
ORIGIN = "origin.json"  # in the folder of an imported model, and of its export

# The `tokenizers` library gets pieces of a text, a few at a time, which bounds its memory.
CHARS_PER_PIECE, PIECES_PER_CALL = 1 << 18, 64
# Where to split a text: before a space between two letters or digits, which no common tokenizer
# merges across. A line end is less safe: some tokenizers merge it with punctuation.
BREAK = re.compile(r"\w(?= \w)")


class Tokenizer:
    """Converts text to ids below `vocab_size` and back."""

    name: str  # as in data.tokenizer
    vocab_size: int
    eos_id: int  # ends every document
    start_id: int | None = None  # begins every document, if its model expects that
    fingerprint: str  # tokenizers with equal fingerprints give each text the same ids

    def encode(self, text: bytes) -> TokenArray:
        """Return the ids of `text`, none of them special."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """Return the ids of each text; faster than one at a time."""
        raise NotImplementedError

    def encode_documents(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """Return the ids of each text between the start and the end of a document."""
        encoded = map(self.with_start, self.encode_many(texts))
        return [np.append(ids, ids.dtype.type(self.eos_id)) for ids in encoded]

    def with_start(self, ids: TokenArray) -> TokenArray:
        """Return `ids` after the start of a document, if documents have one."""
        return ids if self.start_id is None else np.insert(ids, 0, self.start_id)

    def decode(self, ids: npt.ArrayLike) -> bytes:
        """Return the bytes of `ids`; skip specials and ids outside the vocabulary."""
        raise NotImplementedError


def id_type(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the smallest dtype for all ids."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


class ByteTokenizer(Tokenizer):
    """One token per byte: fits any text and needs no download."""

    name = "byte"
    bos_id = 256
    eos_id = 257
    pad_id = 258
    vocab_size = 259
    fingerprint = hashlib.sha256(b"bytes, eos 257").hexdigest()

    def encode_many(self, texts: Sequence[bytes]) -> list[TokenArray]:
        return [np.frombuffer(text, dtype=np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: npt.ArrayLike) -> bytes:
        array = np.asarray(ids, dtype=np.int64)
        return array[(array >= 0) & (array < self.bos_id)].astype(np.uint8).tobytes()


class HubTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, which encodes many texts in parallel.

    It is pickled as JSON, so another process needs no files. A text longer than CHARS_PER_PIECE is
    split. Around a split, ids may differ from the ids of the whole text if the tokenizer marks the
    start of a text, or if there is no space between words.
    """

    def __init__(self, name: str, backend: str, eos: str, start: str | None = None) -> None:
        from tokenizers import Tokenizer as Backend

        self.name = name
        self.definition = (name, backend, eos, start)
        with name_in_errors(f"data.tokenizer = {name!r}"):
            self._backend = Backend.from_str(backend)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # "<|endoftext|>" in a text is plain text
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self._type = id_type(self.vocab_size)
        eos_id = self._backend.token_to_id(eos)
        assert eos_id is not None
        self.eos_id = eos_id
        self.start_id = None if start is None else self._backend.token_to_id(start)
        names = ("added_tokens", "normalizer", "pre_tokenizer", "model")  # what decides the ids
        parts = {key: value for key, value in json.loads(backend).items() if key in names}
        specials = [eos] if start is None else [eos, start]
        digest = hashlib.sha256(json.dumps([*specials, parts], sort_keys=True).encode())
        self.fingerprint = digest.hexdigest()
        if self.eos_id in self.encode(f"one {eos} two".encode()):
            raise DataError(
                f"data.tokenizer = {name!r}: text that spells {eos!r} would end the document; "
                "choose another tokenizer"
            )

    def __reduce__(self) -> tuple[type[HubTokenizer], tuple[str, str, str, str | None]]:
        return HubTokenizer, self.definition

    def encode_many(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """Read invalid UTF-8 as U+FFFD; use all CPU cores unless TOKENIZERS_PARALLELISM=false."""
        ids: list[list[TokenArray]] = [[] for _ in texts]  # by text, then by piece
        pieces = [
            (number, piece)
            for number, text in enumerate(texts)
            for piece in split_text(text.decode("utf-8", errors="replace"))
        ]
        for start in range(0, len(pieces), PIECES_PER_CALL):
            numbers, strings = zip(*pieces[start : start + PIECES_PER_CALL], strict=True)
            with name_in_errors(f"data.tokenizer = {self.name!r}"):
                encodings = self._backend.encode_batch_fast(strings, add_special_tokens=False)
            for number, encoding in zip(numbers, encodings, strict=True):
                ids[number].append(np.array(encoding.ids, dtype=self._type))
        return [np.concatenate(of_pieces) for of_pieces in ids]

    def decode(self, ids: npt.ArrayLike) -> bytes:
        array = np.asarray(ids, dtype=np.int64)
        valid = array[(array >= 0) & (array < self.vocab_size)]
        with name_in_errors(f"data.tokenizer = {self.name!r}"):
            return self._backend.decode(valid.tolist(), skip_special_tokens=True).encode()


@contextmanager
def name_in_errors(name: str, fix: str = "save the tokenizer again") -> Iterator[None]:
    """Replace errors of the `tokenizers` library by a DataError that begins with `name`."""
    try:
        yield
    except BaseException as error:
        if not is_library_error(error):
            raise
        reason = first_line(error).rstrip(".")
        raise DataError(f"{name}: cannot be read ({reason}); {fix}") from None


def is_library_error(error: BaseException) -> bool:
    """Return whether `error` is an Exception or a Rust panic; Ctrl-C, for example, is neither."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def split_text(text: str, longest: int = CHARS_PER_PIECE) -> Iterator[str]:
    """Yield pieces of at most `longest` characters, split between tokens if possible."""
    start = 0
    while len(text) - start > longest:
        match = BREAK.search(text, start + longest // 2, start + longest)
        end = match.end() if match else start + longest
        yield text[start:end]
        start = end
    yield text[start:]


def build_tokenizer(config: DataConfig) -> Tokenizer:
    """Return the tokenizer of `data.tokenizer`; cached."""
    config.validate()
    return _load(config.tokenizer)


@lru_cache
def _load(name: str) -> Tokenizer:
    if name == "byte":
        return ByteTokenizer()
    loaded = load_pretrained(name)
    if not loaded.is_fast:
        raise DataError(
            f"data.tokenizer = {name!r}: {type(loaded).__name__} is not a tokenizer of the "
            "`tokenizers` library and too slow; choose one with a tokenizer.json"
        )
    if loaded.eos_token is None:
        raise DataError(
            f"data.tokenizer = {name!r} has no end-of-text token; add one of its tokens to its "
            "tokenizer_config.json as eos_token, or choose another tokenizer"
        )
    start = None
    # Only for imported models: a model trained here has never seen a start token.
    if (tokenizer_folder(name) / ORIGIN).is_file() and loaded.bos_token is not None:
        with name_in_errors(f"data.tokenizer = {name!r}"):
            if loaded("a").input_ids[0] == loaded.bos_token_id:
                start = loaded.bos_token
    return HubTokenizer(name, loaded.backend_tokenizer.to_str(), loaded.eos_token, start)


def load_pretrained(name: str) -> Any:
    """Return transformers' tokenizer for data.tokenizer=hf:<folder or name>."""
    setting, path = f"data.tokenizer = {name!r}", name.removeprefix("hf:").strip()
    if (folder := tokenizer_folder(name)).is_dir():
        with name_in_errors(setting, "name a folder that save_pretrained() wrote"):
            return _from_pretrained(str(folder))
    if path.startswith(("/", ".", "~")):
        raise DataError(f"{setting}: no such folder")
    try:
        return _from_pretrained(path)
    except BaseException as error:  # it is not in the local cache: download it
        if not is_library_error(error):
            raise
    fix = (
        "run `nsa data prepare` where there is a network and set data.source to the folder that "
        "it wrote; or name a folder with the tokenizer (data.tokenizer=hf:<folder>); or copy "
        "HF_HOME from a machine that loaded it; or work without a network: "
        "--set data.source=embedded --set data.tokenizer=byte"
    )
    probe(setting, f"{hub_url()}/{path}/resolve/main/tokenizer_config.json", fix)
    with name_in_errors(setting, fix):
        return _from_pretrained(path, offline=False)


def tokenizer_folder(name: str) -> Path:
    """Return the folder that data.tokenizer=hf:<folder> names; it may not exist."""
    return user_path(name.removeprefix("hf:").strip())


def stop_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that end a generated text: eos, and eos_token_id of the model's files."""
    file = tokenizer_folder(tokenizer.name) / "generation_config.json"
    stops: Any = []
    if isinstance(tokenizer, HubTokenizer) and file.is_file():
        stops = read_object(file).get("eos_token_id")
    stops = stops if isinstance(stops, list) else [stops]
    ids = (id for id in stops if matches(id, int) and id < tokenizer.vocab_size)
    return sorted({tokenizer.eos_id, *ids})


def _from_pretrained(path: str, offline: bool = True) -> Any:
    from transformers import AutoTokenizer

    # trust_remote_code=False: run no code from the hub, and do not prompt for permission.
    return AutoTokenizer.from_pretrained(path, local_files_only=offline, trust_remote_code=False)
