"""Formats of local files: how each is read as documents, from a cursor on.

read(file, cursor, field, in_part)  ->  (document, cursor after it), ...

A record that cannot be read is yielded as its DataError; a file that cannot be read further raises.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from nsa.data.source import DataError, Document, State, missing_field, not_text, text_of

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


InPart = Callable[[int], bool]  # returns whether a file's n-th record is in this part
Documents = Iterator[tuple[Document | DataError, State]]  # with the cursor after each


def _lines(file: TextFile, cursor: State, field: str, in_part: InPart) -> Documents:
    """Read a document per line; blank lines do not count, and other parts' lines are not parsed."""
    line_number, record, offset = (cursor.get(name, 0) for name in ("line", "record", "offset"))
    with file.open() as stream:
        _skip(stream, offset)
        for line in iter(lambda: stream.readline(MAX_RECORD_BYTES + 1), b""):
            line_number, offset = line_number + 1, offset + len(line)
            if len(line) > MAX_RECORD_BYTES:
                raise ValueError(f"line {line_number} has more than {MAX_RECORD_BYTES:,} bytes")
            if line.isspace():
                continue
            record += 1
            document = in_part(record - 1) and _document(file, line_number, line, field)
            if document:
                yield document, {"line": line_number, "record": record, "offset": offset}


def _skip(stream: BinaryIO, count: int) -> None:
    if stream.seekable():
        stream.seek(count)
        return
    while count > 0 and (skipped := len(stream.read(min(count, BUFFER_BYTES)))):
        count -= skipped


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


def _rows(file: TextFile, cursor: State, field: str, in_part: InPart) -> Documents:
    """Read a document per row; skip row groups before the cursor.

    No batch spans two groups, so a pass that resumes ends at the same row before a broken one.
    """
    start = cursor.get("row", 0)
    with open_parquet(file, field) as table:
        group, row = 0, 0
        while group < table.num_row_groups:
            rows = table.metadata.row_group(group).num_rows
            if row + rows > start:
                break
            group, row = group + 1, row + rows
        for batch in (
            batch
            for number in range(group, table.num_row_groups)
            for batch in table.iter_batches(ROWS_PER_BATCH, [number], [field])
        ):
            texts = _as_bytes(batch.column(0))
            for index in range(max(start - row, 0), len(texts)):
                number = row + index + 1
                if in_part(number - 1) and (text := texts[index].as_py()):
                    yield Document(text, f"{file.name}:{number}"), {"row": number}
            row += len(texts)


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


def _records(file: TextFile, cursor: State, field: str, in_part: InPart) -> Documents:
    """Read a document per row of a table or object of an array; resuming parses from the start."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    with io.TextIOWrapper(file.open(), "utf-8-sig", "replace", newline="") as lines:
        table = csv.DictReader(lines, delimiter="\t" if file.suffix == ".tsv" else ",")
        records = _json_array(lines) if file.suffix == ".json" else table
        for number, record in enumerate(records, 1):
            wanted = number > cursor.get("row", 0) and in_part(number - 1)
            document = wanted and _document(file, number, record, field)
            if document:
                yield document, {"row": number}


def _json_array(lines: TextIO) -> Any:
    text = lines.read(MAX_RECORD_BYTES + 1)
    if len(text) > MAX_RECORD_BYTES:
        raise ValueError(f"an array of over {MAX_RECORD_BYTES:,} characters: write a line for each")
    return json.loads(text)


def _whole_file(file: TextFile, cursor: State, field: str, in_part: InPart) -> Documents:
    """Read a file as one document, byte for byte."""
    if not cursor and in_part(0):
        with file.open() as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"one document of over {MAX_FILE_BYTES:,} bytes: divide it")
        if text:
            yield Document(text, file.name), {"read": True}


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
