"""Document sources: the base class `Source`, its resumable `Reader`, and the validation split.

source.part(i, n).read(state)  ->  Document, Document, ...  each once, in a fixed order
reader.state()                 ->  JSON that resumes the pass in another process
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nsa.data.config import DataConfig

SPLITS = ("train", "val")
ALL = "all"  # both splits, undivided; prepared shards have no such split
BUILTIN = ("embedded", "synthetic")
NAMED = (*BUILTIN, "fineweb_edu")  # sources that are neither a path nor hf:<dataset>
NAMES_SHOWN = 8  # of fields or files, in an error
State = dict[str, Any]  # JSON values only


class DataError(ValueError):
    """Data that cannot be read or used; the message names the fix."""


class SourceUnreachable(DataError):
    """The network or the Hugging Face hub does not respond."""


@dataclass(frozen=True)
class Document:
    """A text and its location for messages."""

    text: bytes
    location: str  # "books.jsonl:17"


class Skipped(NamedTuple):
    """Number of lines, rows and files that data.on_error = skip left out, and the first error."""

    number: int = 0
    first: str = ""

    def plus(self, other: Skipped) -> Skipped:
        return Skipped(self.number + other.number, self.first or other.first)

    def note(self, name: str) -> list[str]:
        """Return a line for the log, if anything was left out of the source `name`."""
        text = f"{name}: data.on_error = skip left out {self.number:,} lines, rows or files; "
        return [f"{text}the first: {self.first}"] if self.number else []


class Reader(Iterator[Document]):
    """A resumable pass over a source, built from pairs (document, state after it).

    A DataError in place of a document is skipped, and counted.
    """

    def __init__(
        self, documents: Iterator[tuple[Document | DataError, State]], state: State
    ) -> None:
        self._documents, self._state = documents, state
        self.skipped = Skipped()  # since this reader began

    def __next__(self) -> Document:
        while True:
            document, self._state = next(self._documents)
            if isinstance(document, Document):
                return document
            self.skipped = self.skipped.plus(Skipped(1, str(document)))

    def state(self) -> State:
        """Return the cursor after the last document; `Source.read` resumes from it."""
        return self._state


class Source:
    """Documents in a fixed order."""

    name: str  # in messages

    def read(self, state: State | None = None) -> Reader:
        """Start a pass, or resume one at a reader's state."""
        raise NotImplementedError

    def part(self, index: int, count: int) -> Source:
        """Return one of `count` disjoint parts that together hold all documents."""
        raise NotImplementedError

    def size(self) -> int | None:
        """Return the bytes of text, for a progress bar; None if only reading can tell."""
        return None


def is_validation(text: bytes, fraction: float) -> bool:
    """Return whether a document is in the validation split; copies share a hash and so a split."""
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


@dataclass(frozen=True)
class HeldOut:
    """The division of a source between training and validation.

    Its repr is part of the fingerprint of a stream, which a resumed run compares.
    """

    fraction: float
    by_position: bool = False  # hold out the end of each document, not whole documents by hash

    def text_for(self, text: bytes, split: str) -> bytes:
        """Return what `split` reads of a document: all of it, its start, its end, or nothing."""
        if split == ALL:
            return text
        if not self.by_position:
            return text if is_validation(text, self.fraction) == (split == "val") else b""
        cut = len(text) - int(len(text) * self.fraction)
        for _ in range(3):  # not inside a UTF-8 character
            cut -= 0 < cut < len(text) and text[cut] & 0xC0 == 0x80
        return text[cut:] if split == "val" else text[:cut]


def no_documents(config: DataConfig, name: str, split: str) -> DataError:
    verb = {"train": "lower", "val": "raise"}.get(split)
    fix = f"{verb} data.held_out = {config.held_out}, or take" if verb else "take"
    return DataError(
        f"data.source = {name!r} has no document for split {split!r}; {fix} a larger source"
    )


def missing_field(field: str, present: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in present[:NAMES_SHOWN])
    return f"no field {field!r}, but {shown or 'none at all'}; set data.text_field to one of them"


def not_text(field: str, kind: str) -> str:
    return f"the field {field!r} holds {kind}, not text; set data.text_field to one that holds text"


def text_of(record: dict[str, Any], field: str, location: str) -> str | None:
    """Return a record's text, None for null; raise a DataError if the field is not text."""
    if field not in record:
        raise DataError(f"{location}: {missing_field(field, list(record))}")
    text = record[field]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{location}: {not_text(field, type(text).__name__)}")
    return text


def is_builtin(name: str) -> bool:
    """Return whether a source is built in, and so tokenised into memory when opened."""
    return name in BUILTIN or name.startswith("embedded:")


def is_path(name: str) -> bool:
    """Return whether a source is a local file or folder."""
    return name not in NAMED and not name.startswith(("hf:", "embedded:"))


def absolute_source(source: str | dict[str, float]) -> str | dict[str, float]:
    """Return `data.source` with existing local paths as absolute ones; a mixture likewise."""
    if isinstance(source, dict):
        return {_absolute(name): weight for name, weight in source.items()}
    return _absolute(source)


def _absolute(name: str) -> str:
    # What does not exist is refused by the name that the user wrote.
    path = os.path.expanduser(name)
    return str(Path(path).absolute()) if is_path(name) and os.path.exists(path) else name
