"""Documents for tests of data, written to files as users have them, and found again in tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from nsa.data.source import held_out
from nsa.data.tokenizer import ByteTokenizer

EOS = ByteTokenizer.eos_id
HELD_OUT = 0.2  # of the texts below, so that a few of them are


def text(number: int, length: int) -> bytes:
    """A text like no other, whose parts are not like each other either."""
    words = (
        hashlib.blake2b(b"%d/%d" % (number, at)).hexdigest() for at in range(length // 128 + 1)
    )
    return b"%d:" % number + "".join(words)[:length].encode()


def texts(count: int, longest: int = 60) -> list[bytes]:
    """So many different texts of different lengths."""
    return [text(number, number * 37 % longest) for number in range(count)]


def write_lines(path: Path, documents: Iterable[bytes]) -> str:
    """A file of JSON lines that holds these documents; its name, as data.source takes it."""
    path.write_text("".join(json.dumps({"text": text.decode()}) + "\n" for text in documents))
    return str(path)


def write_parquet(path: Path, documents: Iterable[bytes]) -> str:
    """A Parquet file that holds these documents; its name, as data.source takes it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": [text.decode() for text in documents]})
    pq.write_table(table, path, row_group_size=7)
    return str(path)


def split(documents: Sequence[bytes], share: float = HELD_OUT) -> tuple[list[bytes], list[bytes]]:
    """Those for training, and those for validation."""
    train = [text for text in documents if not held_out(text, share)]
    return train, [text for text in documents if held_out(text, share)]


def tokens_of(rows: Iterable[np.ndarray]) -> np.ndarray:
    """The stream that rows of T + 1 tokens were cut from, without the last token of the last."""
    return np.concatenate([row[:-1] for batch in rows for row in batch])


def documents_in(tokens: np.ndarray) -> list[bytes]:
    """The whole documents that a stream begins with; one that its end cuts is left out."""
    ends = np.flatnonzero(tokens == EOS)
    starts = [0, *(ends[:-1] + 1)]
    return [
        ByteTokenizer().decode(tokens[start:end]) for start, end in zip(starts, ends, strict=True)
    ]
