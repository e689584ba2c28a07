"""A source gives documents, each one once, in an order that never changes.

    documents (bytes)  ->  tokenizer  ->  | document | eos | document | eos | ...

Whoever reads can ask at any time where it stands, and go on from there in another process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nsa.data.config import DataConfig

SPLITS = ("train", "val")
ALL = "all"  # both splits, of text that is not prepared
IN_MEMORY = ("embedded", "synthetic")  # small enough to be tokenised whole at the start
NAMED = (*IN_MEMORY, "fineweb_edu")  # sources that are neither a path nor spelt hf:<dataset>
NAMES_SHOWN = 8
State = dict[str, Any]  # plain numbers, text, lists and dictionaries: it is written as JSON


class DataError(ValueError):
    """Text that cannot be had, or that is not what it should be; the message names the fix."""


class SourceUnreachable(DataError):
    """The network, or the hub behind it, gives no answer."""


@dataclass(frozen=True)
class Document:
    """One text, and where it stands, for messages."""

    text: bytes
    place: str  # "books.jsonl:17"


class Reader(Iterator[Document], Protocol):
    """One pass over a source."""

    def state(self) -> State:
        """Where the pass stands: `Source.read` with it gives the documents not yet given."""
        ...


class Source(Protocol):
    """Documents in an order that never changes."""

    name: str  # as messages call it

    def read(self, state: State | None = None) -> Reader:
        """A pass from the start, or from where another one stood."""
        ...

    def part(self, index: int, count: int) -> Source:
        """One of `count` shares, which together hold each document once."""
        ...

    def size(self) -> int | None:
        """Bytes of text, for a progress bar; None where that is not known beforehand."""
        ...


def held_out(text: bytes, share: float) -> bool:
    """Whether a document is for validation alone: by its text, so that copies go the same way."""
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def in_split(text: bytes, share: float, split: str) -> bool:
    """Whether a document belongs to a split, of which `share` is for validation."""
    return split == ALL or held_out(text, share) == (split == "val")


def no_documents(config: DataConfig, name: str, split: str) -> DataError:
    """Says that a source has none for a split."""
    way = {"train": "lower", "val": "raise"}.get(split)
    fix = f"{way} data.held_out = {config.held_out}, or take" if way else "take"
    return DataError(
        f"data.source = {name!r} has no document for split {split!r}; {fix} a larger source"
    )


def no_field(field: str, there: Sequence[str]) -> str:
    """Says which fields a record has, where it lacks the one that holds the text."""
    shown = ", ".join(repr(name) for name in there[:NAMES_SHOWN])
    return f"no field {field!r}, but {shown or 'none at all'}; set data.text_field to one of them"


def no_text(field: str, kind: str) -> str:
    """Says what a field holds that should hold the text."""
    return f"the field {field!r} holds {kind}, not text; set data.text_field to one that holds text"


def is_path(name: str) -> bool:
    """Whether a source is a file or a folder, of text or prepared."""
    return name not in NAMED and not name.startswith("hf:")
