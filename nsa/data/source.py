"""Document sources: the base class `Source`, and the validation split.

source.read(cursor)  ->  (document, cursor after it), ...  each once, in a fixed order
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nsa.system import user_path

SPLITS = ("train", "val")
BUILTIN = ("embedded", "synthetic")
NAMED = (*BUILTIN, "fineweb_edu")  # sources that are neither a path nor hf:<dataset>
NAMES_SHOWN = 8  # of fields or files, in an error
Cursor = dict[str, Any]  # JSON values only; resumes a pass in another process


class DataError(ValueError):
    """Data that cannot be read or used; the message names the fix."""


class SourceUnreachable(DataError):
    """The network or the Hugging Face hub does not respond."""


@dataclass(frozen=True)
class Document:
    """A text and its location for messages."""

    text: bytes
    location: str  # "books.jsonl:17"


# A DataError in place of a document is skipped, and counted.
Documents = Iterator[tuple[Document | DataError, Cursor]]


@dataclass(frozen=True)
class Skipped:
    """Number of lines, rows and files that data.on_error = skip left out, and the first error."""

    number: int = 0
    first: str = ""

    def plus(self, error: DataError) -> Skipped:
        return Skipped(self.number + 1, self.first or str(error))

    def note(self, name: str) -> list[str]:
        """Return a line for the log, if anything was left out of the source `name`."""
        text = f"{name}: data.on_error = skip left out {self.number:,} lines, rows or files; "
        return [f"{text}the first: {self.first}"] if self.number else []


class Source:
    """Documents in a fixed order."""

    name: str  # in messages
    content: str = ""  # digest of its files' names and sizes; "" without files

    def read(self, cursor: Cursor | None = None) -> Documents:
        """Start a pass, or resume one after a document."""
        raise NotImplementedError

    def read_all(self) -> Iterator[Document]:
        """Yield the documents, without errors that are skipped."""
        return (document for document, _ in self.read() if isinstance(document, Document))

    def size(self) -> int | None:
        """Return the bytes of text; None if only reading can tell."""
        return None


def is_validation(text: bytes, fraction: float) -> bool:
    """Return whether a document is in the validation split; copies share a hash and so a split."""
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


@dataclass(frozen=True)
class HeldOut:
    """The division of a source between training and validation."""

    fraction: float  # for validation; 0.0: all is for training
    by_position: bool = False  # hold out the end of each document, not whole documents by hash

    def text_for(self, text: bytes, split: str) -> bytes:
        """Return what `split` reads of a document: all of it, its start, its end, or nothing."""
        if not self.by_position:
            own_split = "val" if is_validation(text, self.fraction) else "train"
            return text if split == own_split else b""
        cut = len(text) - int(len(text) * self.fraction)
        for _ in range(3):  # not inside a UTF-8 character
            if 0 < cut < len(text) and text[cut] & 0xC0 == 0x80:
                cut -= 1
        return text[cut:] if split == "val" else text[:cut]


def missing_field(field: str, present: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in present[:NAMES_SHOWN])
    return f"no field {field!r}, but {shown or 'none at all'}; set data.text_field to one of them"


def text_of(record: dict[str, Any], field: str, location: str) -> str | None:
    """Return a record's text, None for null; raise a DataError if the field is not text."""
    if field not in record:
        raise DataError(f"{location}: {missing_field(field, list(record))}")
    text = record[field]
    if text is not None and not isinstance(text, str):
        raise DataError(
            f"{location}: the field {field!r} holds {type(text).__name__}, not text; set "
            "data.text_field to one that holds text"
        )
    return text


def is_builtin(name: str) -> bool:
    """Return whether a source is built in, so that its documents are small and always there."""
    return name in BUILTIN or name.startswith("embedded:")


def is_path(name: str) -> bool:
    return name not in NAMED and not name.startswith(("hf:", "embedded:"))


def absolute_source(source: str | dict[str, float]) -> str | dict[str, float]:
    """Return `data.source`, which may be a mixture, with existing local paths made absolute."""
    if isinstance(source, dict):
        return {_absolute(name): weight for name, weight in source.items()}
    return _absolute(source)


def _absolute(name: str) -> str:
    # A missing path stays as it is, so that the error shows what the user wrote.
    path = user_path(name)
    return str(path.absolute()) if is_path(name) and os.path.exists(path) else name
