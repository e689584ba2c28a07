"""Documents for data tests: generated, written to files, and decoded from tokens."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nsa.data.cache import TokenCache
from nsa.data.config import DataConfig
from nsa.data.dataset import open_dataset
from nsa.data.files import Files
from nsa.data.shards import Stamp, TokenStore
from nsa.data.source import Document, Source, is_validation
from nsa.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer

EOS = ByteTokenizer.eos_id
CACHE = TemporaryDirectory()  # of the tokens of all stores, until the tests end
HELD_OUT = 0.2  # fraction for validation, so that a few of the texts below are in it


def configure(source: Any, **settings: Any) -> DataConfig:
    """Return settings for short texts, with small defaults."""
    return DataConfig(
        source=source,
        **{"held_out": HELD_OUT, "seq_len": 16, "timeout": 30} | settings,
    )


class MemoryStore(TokenStore):
    """A token store without files."""

    def __init__(
        self,
        tokens: Any,
        eos: int = -1,
        bytes_per_token: float = 1.0,
        name: str = "tokens",
        fingerprint: str = "",
    ) -> None:
        self.name, self.bytes_per_token, self.fingerprint = name, bytes_per_token, fingerprint
        self.stamp = Stamp(name, "none", "", int(np.max(tokens)) + 1, eos, "uint32")
        self.tokens, self.grows, self.notes = np.asarray(tokens), False, []

    def __len__(self) -> int:
        return len(self.tokens)

    def wait_for(self, tokens: int) -> int:
        return len(self)

    def read(self, start: int, stop: int) -> Any:
        assert 0 <= start < stop <= len(self)
        return self.tokens[start:stop]


def names_of_counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each source whose documents are counted from now on."""
    counted: list[str] = []
    size_if_few = Files.size_if_few

    def watched(files: Files, limit: int) -> int | None:
        counted.append(files.name)
        return size_if_few(files, limit)

    monkeypatch.setattr(Files, "size_if_few", watched)
    return counted


def open_store(config: DataConfig, split: str) -> TokenStore:
    """One split of a `data.source` that is a single source."""
    with closing(TokenCache(open_dataset(config), Path(CACHE.name))) as cache:
        (store,) = cache.stores(split)
        return store


def contents_of(source: Source, cursor: Any = None) -> list[bytes]:
    """The documents after a cursor, which passes through JSON as when it is saved."""
    documents = source.read(json.loads(json.dumps(cursor)))
    return [document.text for document, _ in documents if isinstance(document, Document)]


def check_resumption(source: Source, every: int = 1) -> list[bytes]:
    """Resume a pass after each of its documents, or some; returns all of them."""
    pairs = list(source.read())
    texts = [document.text for document, _ in pairs if isinstance(document, Document)]
    for number in range(0, len(pairs), every):
        left = [document for document, _ in pairs[number + 1 :]]
        expected = [document.text for document in left if isinstance(document, Document)]
        assert contents_of(source, pairs[number][1]) == expected, number
    assert contents_of(source, pairs[-1][1]) == []
    return texts


def text(number: int, length: int) -> bytes:
    """A unique text without repetition."""
    words = (
        hashlib.blake2b(b"%d/%d" % (number, at)).hexdigest() for at in range(length // 128 + 1)
    )
    return b"%d:" % number + "".join(words)[:length].encode()


def texts(count: int, longest: int = 60) -> list[bytes]:
    """`count` unique texts of different lengths."""
    return [text(number, number * 37 % longest) for number in range(count)]


def write_lines(path: Path, documents: Iterable[bytes], field: str = "text") -> str:
    """Write JSON lines; returns the value for data.source."""
    path.write_text("".join(json.dumps({field: text.decode()}) + "\n" for text in documents))
    return str(path)


def split(
    documents: Sequence[bytes], fraction: float = HELD_OUT
) -> tuple[list[bytes], list[bytes]]:
    """The documents for training, and those for validation."""
    train = [text for text in documents if not is_validation(text, fraction)]
    return train, [text for text in documents if is_validation(text, fraction)]


def documents_in(tokens: np.ndarray, tokenizer: Tokenizer | None = None) -> list[bytes]:
    """The complete documents at the start of a stream."""
    tokenizer = tokenizer or ByteTokenizer()
    ends = np.flatnonzero(tokens == tokenizer.eos_id)
    starts = [0, *(ends[:-1] + 1)]
    return [tokenizer.decode(tokens[start:end]) for start, end in zip(starts, ends, strict=True)]


def documents_of(store: TokenStore, tokenizer: Tokenizer | None = None) -> list[bytes]:
    """All documents of a store, which ends with the end of the last one."""
    tokens = store.read(0, len(store))
    assert tokens[-1] == store.stamp.eos_id
    return documents_in(tokens, tokenizer)


GPT2_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)


def train_bpe(documents: Iterable[bytes], vocab_size: int, words: Any = GPT2_WORDS) -> Backend:
    """Train byte-level BPE, as docs/start/your-data.md shows."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = words
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((text.decode() for text in documents), trainer)
    return backend


def train_tokenizer(documents: Iterable[bytes], vocab_size: int, out: Path) -> Tokenizer:
    """Train a tokenizer and save it in `out`."""
    backend = train_bpe(documents, vocab_size)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(out)
    return build_tokenizer(DataConfig(tokenizer=f"hf:{out}"))
