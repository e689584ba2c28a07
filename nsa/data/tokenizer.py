"""Text to token ids and back."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nsa.data.config import DataConfig
from nsa.data.source import DataError, Source

TokenArray = npt.NDArray[np.integer]
END_OF_TEXT = "<|endoftext|>"
SMALLEST_TRAINED = 257  # every byte, and the end of text
HUB_SECONDS = 28.0  # for everything that a tokenizer needs from the hub

PIECE = 1 << 20  # characters that are encoded at once, so that a giant text needs little memory
AT_ONCE = 8 * PIECE  # characters of all texts that are encoded together
# Where no tokenizer of the usual kinds joins what stands left and right: before a space between
# two letters or digits. Before a line's end is not as good: some take it along with punctuation.
BREAK = re.compile(r"\w(?= \w)")
PROBE = ("One line, with 12 words;\nand", " another  one")


class Tokenizer(Protocol):
    """What turns text into ids below `vocab_size`, of which `eos_id` ends every document."""

    name: str  # as data.tokenizer calls it
    vocab_size: int
    eos_id: int
    fingerprint: str  # two tokenizers that give other ids for some text have different ones

    def encode(self, text: bytes) -> TokenArray:
        """The ids of `text`, without specials, whatever it spells."""
        ...

    def encode_many(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """The ids of each text; faster than one at a time."""
        ...

    def decode(self, ids: npt.ArrayLike) -> bytes:
        """The bytes that `ids` spell; specials, and ids beyond the vocabulary, spell nothing."""
        ...


def id_type(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest type of a shard that holds every id."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


class ByteTokenizer:
    """Every byte is a token, so any text fits and nothing has to be downloaded."""

    name = "byte"
    bos_id = 256
    eos_id = 257
    pad_id = 258
    vocab_size = 259
    fingerprint = hashlib.sha256(b"bytes, eos 257").hexdigest()

    def encode(self, text: bytes) -> TokenArray:
        """A byte's id is its value."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)

    def encode_many(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """The ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: npt.ArrayLike) -> bytes:
        """The bytes that `ids` spell; specials, and ids beyond the vocabulary, spell nothing."""
        array = np.asarray(ids, dtype=np.int64)
        return array[(array >= 0) & (array < self.bos_id)].astype(np.uint8).tobytes()


class HubTokenizer:
    """A tokenizer of the `tokenizers` library, which works in Rust and takes many texts at once.

    It is made of its own JSON, so that another process can have it without the files it came from.
    A text longer than PIECE characters is cut where that changes no id; one without such a place,
    as a text without spaces, is cut at PIECE characters, and the ids around the cut may differ.
    """

    def __init__(self, name: str, backend: str, eos: str) -> None:
        from tokenizers import Tokenizer as Backend

        self.name = name
        self.made_of = (name, backend, eos)
        self._backend = Backend.from_str(backend)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # "<|endoftext|>" in a text is just text
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self._type = id_type(self.vocab_size)
        eos_id = self._backend.token_to_id(eos)
        assert eos_id is not None
        self.eos_id = eos_id
        decides = {
            part: value
            for part, value in json.loads(backend).items()
            if part in ("added_tokens", "normalizer", "pre_tokenizer", "model")
        }
        digest = hashlib.sha256(json.dumps([eos, decides], sort_keys=True).encode())
        self.fingerprint = digest.hexdigest()
        self._can_cut = self._ids("".join(PROBE)) == [i for part in PROBE for i in self._ids(part)]
        if self.eos_id in self._ids(f"one {eos} two"):
            raise DataError(
                f"data.tokenizer = {name!r}: text that spells {eos!r} would end the document; "
                "choose another tokenizer"
            )

    def __reduce__(self) -> tuple[type[HubTokenizer], tuple[str, str, str]]:
        return HubTokenizer, self.made_of

    def encode(self, text: bytes) -> TokenArray:
        """The ids of `text`; what is not UTF-8 is read as U+FFFD."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """The ids of each text, found by all cores that TOKENIZERS_PARALLELISM leaves it."""
        found: list[list[TokenArray]] = [[] for _ in texts]
        for owners, pieces in _batches(texts, self._can_cut):
            encodings = self._backend.encode_batch_fast(pieces, add_special_tokens=False)
            for owner, encoding in zip(owners, encodings, strict=True):
                found[owner].append(np.array(encoding.ids, dtype=self._type))
        return [ids[0] if len(ids) == 1 else np.concatenate(ids) for ids in found]

    def decode(self, ids: npt.ArrayLike) -> bytes:
        """The text that `ids` spell; specials, and ids beyond the vocabulary, spell nothing."""
        array = np.asarray(ids, dtype=np.int64)
        known = array[(array >= 0) & (array < self.vocab_size)]
        return self._backend.decode(known.tolist(), skip_special_tokens=True).encode()

    def _ids(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids


def _batches(texts: Sequence[bytes], can_cut: bool) -> Iterator[tuple[list[int], list[str]]]:
    """All texts in pieces, AT_ONCE characters at a time, and which text each piece is of."""
    owners: list[int] = []
    pieces: list[str] = []
    room = AT_ONCE
    for owner, text in enumerate(texts):
        whole = text.decode("utf-8", errors="replace")
        for piece in cut(whole) if can_cut else (whole,):
            owners.append(owner)
            pieces.append(piece)
            room -= len(piece)
            if room <= 0:
                yield owners, pieces
                owners, pieces, room = [], [], AT_ONCE
    yield owners, pieces


def cut(text: str, longest: int = PIECE) -> Iterator[str]:
    """Pieces of at most `longest` characters, cut where tokens end if there is such a place."""
    start = 0
    while len(text) - start > longest:
        found = BREAK.search(text, start + longest // 2, start + longest)
        end = found.end() if found else start + longest
        yield text[start:end]
        start = end
    yield text[start:]


def with_eos(tokenizer: Tokenizer, ids: TokenArray) -> TokenArray:
    """A document as it stands in a stream of tokens: closed by the end of text."""
    return np.append(ids, ids.dtype.type(tokenizer.eos_id))


def build_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names; a second call gives the same one."""
    config.validate()
    return _build(config.tokenizer)


@lru_cache
def _build(name: str) -> Tokenizer:
    if name == "byte":
        return ByteTokenizer()
    return _load(name, name.removeprefix("hf:").strip())


def _load(name: str, wanted: str) -> HubTokenizer:
    folder = Path(wanted).expanduser()
    if not folder.is_dir() and wanted.startswith(("/", ".", "~")):
        raise DataError(f"data.tokenizer = {name!r}: there is no such folder")
    try:
        loaded = _from_files(str(folder) if folder.is_dir() else wanted)
    except (OSError, ValueError) as error:
        if folder.is_dir():
            raise _refused(name, error, "it has to hold what save_pretrained() writes") from None
        loaded = _from_hub(name, wanted)
    if not loaded.is_fast:
        raise DataError(
            f"data.tokenizer = {name!r}: only tokenizers of the `tokenizers` library are fast "
            f"enough, and {type(loaded).__name__} is not one; choose one with a tokenizer.json"
        )
    if loaded.eos_token is None:
        raise DataError(
            f"data.tokenizer = {name!r} has no end-of-text token; write one that it knows into "
            "its tokenizer_config.json as eos_token, or choose another"
        )
    return HubTokenizer(name, loaded.backend_tokenizer.to_str(), loaded.eos_token)


def _from_files(wanted: str, offline: bool = True) -> Any:
    from transformers import AutoTokenizer

    # No code of the hub's is run, nor is anyone asked whether it may.
    return AutoTokenizer.from_pretrained(wanted, local_files_only=offline, trust_remote_code=False)


def _from_hub(name: str, wanted: str) -> Any:
    from nsa.data.hub import reach_hub, within

    began = time.monotonic()
    fix = (
        "run `nsa data prepare` where there is a network and set data.source to the folder that "
        "it wrote; or name a folder that holds the tokenizer (data.tokenizer=hf:<folder>); or copy "
        "HF_HOME from where it was loaded; or take what needs no network: --set "
        "data.source=embedded --set data.tokenizer=byte"
    )
    reach_hub(f"data.tokenizer = {name!r}", f"/{wanted}/resolve/main/tokenizer_config.json", fix)
    left = HUB_SECONDS - (time.monotonic() - began)
    try:
        return within(left, lambda: _from_files(wanted, offline=False))
    except TimeoutError:
        raise _refused(name, f"not had from the hub in {HUB_SECONDS:g} seconds", fix) from None
    except Exception as error:  # which ones the hub's client raises differs between versions
        raise _refused(name, error, fix) from None


def _refused(name: str, reason: object, fix: str) -> DataError:
    line = str(reason).strip().split("\n")[0].rstrip(".")
    return DataError(f"data.tokenizer = {name!r} cannot be loaded ({line}); {fix}")


def train_tokenizer(source: Source, vocab_size: int, out: Path) -> Tokenizer:
    """Learn byte-level BPE, as GPT-2's, from a source, and save it for data.tokenizer=hf:<out>.

    Merges are learned until `vocab_size` is reached or no pair is left; the same text gives the
    same tokenizer.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_TRAINED:
        raise DataError(
            f"--vocab-size {vocab_size}: must be {SMALLEST_TRAINED} or more, for all bytes and "
            f"{END_OF_TEXT}"
        )
    if out.exists() and any(out.iterdir()):
        raise DataError(f"--out {out}: there are files in it already; name a new folder")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_pieces(source), trainer)
    _save(backend, out)
    return _load(f"hf:{out}", str(out))


def _pieces(source: Source) -> Iterator[str]:
    found = False
    for document in source.read():
        found = True
        yield from cut(document.text.decode("utf-8", errors="replace"))
    if not found:
        raise DataError(f"data.source: {source.name} has no documents to learn from")


def _save(backend: Any, out: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    draft = out.with_name(f".{out.name}.draft")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT).save_pretrained(draft)
    out.parent.mkdir(parents=True, exist_ok=True)
    draft.replace(out)
