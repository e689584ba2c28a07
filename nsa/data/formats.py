"""Formats of local files: how each is read as documents, after a number of records.

read(file, first, field)  ->  (document, number of records up to it), ...

A record that cannot be read is yielded as its DataError; a file that cannot be read further raises.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from nsa.data.source import DataError, Document, missing_field, not_text, text_of

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
ROWS_PER_BATCH = 128  # of a Parquet file; small, so that long documents fit into memory
BUFFER_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 32  # of a file that is one document, decompressed
MAX_RECORD_BYTES = 1 << 28  # of a line, a CSV field, or a JSON array, which is parsed as a whole


@dataclass(frozen=True)
class TextFile:
    """A file to read, and its size when the source was opened."""

    path: Path
    name: str  # relative to the source's folder
    bytes: int
    plain: bool = False  # one document, whatever its name

    @property
    def suffix(self) -> str:
        """Return the suffix of the format, without the compression's."""
        if self.plain:
            return ".txt"
        path = Path(self.name.lower())
        return path.with_suffix("").suffix if path.suffix in COMPRESSIONS else path.suffix

    def open(self) -> BinaryIO:
        """Open the decompressed content; a truncated archive raises instead of ending early."""
        compression = COMPRESSIONS.get(self.path.suffix.lower())
        if compression is None:
            return self.path.open("rb", buffering=BUFFER_BYTES)
        import pyarrow as pa  # zstandard's reader accepts a truncated file

        stream = pa.CompressedInputStream(pa.OSFile(str(self.path)), compression)
        return io.BufferedReader(stream, BUFFER_BYTES)


Records = Iterator[tuple[Document | DataError, int]]


def _lines(file: TextFile, first: int, field: str) -> Records:
    """Read a document per line; earlier lines are not parsed."""
    with file.open() as stream:
        lines = iter(lambda: stream.readline(MAX_RECORD_BYTES + 1), b"")
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_RECORD_BYTES:
                raise ValueError(f"line {number} has more than {MAX_RECORD_BYTES:,} bytes")
            wanted = number > first and not line.isspace()
            if wanted and (document := _document(file, number, line, field)):
                yield document, number


def _document(file: TextFile, number: int, record: Any, field: str) -> Document | DataError | None:
    """Return a record, or a line of JSON, as a document; None without text; or its error.

    Invalid UTF-8 of a line becomes U+FFFD.
    """
    location = f"{file.path}:{number}"
    try:
        if isinstance(record, bytes):
            record = json.loads(record.decode("utf-8-sig", "replace"))
        if isinstance(record, dict):
            text = _encoded(text_of(record, field, location))
            return Document(text, f"{file.name}:{number}") if text else None
    except DataError as error:
        return error
    except (ValueError, RecursionError) as error:
        return DataError(f"{location}: not a line of JSON ({error}); fix or remove it")
    return DataError(
        f"{location}: a {type(record).__name__}, not an object with the field {field!r} "
        "(data.text_field); fix or remove it"
    )


def _encoded(text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate such as "\ud800" is valid JSON
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()


def _rows(file: TextFile, first: int, field: str) -> Records:
    """Read a document per row; skip earlier row groups.

    No batch spans two groups, so a pass that resumes ends at the same row before a broken one.
    """
    with open_parquet(file, field) as table:
        row = 0
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if row + rows <= first:
                row += rows
                continue
            for batch in table.iter_batches(ROWS_PER_BATCH, [group], [field]):
                for text in _as_bytes(batch.column(0)):
                    row += 1
                    if row > first and (content := text.as_py()):
                        yield Document(content, f"{file.name}:{row}"), row


def _as_bytes(column: Any) -> Any:
    """Return a text column as binary, without decoding: invalid UTF-8 is kept."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())


@contextmanager
def open_parquet(file: TextFile, field: str) -> Iterator[Any]:
    """Open a Parquet file whose `field` is a text column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(file.path, buffer_size=BUFFER_BYTES) as table:
        schema = table.schema_arrow
        if field not in schema.names:
            raise DataError(f"{file.path}: {missing_field(field, schema.names)}")
        kind = schema.field(field).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(f"{file.path}: {not_text(field, str(kind))}")
        yield table


def _records(file: TextFile, first: int, field: str) -> Records:
    """Read a document per row of a table or object of an array."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    with io.TextIOWrapper(file.open(), "utf-8-sig", "replace", newline="") as lines:
        table = csv.DictReader(lines, delimiter="\t" if file.suffix == ".tsv" else ",")
        records = _json_array(lines) if file.suffix == ".json" else table
        for number, record in enumerate(records, 1):
            if number > first and (document := _document(file, number, record, field)):
                yield document, number


def _json_array(lines: TextIO) -> Any:
    text = lines.read(MAX_RECORD_BYTES + 1)
    if len(text) > MAX_RECORD_BYTES:
        raise ValueError(f"an array of over {MAX_RECORD_BYTES:,} characters: write a line for each")
    return json.loads(text)


def _whole_file(file: TextFile, first: int, field: str) -> Records:
    """Read a file as one document, byte for byte."""
    if not first:
        with file.open() as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"one document of over {MAX_FILE_BYTES:,} bytes: divide it")
        if text:
            yield Document(text, file.name), 1


FORMATS = {
    **{".jsonl": _lines, ".ndjson": _lines, ".parquet": _rows, ".txt": _whole_file},
    **{".csv": _records, ".tsv": _records, ".json": _records},
}


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Replace errors of the file system and of Arrow by a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, NotImplementedError, RecursionError, csv.Error) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); replace it with an intact copy, or remove it"
        ) from error
