"""Documents for data tests: generated, written to files, and decoded from tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import numpy as np
import pytest

from nsa.data.config import DataConfig
from nsa.data.dataset import open_dataset
from nsa.data.files import Files
from nsa.data.source import is_validation
from nsa.data.stream import SHUFFLE_DOCUMENTS, stream_rows
from nsa.data.token_store import TokenStore
from nsa.data.tokenizer import ByteTokenizer, Tokenizer

EOS = ByteTokenizer.eos_id
HELD_OUT = 0.2  # fraction for validation, so that a few of the texts below are in it


def configure(source: Any, **settings: Any) -> DataConfig:
    """Return settings for short texts, with small defaults."""
    return DataConfig(
        source=source,
        **{"held_out": HELD_OUT, "seq_len": 16, "timeout": 30} | settings,
    )


def names_of_counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each source whose documents are counted from now on."""
    counted: list[str] = []
    size_if_few = Files.size_if_few

    def watched(files: Files, limit: int) -> int | None:
        counted.append(files.name)
        return size_if_few(files, limit)

    monkeypatch.setattr(Files, "size_if_few", watched)
    return counted


class Rows(Iterator[np.ndarray]):
    """The rows of a stream; `state` is that after the last one, `skipped` what was left out.

    `block`: documents that are shuffled together.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        state: Any = None,
        block: int = SHUFFLE_DOCUMENTS,
        **arguments: Any,
    ) -> None:
        self._stream = stream_rows(open_dataset(config), state=state, **arguments)
        self._state, self.skipped, self._block = state, {}, block

    def __next__(self) -> np.ndarray:
        with patch("nsa.data.stream.SHUFFLE_DOCUMENTS", self._block):
            rows, self._state, self.skipped = next(self._stream)
        return rows

    def state(self) -> Any:
        return self._state


def open_store(config: DataConfig, split: str) -> TokenStore:
    """One split of a `data.source` that is a single source."""
    (store,) = open_dataset(config).stores(split)
    return store


def text(number: int, length: int) -> bytes:
    """A unique text without repetition."""
    words = (
        hashlib.blake2b(b"%d/%d" % (number, at)).hexdigest() for at in range(length // 128 + 1)
    )
    return b"%d:" % number + "".join(words)[:length].encode()


def texts(count: int, longest: int = 60) -> list[bytes]:
    """`count` unique texts of different lengths."""
    return [text(number, number * 37 % longest) for number in range(count)]


def write_lines(path: Path, documents: Iterable[bytes]) -> str:
    """Write JSON lines; returns the value for data.source."""
    path.write_text("".join(json.dumps({"text": text.decode()}) + "\n" for text in documents))
    return str(path)


def write_to_pipe(pipe: BinaryIO, documents: Iterable[bytes]) -> None:
    """Write JSON lines that a reader gets at once."""
    for text in documents:
        pipe.write(json.dumps({"text": text.decode()}).encode() + b"\n")
    pipe.flush()


def write_parquet(path: Path, documents: Iterable[bytes]) -> str:
    """Write a Parquet file; returns the value for data.source."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": [text.decode() for text in documents]})
    pq.write_table(table, path, row_group_size=7)
    return str(path)


def split(
    documents: Sequence[bytes], fraction: float = HELD_OUT
) -> tuple[list[bytes], list[bytes]]:
    """The documents for training, and those for validation."""
    train = [text for text in documents if not is_validation(text, fraction)]
    return train, [text for text in documents if is_validation(text, fraction)]


def tokens_of(rows: Iterable[np.ndarray]) -> np.ndarray:
    """The stream of which batches of rows of T + 1 tokens were cut, without its last token."""
    return np.concatenate([row[:-1] for batch in rows for row in batch])


def documents_in(tokens: np.ndarray, tokenizer: Tokenizer | None = None) -> list[bytes]:
    """The complete documents at the start of a stream."""
    tokenizer = tokenizer or ByteTokenizer()
    ends = np.flatnonzero(tokens == tokenizer.eos_id)
    starts = [0, *(ends[:-1] + 1)]
    return [tokenizer.decode(tokens[start:end]) for start, end in zip(starts, ends, strict=True)]


def documents_of(store: TokenStore, tokenizer: Tokenizer | None = None) -> list[bytes]:
    """All documents of a store, which ends with the end of the last one."""
    tokens = store.read(0, len(store))
    assert tokens[-1] == store.eos_id
    return documents_in(tokens, tokenizer)
