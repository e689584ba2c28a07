"""Local files as a document source: JSON lines, Parquet, tables and any text, alone or in folders.

A record is a line, a row, or a whole file. A reader skips the first `consumed` records and yields
(document, number of its record), numbered from 1. In place of a record that cannot be read it
yields a DataError. It raises if the rest of the file cannot be read.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import hashlib
import io
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from nsa.data.source import (
    NAMED,
    NAMES_SHOWN,
    Cursor,
    DataError,
    Document,
    Documents,
    Source,
    missing_field,
    text_of,
)

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
JSON_LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv", ".json")  # `open_files` reads them as records, or as one text each
TABLE_SUFFIXES = tuple(a + b for a in TABLES for b in ("", *COMPRESSIONS))
RECORD_SUFFIXES = (".parquet", *(a + b for a in JSON_LINES for b in ("", *COMPRESSIONS)))
# A file with one of these suffixes is always read.
SUFFIXES = (*RECORD_SUFFIXES, *(".txt" + b for b in ("", *COMPRESSIONS)))
READABLE = (
    ".jsonl, .ndjson, .txt, .csv, .tsv, .json (also .gz or .zst), .parquet, and any other file of "
    "UTF-8 text"
)
ROWS_PER_BATCH = 128  # of a Parquet file; small, so that long documents fit into memory
BUFFER_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 32  # of a file that is one document, decompressed
MAX_LINE_BYTES = 1 << 28  # also of a CSV field, and of a JSON array, which is parsed as a whole
LARGEST_TEXT = 8 << 20  # of a folder's files outside SUFFIXES; larger ones are left out
HEAD_BYTES = 1 << 16  # the start of a file outside SUFFIXES: shows whether it is text

Records = Iterator[tuple[Document | DataError, int]]


@dataclass(frozen=True)
class TextFile:
    """A file to read, and its size when the source was opened."""

    path: Path
    name: str  # relative to the source's folder
    bytes: int
    plain: bool = False  # read as one document, although its name is a table's

    @property
    def compression(self) -> str | None:
        return COMPRESSIONS.get(self.path.suffix.lower())

    @property
    def suffix(self) -> str:
        """Return the suffix of the format, without the compression's."""
        path = Path(self.name.lower())
        return path.with_suffix("").suffix if self.compression else path.suffix

    @property
    def reader(self) -> Callable[[TextFile, int, str], Records]:
        return _whole_file if self.plain else READERS.get(self.suffix, _whole_file)

    def open(self) -> BinaryIO:
        """Open the decompressed content; a truncated archive raises instead of ending early."""
        if self.compression is None:
            return self.path.open("rb", buffering=BUFFER_BYTES)
        import pyarrow as pa  # zstandard's reader accepts a truncated file

        stream = pa.CompressedInputStream(pa.OSFile(str(self.path)), self.compression)
        return io.BufferedReader(stream, BUFFER_BYTES)


def _lines(file: TextFile, consumed: int, field: str) -> Records:
    """Read a document per line; earlier lines are not parsed."""
    with file.open() as stream:
        lines = iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"line {number} has more than {MAX_LINE_BYTES:,} bytes")
            if number <= consumed or line.isspace():
                continue
            if document := _document(file, number, line, field):
                yield document, number


def _table(file: TextFile, consumed: int, field: str) -> Records:
    """Read a document per row of a table, or per object of a JSON array."""
    csv.field_size_limit(MAX_LINE_BYTES)
    with io.TextIOWrapper(file.open(), "utf-8-sig", "replace", newline="") as text:
        records: Iterable[Any]
        if file.suffix == ".json":
            array = text.read(MAX_LINE_BYTES + 1)
            if len(array) > MAX_LINE_BYTES or not array.lstrip().startswith("["):
                raise ValueError(
                    f"not an array of at most {MAX_LINE_BYTES:,} characters; write an object per "
                    "line and name it .jsonl"
                )
            records = json.loads(array)
        else:
            records = csv.DictReader(text, delimiter="\t" if file.suffix == ".tsv" else ",")
        for number, record in enumerate(records, 1):
            if number > consumed and (document := _document(file, number, record, field)):
                yield document, number


def _document(file: TextFile, number: int, record: Any, field: str) -> Document | DataError | None:
    """Return a record as a document, None if it has no text, or a DataError if it is broken.

    `record` is an object, or the bytes of a line of JSON, of which invalid UTF-8 becomes U+FFFD.
    """
    location = f"{file.path}:{number}"
    try:
        if isinstance(record, bytes):
            record = json.loads(record.decode("utf-8-sig", "replace"))
        if not isinstance(record, dict):
            return DataError(
                f"{location}: a {type(record).__name__}, not an object with the field {field!r} "
                "(data.text_field); fix or remove it"
            )
        text = text_of(record, field, location)
    except DataError as error:
        return error
    except (ValueError, RecursionError) as error:
        return DataError(f"{location}: not a line of JSON ({error}); fix or remove it")
    if not text:
        return None
    # A lone surrogate such as "\ud800" is valid JSON.
    encoded = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()
    return Document(encoded, f"{file.name}:{number}")


def _rows(file: TextFile, consumed: int, field: str) -> Records:
    """Read a document per row; skip earlier row groups.

    No batch spans two groups, so all rows before a broken group are read, in a resumed pass too.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(file.path, buffer_size=BUFFER_BYTES) as table:
        if field not in (names := table.schema_arrow.names):
            raise DataError(f"{file.path}: {missing_field(field, names)}")
        row = 0
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if row + rows <= consumed:
                row += rows
                continue
            for batch in table.iter_batches(ROWS_PER_BATCH, [group], [field]):
                for record in batch.to_pylist():
                    row += 1
                    if row > consumed and (text := text_of(record, field, str(file.path))):
                        yield Document(text.encode(), f"{file.name}:{row}"), row


def _whole_file(file: TextFile, consumed: int, field: str) -> Records:
    """Read a file as one document, byte for byte."""
    if not consumed:
        with file.open() as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"one document of over {MAX_FILE_BYTES:,} bytes: divide it")
        if text:
            yield Document(text, file.name), 1


# By suffix; `_whole_file` reads the others.
READERS = dict.fromkeys(JSON_LINES, _lines) | dict.fromkeys(TABLES, _table) | {".parquet": _rows}


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system, Arrow and parsers into a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, NotImplementedError, RecursionError, csv.Error) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); replace it with an intact copy, or remove it"
        ) from error


def open_files(
    path: Path, text_field: str, pattern: str | None = None, on_error: str = "stop"
) -> Files:
    """Open a file, or all text files below a folder, ordered by relative path.

    `pattern` selects files of a folder by name or relative path. Without it, a folder that holds
    JSON lines or Parquet is a dataset, of which only these and .txt are read. A table is read as
    records if it is `path` itself, if there is a `pattern`, or if the folder holds only tables.
    Otherwise it is one text: a .json among other files may hold settings.
    """
    if path.is_dir():
        present = sorted(_below(path, pattern))
        tables = pattern is not None or all(_named(file, TABLE_SUFFIXES) for file in present)
        left_out = 0
        if pattern is None and any(_named(file, RECORD_SUFFIXES) for file in present):
            read = [file for file in present if _named(file, SUFFIXES)]
        else:
            read = [file for file in present if _is_text(file, tables, LARGEST_TEXT)]
            left_out = len(present) - len(read)
        files = [_text_file(file, path, tables) for file in read]
        if not files:
            names = ", ".join(sorted(file.name for file in present)[:NAMES_SHOWN])
            raise DataError(
                f"data.source = '{path}': no text in this folder, which holds "
                f"{names or 'no files'} (data.pattern = {pattern!r}); supported: {READABLE}"
            )
        return Files(str(path), files, text_field, left_out=left_out, on_error=on_error)
    if not path.exists():
        near = difflib.get_close_matches(str(path), NAMED, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(
            f"data.source = '{path}': no such file or folder{hint}; choose {', '.join(NAMED)}, "
            "hf:<dataset>, or a path to text files"
        )
    file = _text_file(path, path.parent, tables=True)
    if not _is_text(path, tables=True):
        raise DataError(
            f"data.source = '{path}': {path.suffix or 'no suffix'!r} is not a supported format; "
            f"supported: {READABLE}"
        )
    return Files(str(path), [file], text_field, on_error=on_error)


def _named(path: Path, suffixes: tuple[str, ...]) -> bool:
    return path.name.lower().endswith(suffixes)


def _below(folder: Path, pattern: str | None) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    with file_errors(folder):
        for root, folders, names in os.walk(folder, onerror=fail):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for path in (Path(root, name) for name in names if not name.startswith(".")):
                relative = path.relative_to(folder).as_posix()
                if pattern is None or fnmatch(relative, pattern) or fnmatch(path.name, pattern):
                    yield path


def _is_text(path: Path, tables: bool, largest: float = math.inf) -> bool:
    """Return whether to read a file: by its suffix, or because its start is text."""
    if _named(path, SUFFIXES) or (tables and _named(path, TABLE_SUFFIXES)):
        return True
    with file_errors(path):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > largest:
            return False
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # may end inside a character
    except UnicodeDecodeError:
        return False
    return bool(text) and "\0" not in text


def _text_file(path: Path, root: Path, tables: bool = False) -> TextFile:
    with file_errors(path):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISFIFO(status.st_mode):
            raise ValueError("it is a device or a folder")  # /dev/zero has no end
        plain = not tables and _named(path, TABLE_SUFFIXES)
        return TextFile(path, path.relative_to(root).as_posix(), status.st_size, plain)


@dataclass(eq=False)
class Files(Source):
    """The documents of files, in order.

    Cursor: {"file": number, "record": records of that file that were read}.
    """

    name: str
    files: Sequence[TextFile]
    text_field: str
    left_out: int = 0  # files of the folder that are empty, no text, or too large
    on_error: str = "stop"  # or "skip": yield the errors of records and files that cannot be read

    def __post_init__(self) -> None:
        listing = json.dumps([[file.name, file.bytes] for file in self.files])
        self.content = hashlib.blake2b(listing.encode(), digest_size=8).hexdigest()

    def size(self) -> int | None:
        """Return the bytes of text and JSON syntax; None if a file is compressed or a pipe."""
        if any(file.compression or not file.path.is_file() for file in self.files):
            return None
        return sum(self._size_of(file) for file in self.files)

    def _size_of(self, file: TextFile) -> int:
        if file.suffix != ".parquet":
            return file.bytes
        import pyarrow.parquet as pq

        skipped = () if self.on_error == "stop" else (DataError,)
        size = 0
        with suppress(*skipped), file_errors(file.path):
            metadata = pq.read_metadata(file.path)
            for i in range(metadata.num_row_groups):
                group = metadata.row_group(i)
                for column in map(group.column, range(group.num_columns)):
                    if column.path_in_schema == self.text_field:
                        size += column.total_uncompressed_size
        return size

    def size_if_few(self, limit: int) -> int | None:
        """Return the bytes of text if there are fewer than `limit` documents, else None.

        A pipe, which can be read only once, gives None.
        """
        count = size = 0
        for file in self.files:
            if not file.path.is_file():
                return None
            if file.reader is _whole_file and not file.compression:
                lengths = iter([file.bytes])  # one document, whose size is known without reading it
            else:
                lengths = (len(x.text) for x in replace(self, files=[file]).read_all())
            for length in lengths:
                count, size = count + 1, size + length
                if count >= limit:
                    return None
        return size

    def read(self, cursor: Cursor | None = None) -> Documents:
        start, consumed = (cursor["file"], cursor["record"]) if cursor else (0, 0)
        for number, file in enumerate(self.files[start:], start):
            with file_errors(file.path):
                size = file.path.stat().st_size
            if size != file.bytes:
                raise DataError(
                    f"{file.path}: changed from {file.bytes} to {size} bytes while in use; start a "
                    "new run with files that do not change"
                )
            try:
                with file_errors(file.path):
                    for document, record in file.reader(file, consumed, self.text_field):
                        if isinstance(document, DataError) and self.on_error == "stop":
                            raise document
                        yield document, {"file": number, "record": record}
            except DataError as error:
                if self.on_error == "stop":
                    raise DataError(f"{error}, or set data.on_error=skip") from error
                yield error, {"file": number + 1, "record": 0}
            consumed = 0
