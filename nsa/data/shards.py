"""Shards: memory-mapped token files, and the `index.json` that lists them.

    | header, 4,096 bytes | tokens, uint16 or uint32 | padding to 8 bytes | ends, int64 |

Header: magic, version and length of the JSON that follows. Ends: the offset after each document's
last token. Everything is little-endian. A folder is unfinished while PLAN lists its shards.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from nsa.atomic_io import atomic_write
from nsa.data.source import NOTHING, Cursor, DataError, Skipped
from nsa.data.token_store import TokenStore
from nsa.data.tokenizer import TokenArray
from nsa.untrusted import matches, open_regular, parse_json, read_text, short_repr

MAGIC = b"NSASHARD"
VERSION = 1
HEADER = 4_096
FIXED = struct.Struct("<8sII")  # magic, version, length of the JSON
FORMAT = "nsa shards"
INDEX = "index.json"
PLAN = "prepare.json"  # the index of a folder that is unfinished
BUFFER_BYTES = 1 << 22
OPEN_SHARDS = 128  # of a store: a process has 1,024 files
RERUN = "run the same command again"
RESTORE = "restore the file, or delete its folder to write it again"


@dataclass(frozen=True)
class Stamp:
    """Source and tokenizer: the description that all shards of a folder share."""

    source: str
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    eos_id: int
    dtype: str  # "uint16" or "uint32"


@dataclass(frozen=True)
class Shard:
    """One file of one split; `sha256` covers everything after the header."""

    name: str
    split: str
    tokens: int
    documents: int
    text_bytes: int
    sha256: str


STAMP_SHAPE, SHARD_SHAPE = (
    {field.name: {"str": str, "int": int}[str(field.type)] for field in fields(kind)}
    for kind in (Stamp, Shard)
)
INDEX_SHAPE = {"stamp": STAMP_SHAPE, "settings": dict, "shards": [SHARD_SHAPE]}
PLAN_SHAPE = INDEX_SHAPE | {"cursor": (dict, type(None)), "skipped": list}


def _ends_offset(tokens: int, dtype: str) -> int:
    return HEADER + -(-tokens * np.dtype(dtype).itemsize // 8) * 8


@dataclass(frozen=True)
class Index:
    """The description of a folder of shards."""

    stamp: Stamp
    settings: dict[str, Any]  # the other settings that determine its content
    shards: list[Shard]
    cursor: Cursor | None = None  # after the last document in the shards; None: at the start
    skipped: Skipped = NOTHING
    finished: bool = True  # the source has no further documents

    def of(self, split: str) -> list[Shard]:
        """Return the shards of one split, in order."""
        return [shard for shard in self.shards if shard.split == split]

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.of(split))


def write_shard(
    folder: Path,
    name: str,
    split: str,
    stamp: Stamp,
    documents: Sequence[TokenArray],
    text_bytes: int,
) -> Shard:
    """Write documents, each of which ends with the end of text, as one shard."""
    little = np.dtype(stamp.dtype).newbyteorder("<")
    tokens = np.concatenate(documents).astype(little, copy=False)
    ends = np.cumsum([len(document) for document in documents]).astype("<i8")
    padding = bytes(_ends_offset(len(tokens), stamp.dtype) - HEADER - tokens.nbytes)
    payload = (tokens.data, padding, ends.data)
    digest = hashlib.sha256()
    for chunk in payload:
        digest.update(chunk)
    shard = Shard(name, split, len(tokens), len(documents), text_bytes, digest.hexdigest())
    atomic_write(folder / name, (_header(shard, stamp), *payload))
    return shard


def _header(shard: Shard, stamp: Stamp) -> bytes:
    text = json.dumps(_description(shard, stamp), ensure_ascii=False).encode()
    if FIXED.size + len(text) > HEADER:
        raise DataError(
            f"{shard.name}: the names of its source and tokenizer ({len(text):,} bytes) do not fit "
            "into a shard's header; use shorter paths"
        )
    return (FIXED.pack(MAGIC, VERSION, len(text)) + text).ljust(HEADER, b"\0")


def _description(shard: Shard, stamp: Stamp) -> dict[str, Any]:
    description = {**asdict(stamp), **asdict(shard)}
    del description["name"]  # a file may be renamed
    return description


def open_shard(folder: Path, shard: Shard, stamp: Stamp) -> FileIO:
    """Open a shard; check its size and header, but not its content."""
    path = folder / shard.name
    try:
        file = open_regular(path)
    except FileNotFoundError:
        raise DataError(f"{path}: this shard is missing; {RESTORE}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); {RESTORE}") from None
    try:
        _check_header(path, file.read(HEADER), shard, stamp)
        size = os.fstat(file.fileno()).st_size
        expected = _ends_offset(shard.tokens, stamp.dtype) + 8 * shard.documents
        if size != expected:
            raise DataError(
                f"{path}: {'truncated' if size < expected else 'too long'}: {size:,} bytes instead "
                f"of {expected:,}; {RESTORE}"
            )
    except BaseException:
        file.close()
        raise
    return file


def _check_header(path: Path, header: bytes, shard: Shard, stamp: Stamp) -> None:
    if len(header) < HEADER:
        raise DataError(f"{path}: truncated: {len(header):,} bytes, less than a header; {RESTORE}")
    magic, version, length = FIXED.unpack_from(header)
    if magic != MAGIC:
        raise DataError(
            f"{path}: not a shard of `nsa data prepare` (it starts with {magic!r}); {RESTORE}"
        )
    check_version(path, version)
    try:
        actual = parse_json(header[FIXED.size : FIXED.size + length])
    except ValueError:
        actual = {}
    actual = actual if isinstance(actual, dict) else {}
    for name, value in _description(shard, stamp).items():
        if actual.get(name) != value:
            raise DataError(
                f"{path}: not the shard that {INDEX} lists: its {name} is "
                f"{short_repr(actual.get(name))} instead of {value!r}; {RESTORE}"
            )


def check_version(path: Path, version: int) -> None:
    if type(version) is not int:
        raise DataError(
            f"{path}: damaged (version = {short_repr(version)}); prepare the folder again"
        )
    if version > VERSION:
        raise DataError(
            f"{path}: written by a newer nsa (format {version}, this one reads {VERSION}); update "
            "this one"
        )


def is_prepared(path: str) -> bool:
    """Return whether `nsa data prepare` wrote this folder, finished or not."""
    return any(_is_ours(Path(path).expanduser() / name) for name in (INDEX, PLAN))


def _is_ours(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return FORMAT.encode() in file.read(64)  # other programs have an index.json, too
    except OSError:
        return False


def read_index(folder: Path) -> Index:
    """Read the index of a finished folder."""
    index = find_index(folder)
    if index is None:
        raise DataError(f"{folder}: not a folder that `nsa data prepare` wrote")
    if not index.finished:
        raise DataError(f"{folder}: unfinished; {RERUN}: it resumes where it stopped")
    return index


def find_index(folder: Path) -> Index | None:
    """Read the index of a folder, finished or not; None if there is none."""
    # INDEX replaces PLAN: if neither was found in this order, it may have come in between.
    for name, shape in ((INDEX, INDEX_SHAPE), (PLAN, PLAN_SHAPE), (INDEX, INDEX_SHAPE)):
        path = folder / name
        try:
            return _index(path, parse_json(read_text(path)), shape)
        except FileNotFoundError:
            continue
        except DataError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: damaged ({error!r}); prepare the folder again") from None
    return None


def _index(path: Path, content: Any, shape: Any) -> Index:
    if content["format"] == FORMAT:
        check_version(path, content["version"])
    if not matches(content, shape):
        raise ValueError("a field is missing, or has another type")
    stamp, shards = Stamp(**content["stamp"]), [Shard(**shard) for shard in content["shards"]]
    if stamp.dtype not in ("uint16", "uint32") or stamp.eos_id >= stamp.vocab_size:
        raise ValueError(f"dtype = {short_repr(stamp.dtype)}, eos_id = {stamp.eos_id}")
    for shard in shards:
        counts = shard.tokens, shard.documents, shard.text_bytes
        if 0 in counts or Path(shard.name).name != shard.name:
            raise ValueError(f"{short_repr(shard.name)} with {counts} tokens, documents, bytes")
    number, first = content.get("skipped", NOTHING)
    if not matches([number, first], [(int, str)]):
        raise ValueError(f"skipped = {short_repr(content['skipped'])}")
    return Index(
        stamp,
        content["settings"],
        shards,
        content.get("cursor"),
        Skipped(number, first),
        finished=path.name == INDEX,
    )


def write_index(folder: Path, index: Index) -> None:
    """Write the index of a folder, which may mark it as finished."""
    content = {"format": FORMAT, "version": VERSION, **asdict(index), "parts": 1}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    atomic_write(folder / (INDEX if index.finished else PLAN), [text.encode()])
    if index.finished:
        (folder / PLAN).unlink(missing_ok=True)


class ShardStore(TokenStore):
    """One split of a folder of shards, memory-mapped.

    A shard that is replaced by a new file stays mapped, unchanged. If the mapped file itself is
    overwritten or truncated, the next read raises; without the check SIGBUS could end the process.
    """

    def __init__(
        self, folder: Path, name: str, index: Index, split: str, tokens: float = math.inf
    ) -> None:
        stamp, self._shards = index.stamp, list[Shard]()
        self._folder, self._stamp, self._split = folder, stamp, split
        self._opened = lru_cache(OPEN_SHARDS)(self._open)
        super().__init__(
            [],
            stamp.eos_id,
            bytes_per_token=0.0,
            name=name,
            vocab_size=stamp.vocab_size,
            tokenizer=stamp.tokenizer,
            tokenizer_fingerprint=stamp.tokenizer_fingerprint,
        )
        self.extend(index, tokens)
        digest = hashlib.sha256("/".join(shard.sha256 for shard in self._shards).encode())
        self.fingerprint = digest.hexdigest()

    def extend(self, index: Index, tokens: float) -> None:
        """Add the next shards of an index until there are `tokens` tokens."""
        for shard in index.of(self._split)[len(self._shards) :]:
            if len(self) >= tokens:
                break
            open_shard(self._folder, shard, self._stamp).close()
            self._shards.append(shard)
            self._ends = np.append(self._ends, len(self) + shard.tokens)
        self.bytes_per_token = sum(shard.text_bytes for shard in self._shards) / len(self)
        self.notes = index.skipped.note(self.name)

    def read(self, start: int, stop: int) -> TokenArray:
        tokens = super().read(start, stop)
        if (highest := int(tokens.max())) >= self.vocab_size:  # it would not fit the embedding
            number = np.searchsorted(self._ends, start + tokens.argmax(), side="right")
            raise DataError(
                f"{self.name}: holds the id {highest} at or after token {start:,}, and {INDEX} says"
                f" vocab_size = {self.vocab_size}; prepare the folder again, or restore "
                f"{self._shards[number].name}"
            )
        return tokens

    def _piece(self, number: int) -> TokenArray:
        file, tokens, opened = self._opened(number)
        if _size_and_time(file) != opened:
            raise DataError(
                f"{file.name}: overwritten or truncated while in use; restore it, and replace "
                "shards only by moving complete files into their place"
            )
        return tokens

    def _open(self, number: int) -> tuple[FileIO, TokenArray, tuple[int, int]]:
        shard = self._shards[number]
        file = open_shard(self._folder, shard, self._stamp)
        little = np.dtype(self._stamp.dtype).newbyteorder("<")
        tokens = np.memmap(file, little, "r", offset=HEADER, shape=(shard.tokens,))
        return file, tokens.view(np.ndarray), _size_and_time(file)


def _size_and_time(file: FileIO) -> tuple[int, int]:
    stat = os.fstat(file.fileno())
    return stat.st_size, stat.st_mtime_ns


def open_shards(path: str, split: str) -> ShardStore:
    """Open one split of a prepared folder; check sizes and headers, but not checksums."""
    folder = Path(path).expanduser()
    index = read_index(folder)
    if not index.of(split):
        held_out = short_repr(index.settings.get("held_out"))
        raise DataError(
            f"data.source = {path!r} has no document for split {split!r} (prepared with "
            f"data.held_out = {held_out}); prepare it again with another "
            "--held-out, or take a larger source"
        )
    return ShardStore(folder, path, index, split)


def verify_shards(folder: Path, index: Index) -> None:
    """Read every byte of every shard; raise a DataError for a wrong checksum or token id."""
    listed = {shard.name for shard in index.shards}
    for path in sorted(folder.glob("*.bin")):
        if path.name not in listed:
            raise DataError(f"{path}: not listed in {INDEX} and never read; move it elsewhere")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda shard: _verify(folder, shard, index.stamp), index.shards))


def _verify(folder: Path, shard: Shard, stamp: Stamp) -> None:
    with open_shard(folder, shard, stamp) as file:
        digest, highest = hashlib.sha256(), 0
        little = np.dtype(stamp.dtype).newbyteorder("<")
        remaining = shard.tokens  # tokens to read; padding and ends follow them
        while block := file.read(BUFFER_BYTES):
            digest.update(block)
            if count := min(remaining, len(block) // little.itemsize):
                highest = max(highest, int(np.frombuffer(block, little, count).max()))
                remaining -= count
    if digest.hexdigest() != shard.sha256:
        raise DataError(
            f"{folder / shard.name}: its content changed since it was written (sha256 "
            f"{digest.hexdigest()[:12]}… instead of {shard.sha256[:12]}…); {RESTORE}"
        )
    if highest >= stamp.vocab_size:
        raise DataError(
            f"{folder / shard.name}: holds the token id {highest:,}, and {INDEX} says vocab_size = "
            f"{stamp.vocab_size:,}; prepare the folder again"
        )


def longest_document(folder: Path, shard: Shard, stamp: Stamp) -> int:
    """Return the length in tokens of the longest document, with its end of text."""
    with open_shard(folder, shard, stamp) as file:
        file.seek(_ends_offset(shard.tokens, stamp.dtype))
        return int(np.diff(np.fromfile(file, "<i8", shard.documents), prepend=0).max())
