"""Documents from local files: JSON lines, Parquet and plain text, alone or in folders."""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from nsa.data.source import (
    NAMED,
    NAMES_SHOWN,
    DataError,
    Document,
    Reader,
    Source,
    State,
    no_field,
    no_text,
)

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
PLAIN, COMPRESSED = (".jsonl", ".ndjson", ".txt", ".parquet"), (".jsonl", ".ndjson", ".txt")
READABLE = f"{', '.join(PLAIN)}; all but .parquet also with {' or '.join(COMPRESSIONS)} behind"
ROWS_AT_ONCE = 128  # of a Parquet file, so that long documents fit into memory
READ_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class TextFile:
    """A file that can be read, as it was when the source was opened."""

    path: Path
    name: str  # below the folder that was asked for
    bytes: int

    @property
    def suffix(self) -> str:
        """The suffix that tells the format, whatever it is compressed with."""
        path = Path(self.name.lower())
        return path.with_suffix("").suffix if path.suffix in COMPRESSIONS else path.suffix

    def open(self) -> BinaryIO:
        """What the file holds, decompressed; one that was cut off is an error, not an end."""
        compression = COMPRESSIONS.get(self.path.suffix.lower())
        if compression is None:
            return self.path.open("rb", buffering=READ_AT_ONCE)
        import pyarrow as pa  # zstandard's own reader takes a cut file for a short one

        stream = pa.CompressedInputStream(pa.OSFile(str(self.path)), compression)
        return io.BufferedReader(stream, READ_AT_ONCE)


Mine = Callable[[int], bool]  # whether a file's n-th record belongs to this share
Found = Iterator[tuple[Document, State]]  # a document, and where the file goes on behind it


def open_files(path: Path, text_field: str) -> Source:
    """A file, or all files of text below a folder in the order of their relative paths."""
    if path.is_dir():
        files = [_text_file(found, path) for found in sorted(_below(path)) if _is_text(found)]
        if not files:
            there = ", ".join(sorted(found.name for found in _below(path))[:NAMES_SHOWN])
            raise DataError(
                f"data.source = '{path}': no text in this folder, which holds "
                f"{there or 'no files'}; what can be read: {READABLE}"
            )
        return Files(str(path), files, text_field)
    if not path.exists():
        near = difflib.get_close_matches(str(path), NAMED, 1)
        raise DataError(
            f"data.source = '{path}': no such file or folder"
            + (f"; did you mean {near[0]!r}?" if near else "")
            + f"; choose {', '.join(NAMED)}, hf:<dataset>, or a path to files of text"
        )
    if not _is_text(path):
        raise DataError(
            f"data.source = '{path}': files that end in {path.suffix or 'no suffix'!r} are not "
            f"read; what can be read: {READABLE}"
        )
    return Files(str(path), [_text_file(path, path.parent)], text_field)


def _below(folder: Path) -> Iterator[Path]:
    with _named(folder):
        for root, folders, names in os.walk(folder, onerror=_raise):
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield from (Path(root, name) for name in names if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error


def _is_text(path: Path) -> bool:
    name = path.name.lower()
    return name.endswith(PLAIN) or name.endswith(
        tuple(plain + behind for plain in COMPRESSED for behind in COMPRESSIONS)
    )


def _text_file(path: Path, root: Path) -> TextFile:
    with _named(path):
        return TextFile(path, path.relative_to(root).as_posix(), path.stat().st_size)


class Files:
    """The documents of some files, or each `count`-th of them where files are too few to share."""

    def __init__(
        self,
        name: str,
        files: Sequence[TextFile],
        text_field: str,
        index: int = 0,
        count: int = 1,
    ) -> None:
        self.name = name
        self._files, self._text_field = files, text_field
        self._index, self._count = index, count

    def read(self, state: State | None = None) -> Reader:
        """A pass from the start, or from where another one stood in the very same files."""
        if state and state["files"] != self._listing:
            raise DataError(
                f"{self.name}: files were added, removed or changed in size since this run stopped "
                "reading here; put them back as they were, or start a new run"
            )
        return _FilesReader(self._documents, state or {"files": self._listing, "file": 0, "at": {}})

    def part(self, index: int, count: int) -> Source:
        """Whole files as far as there are enough of them, else single documents in turn."""
        assert self._count == 1
        if len(self._files) >= count:
            return Files(self.name, self._files[index::count], self._text_field)
        return Files(self.name, self._files, self._text_field, index, count)

    def size(self) -> int | None:
        """Bytes of text; JSON lines count whole. None where only decompressing would tell."""
        if any(file.path.suffix.lower() in COMPRESSIONS for file in self._files):
            return None
        return sum(self._bytes_of(file) for file in self._files) // self._count

    def _bytes_of(self, file: TextFile) -> int:
        if file.suffix != ".parquet":
            return file.bytes
        with _parquet(file, self._text_field) as table:
            groups = (table.metadata.row_group(i) for i in range(table.metadata.num_row_groups))
            columns = (group.column(i) for group in groups for i in range(group.num_columns))
            return sum(
                column.total_uncompressed_size
                for column in columns
                if column.path_in_schema == self._text_field
            )

    @cached_property
    def _listing(self) -> str:
        listed = json.dumps([[file.name, file.bytes] for file in self._files])
        return hashlib.blake2b(listed.encode(), digest_size=8).hexdigest()

    def _documents(self, state: State) -> Found:
        at = state["at"]
        for number in range(state["file"], len(self._files)):
            file = self._files[number]
            with _named(file.path):
                if file.path.stat().st_size != file.bytes:
                    raise DataError(
                        f"{file.path}: changed from {file.bytes} to {file.path.stat().st_size} "
                        "bytes while it was in use; start a new run with files that stay"
                    )
                documents = FORMATS[file.suffix](file, at, self._text_field, self._share(number))
                for document, here in documents:
                    yield document, {"files": state["files"], "file": number, "at": here}
            at = {}

    def _share(self, number: int) -> Mine:
        return lambda record: (number + record) % self._count == self._index


class _FilesReader:
    def __init__(self, documents: Callable[[State], Found], state: State) -> None:
        self._state = state
        self._documents = documents(state)

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Document:
        document, self._state = next(self._documents)
        return document

    def state(self) -> State:
        return self._state


def _lines(file: TextFile, at: State, field: str, mine: Mine) -> Found:
    """One document a line; blank lines are no records, and other shares' lines are not parsed."""
    line_number, record, offset = (at.get(name, 0) for name in ("line", "record", "offset"))
    with file.open() as stream:
        _skip(stream, offset)
        for line in stream:
            line_number, offset = line_number + 1, offset + len(line)
            if line.isspace():
                continue
            record += 1
            if mine(record - 1):
                text = _text_of_line(line, f"{file.path}:{line_number}", field)
                if text:
                    here = {"line": line_number, "record": record, "offset": offset}
                    yield Document(text, f"{file.name}:{line_number}"), here


def _skip(stream: BinaryIO, count: int) -> None:
    if stream.seekable():
        stream.seek(count)
        return
    while count > 0 and (skipped := len(stream.read(min(count, READ_AT_ONCE)))):
        count -= skipped


def _text_of_line(line: bytes, place: str, field: str) -> bytes | None:
    """The text that a line holds; bytes in it that are not UTF-8 become U+FFFD."""
    try:
        record = json.loads(line.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not a line of JSON ({error}); fix or remove it") from None
    if not isinstance(record, dict):
        raise DataError(
            f"{place}: a {type(record).__name__}, not an object with the field {field!r} "
            "(data.text_field); fix or remove it"
        )
    if field not in record:
        raise DataError(f"{place}: {no_field(field, list(record))}")
    text = record[field]
    if text is None:
        return None
    if not isinstance(text, str):
        raise DataError(f"{place}: {no_text(field, type(text).__name__)}")
    try:
        return text.encode()
    except UnicodeEncodeError:  # "\ud800" is good JSON, but no character
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()


def _rows(file: TextFile, at: State, field: str, mine: Mine) -> Found:
    """One document a row, read in small batches; row groups behind us are not read again."""
    start = at.get("row", 0)
    with _parquet(file, field) as table:
        group, row = 0, 0
        while group < table.num_row_groups:
            rows = table.metadata.row_group(group).num_rows
            if row + rows > start:
                break
            group, row = group + 1, row + rows
        groups = range(group, table.num_row_groups)
        for batch in table.iter_batches(ROWS_AT_ONCE, groups, [field]) if groups else ():
            texts = _as_bytes(batch.column(0))
            for index in range(max(start - row, 0), len(texts)):
                if mine(row + index) and (text := texts[index].as_py()):
                    yield Document(text, f"{file.name}:{row + index + 1}"), {"row": row + index + 1}
            row += len(texts)


def _as_bytes(column: Any) -> Any:
    """Text as its bytes: what is not UTF-8 stays as it is, and nothing is decoded in vain."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())


@contextmanager
def _parquet(file: TextFile, field: str) -> Iterator[Any]:
    """A Parquet file that has the field, and text in it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(file.path, buffer_size=READ_AT_ONCE) as table:
        schema = table.schema_arrow
        if field not in schema.names:
            raise DataError(f"{file.path}: {no_field(field, schema.names)}")
        kind = schema.field(field).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(f"{file.path}: {no_text(field, str(kind))}")
        yield table


def _whole(file: TextFile, at: State, field: str, mine: Mine) -> Found:
    """The whole file is one document, byte for byte."""
    if not at and mine(0):
        with file.open() as stream:
            text = stream.read()
        if text:
            yield Document(text, file.name), {"read": True}


FORMATS = {".jsonl": _lines, ".ndjson": _lines, ".parquet": _rows, ".txt": _whole}


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Whatever goes wrong with a file, the message says with which."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:  # Arrow's own are kinds of these
        raise DataError(
            f"{path}: cannot be read ({error}); replace it by a whole copy, or remove it"
        ) from error
