"""Local files as a document source: JSON, CSV, Parquet and any text, alone or in folders."""

from __future__ import annotations

import codecs
import difflib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from nsa.data.formats import (
    COMPRESSIONS,
    FORMATS,
    TextFile,
    name_in_errors,
    open_parquet,
)
from nsa.data.source import NAMED, NAMES_SHOWN, Cursor, DataError, Documents, Source

COMPRESSIBLE = (".jsonl", ".ndjson", ".txt")
SUFFIXES = (*COMPRESSIBLE, ".parquet", *(a + b for a in COMPRESSIBLE for b in COMPRESSIONS))
READABLE = (
    ".jsonl, .ndjson, .txt, .csv, .tsv, .json (also .gz or .zst), .parquet, and any other file of "
    "UTF-8 text"
)
TABLES = (".csv", ".tsv", ".json")  # also compressed
DATASETS = (".jsonl", ".ndjson", ".parquet")  # other files beside these describe them
LARGEST_TEXT = 8 << 20  # a larger file with another suffix is taken for generated
HEAD_BYTES = 1 << 16  # of a file with another suffix: decides whether it holds text


def open_files(
    path: Path, text_field: str, pattern: str | None = None, on_error: str = "stop"
) -> Files:
    """Open a file, or all text files below a folder, ordered by relative path.

    `pattern` selects files of a folder by name or relative path. Without it, a folder with JSON
    lines or Parquet is a dataset, of which other files are no documents.
    """
    if path.is_dir():
        present = sorted(_below(path, pattern))
        files, left_out = [_text_file(file, path) for file in present if _is_text(file)], 0
        if pattern or not any(file.suffix in DATASETS for file in files):
            files = [t for file in present if (t := _any_text(file, path, text_field))]
            left_out = len(present) - len(files)
        if not files:
            names = ", ".join(sorted(file.name for file in present)[:NAMES_SHOWN])
            raise DataError(
                f"data.source = '{path}': no text in this folder, which holds "
                f"{names or 'no files'} (data.pattern = {pattern!r}); supported: {READABLE}"
            )
        return Files(str(path), files, text_field, left_out=left_out, on_error=on_error)
    if not path.exists():
        near = difflib.get_close_matches(str(path), NAMED, 1)
        raise DataError(
            f"data.source = '{path}': no such file or folder"
            + (f"; did you mean {near[0]!r}?" if near else "")
            + f"; choose {', '.join(NAMED)}, hf:<dataset>, or a path to text files"
        )
    file = _any_text(path, path.parent, None)
    if file is None:
        if _text_file(path, path.parent).suffix in TABLES:
            raise DataError(f"data.source = '{path}': empty, or not UTF-8; write it as UTF-8")
        raise DataError(
            f"data.source = '{path}': {path.suffix or 'no suffix'!r} is not a supported format; "
            f"supported: {READABLE}"
        )
    if file.plain and replace(file, plain=False).suffix == ".json":
        raise DataError(
            f"data.source = '{path}': not an array of objects; if each line is an object, name it "
            ".jsonl"
        )
    return Files(str(path), [file], text_field, on_error=on_error)


def _any_text(path: Path, root: Path, field: str | None) -> TextFile | None:
    """Return a file as records or as one document, None if it is empty, binary or generated.

    In a folder a table or JSON array is read as records if they have `field`; alone (None), always.
    """
    if path.exists() and not path.is_file() and not _is_text(path):
        return None
    file = _text_file(path, root)
    if _is_text(path):
        return file
    if file.bytes > LARGEST_TEXT and field is not None:
        return None
    try:
        with name_in_errors(path), file.open() if file.suffix in TABLES else path.open("rb") as f:
            head = f.read(HEAD_BYTES)
    except DataError:
        if path.suffix.lower() not in COMPRESSIONS:
            raise
        return file  # reading will raise it, or skip the file by data.on_error
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head)
    except UnicodeDecodeError:
        return None
    if not text or "\0" in text:
        return None
    is_array = file.suffix == ".json" and text.lstrip().startswith("[")
    start = text if is_array else text.partition("\n")[0]  # where fields are named
    records = is_array or file.suffix in (".csv", ".tsv")
    named = field is None or re.search(rf"\b{re.escape(field)}\b", start)
    return file if records and named else replace(file, plain=True)


def _below(folder: Path, pattern: str | None) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    with name_in_errors(folder):
        for root, folders, names in os.walk(folder, onerror=fail):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for path in (Path(root, name) for name in names if not name.startswith(".")):
                relative = path.relative_to(folder).as_posix()
                if pattern is None or fnmatch(relative, pattern) or fnmatch(path.name, pattern):
                    yield path


def _is_text(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)


def _text_file(path: Path, root: Path) -> TextFile:
    with name_in_errors(path):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISFIFO(status.st_mode):
            raise ValueError("it is a device or a folder")  # /dev/zero has no end
        return TextFile(path, path.relative_to(root).as_posix(), status.st_size)


@dataclass(eq=False)
class Files(Source):
    """The documents of files, in order.

    Cursor: {"file": number, "record": records of that file that were read}.
    """

    name: str
    files: Sequence[TextFile]
    text_field: str
    left_out: int = 0  # files of the folder that hold no text, or too much
    on_error: str = "stop"  # or "skip": yield the errors of records and files that cannot be read

    def size(self) -> int | None:
        """Return the bytes of text and JSON syntax; None if a file is compressed or a pipe."""
        for file in self.files:
            if file.path.suffix.lower() in COMPRESSIONS or not file.path.is_file():
                return None
        return sum(self._size_of(file) for file in self.files)

    def _size_of(self, file: TextFile) -> int:
        if file.suffix != ".parquet":
            return file.bytes
        skipped = () if self.on_error == "stop" else (DataError,)
        with (
            suppress(*skipped),
            name_in_errors(file.path),
            open_parquet(file, self.text_field) as table,
        ):
            groups = (table.metadata.row_group(i) for i in range(table.metadata.num_row_groups))
            columns = (group.column(i) for group in groups for i in range(group.num_columns))
            return sum(
                column.total_uncompressed_size
                for column in columns
                if column.path_in_schema == self.text_field
            )
        return 0

    def size_if_few(self, limit: int) -> int | None:
        """Return the bytes of text if there are fewer than `limit` documents, else None.

        An uncompressed text file is one document, whose size is known without reading. None for a
        pipe, which could be read only once.
        """
        count = size = 0
        for file in self.files:
            if not file.path.is_file():
                return None
            documents = replace(self, files=[file]).read_all()
            compressed = file.path.suffix.lower() in COMPRESSIONS
            plain = file.suffix == ".txt" and not compressed
            for length in [file.bytes] if plain else (len(d.text) for d in documents):
                count, size = count + 1, size + length
                if count >= limit:
                    return None
        return size

    @property
    def content(self) -> str:
        listing = json.dumps([[file.name, file.bytes] for file in self.files])
        return hashlib.blake2b(listing.encode(), digest_size=8).hexdigest()

    def read(self, cursor: Cursor | None = None) -> Documents:
        start, first = (cursor["file"], cursor["record"]) if cursor else (0, 0)
        for number, file in enumerate(self.files[start:], start):
            with name_in_errors(file.path):
                size = file.path.stat().st_size
            if size != file.bytes:
                raise DataError(
                    f"{file.path}: changed from {file.bytes} to {size} bytes while in use; start a "
                    "new run with files that do not change"
                )
            try:
                with name_in_errors(file.path):
                    for document, record in FORMATS[file.suffix](file, first, self.text_field):
                        if isinstance(document, DataError) and self.on_error == "stop":
                            raise document
                        yield document, {"file": number, "record": record}
            except DataError as error:
                if self.on_error == "stop":
                    raise DataError(f"{error}, or set data.on_error=skip") from error
                yield error, {"file": number + 1, "record": 0}
            first = 0
