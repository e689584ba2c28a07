"""Shards: memory-mapped token files, and the `index.json` that lists them.

train-000-00000.bin   tokens, little-endian uint16 or uint32; each document ends with eos
index.json            settings that determine the tokens; counts and SHA-256 of each shard;
                      unless it is finished, the cursor from which reading resumes
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from nsa.atomic_io import atomic_write, atomic_write_text
from nsa.data.source import Cursor, DataError, Skipped
from nsa.data.tokenizer import TokenArray
from nsa.system import user_path
from nsa.untrusted import matches, open_regular, parse_json, read_text, short_repr

FORMAT, VERSION = "nsa shards", 2
INDEX = "index.json"
BUFFER_BYTES = 1 << 22  # read at a time to verify a checksum
OPEN_SHARDS = 128  # shards that a store maps at a time; a process may have 1,024 open files
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
    """One file of one split."""

    name: str
    split: str
    tokens: int
    documents: int
    text_bytes: int
    sha256: str


SHARD_SHAPE = get_type_hints(Shard)
INDEX_SHAPE = {
    "stamp": get_type_hints(Stamp),
    "settings": dict,
    "shards": [SHARD_SHAPE],
    "cursor": (dict, type(None)),
    "skipped": {"number": int, "first": str},
    "finished": bool,
}


@dataclass(frozen=True)
class Index:
    """The description of a folder of shards."""

    stamp: Stamp
    settings: dict[str, Any]  # the other settings that determine its content
    shards: list[Shard]
    cursor: Cursor | None = None  # after the last document in the shards; None: at the start
    skipped: Skipped = Skipped()  # noqa: RUF009 (frozen)
    finished: bool = True  # the source has no further documents

    def of(self, split: str) -> list[Shard]:
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
    """Write documents, each of which ends with eos, as one shard."""
    tokens = np.concatenate(documents).astype(_file_dtype(stamp), copy=False)
    atomic_write(folder / name, tokens.data)
    digest = hashlib.sha256(tokens.data).hexdigest()
    return Shard(name, split, len(tokens), len(documents), text_bytes, digest)


def _file_dtype(stamp: Stamp) -> np.dtype[Any]:
    return np.dtype(stamp.dtype).newbyteorder("<")  # little-endian


def open_shard(folder: Path, shard: Shard, stamp: Stamp) -> FileIO:
    """Open a shard; check its size, but not its content."""
    path = folder / shard.name
    try:
        file = open_regular(path)
    except FileNotFoundError:
        raise DataError(f"{path}: this shard is missing; {RESTORE}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); {RESTORE}") from None
    size = os.fstat(file.fileno()).st_size
    expected = shard.tokens * _file_dtype(stamp).itemsize
    if size != expected:
        file.close()
        problem = "truncated" if size < expected else "too long"
        raise DataError(f"{path}: {problem}: {size:,} bytes instead of {expected:,}; {RESTORE}")
    return file


def is_prepared(path: str) -> bool:
    """Return whether `nsa data prepare` wrote this folder, finished or not."""
    try:
        with open_regular(user_path(path) / INDEX) as file:
            return FORMAT.encode() in file.read(64)  # other programs have an index.json, too
    except OSError:
        return False


def read_index(path: Path | str) -> Index:
    """Read the index of a finished folder, which may begin with ~."""
    folder = user_path(path)
    index = find_index(folder)
    if index is None:
        raise DataError(f"{folder}: not a folder that `nsa data prepare` wrote")
    if not index.finished:
        raise DataError(f"{folder}: unfinished; {RERUN}: it resumes where it stopped")
    return index


def find_index(folder: Path) -> Index | None:
    """Read the index of a folder, finished or not; None if there is none."""
    path = folder / INDEX
    try:
        return _index(path, parse_json(read_text(path)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error!r}); prepare the folder again") from None


def _index(path: Path, content: Any) -> Index:
    version = content["version"]
    if version != VERSION:
        raise DataError(
            f"{path}: of format {short_repr(version)}, and this nsa reads format {VERSION}; "
            "prepare the folder again"
        )
    if not matches(content, INDEX_SHAPE):
        raise ValueError("a field is missing, or has another type")
    stamp = Stamp(**content["stamp"])
    # Earlier versions also wrote the key "offset", always 0.
    shards = [Shard(**{name: shard[name] for name in SHARD_SHAPE}) for shard in content["shards"]]
    if stamp.dtype not in ("uint16", "uint32") or stamp.eos_id >= stamp.vocab_size:
        raise ValueError(f"dtype = {short_repr(stamp.dtype)}, eos_id = {stamp.eos_id}")
    for shard in shards:
        counts = shard.tokens, shard.documents, shard.text_bytes
        if 0 in counts or Path(shard.name).name != shard.name:
            raise ValueError(f"{short_repr(shard.name)} with {counts} tokens, documents, bytes")
    skipped = Skipped(**content["skipped"])
    values = content | {"stamp": stamp, "shards": shards, "skipped": skipped}
    return Index(**{name: values[name] for name in INDEX_SHAPE})


def write_index(folder: Path, index: Index) -> None:
    content = {"format": FORMAT, "version": VERSION, **asdict(index)}
    atomic_write_text(folder / INDEX, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


class TokenStore:
    """One split of a folder of shards as a random-access stream of tokens, memory-mapped.

    A shard that is replaced by a new file stays mapped, unchanged. If the mapped file itself is
    overwritten or truncated, the next read raises; without the check SIGBUS could end the process.

    A store grows if a process still writes the folder. Then its argument `wait`, called with n,
    waits until the split has n tokens or is complete, and returns the index. A shard is added only
    when `wait_for` needs it, so the length of the store does not depend on the writer's speed.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        index: Index,
        split: str,
        wait: Callable[[int], Index] | None = None,
    ) -> None:
        if not index.of(split):
            change = "lower" if split == "train" else "raise"
            held_out = short_repr(index.settings.get("held_out"))
            text = (
                f"data.source = {name!r} has no document for split {split!r}; {change} "
                f"data.held_out = {held_out} (for a prepared folder: prepare it again with another "
                "--held-out), or take a larger source"
            )
            raise DataError("; ".join([text, *index.skipped.note(name)]))
        self.name, self.stamp = name, index.stamp
        self.grows = wait is not None
        self.size: int | None = None  # bytes of the source, if known and the store grows
        self._folder, self._split, self._wait = folder, split, wait
        self._shards: list[Shard] = []
        self._ends = np.zeros(0, dtype=np.int64)  # [shards]: token at which each shard ends
        self._mapped = lru_cache(OPEN_SHARDS)(self._map)
        self._extend(index, 1 if self.grows else math.inf)
        # Identifies the tokens by all shards; by the first shard alone if the store grows.
        digests = "/".join(shard.sha256 for shard in self._shards)
        self.fingerprint = hashlib.sha256(digests.encode()).hexdigest()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def wait_for(self, tokens: int) -> int:
        """Wait until the store has `tokens` tokens or its source ends; return how many it has."""
        if tokens > len(self) and self._wait is not None:
            index = self._wait(tokens)
            self._extend(index, tokens)
            if index.finished and len(self) == index.tokens(self._split):
                self._wait = None
        return len(self)

    def _extend(self, index: Index, tokens: float) -> None:
        """Add the next shards of an index until there are `tokens` tokens."""
        for shard in index.of(self._split)[len(self._shards) :]:
            if len(self) >= tokens:
                break
            open_shard(self._folder, shard, self.stamp).close()
            self._shards.append(shard)
            self._ends = np.append(self._ends, len(self) + shard.tokens)
        # Converts loss to bits per byte of text.
        self.bytes_per_token = sum(shard.text_bytes for shard in self._shards) / len(self)
        self.notes = index.skipped.note(self.name)  # for the log

    def read(self, start: int, stop: int) -> TokenArray:
        assert 0 <= start < stop <= len(self)
        number = int(np.searchsorted(self._ends, start, side="right"))
        parts = []
        while start < stop:
            file, tokens, version = self._mapped(number)
            if _size_and_time(file) != version:
                raise DataError(
                    f"{file.name}: overwritten or truncated while in use; restore it, and replace "
                    "shards only by moving complete files into their place"
                )
            shard_stop = int(self._ends[number])
            shard_start = shard_stop - len(tokens)
            part_stop = min(stop, shard_stop)
            part = tokens[start - shard_start : part_stop - shard_start]
            highest = int(part.max())
            if highest >= self.stamp.vocab_size:  # the model has no embedding for it
                raise DataError(
                    f"{self._folder / self._shards[number].name}: holds the id {highest} at or "
                    f"after token {start:,}, and {INDEX} says vocab_size = "
                    f"{self.stamp.vocab_size}; {RESTORE}"
                )
            parts.append(part)
            start, number = part_stop, number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _map(self, number: int) -> tuple[FileIO, TokenArray, tuple[int, int]]:
        """Return the file of a shard, its tokens, and the version of the file."""
        shard = self._shards[number]
        file = open_shard(self._folder, shard, self.stamp)
        tokens = np.memmap(file, _file_dtype(self.stamp), "r", shape=(shard.tokens,))
        return file, tokens.view(np.ndarray), _size_and_time(file)


def _size_and_time(file: FileIO) -> tuple[int, int]:
    stat = os.fstat(file.fileno())
    return stat.st_size, stat.st_mtime_ns


def open_shards(path: str, split: str) -> TokenStore:
    """Open one split of a prepared folder; check sizes, but not checksums."""
    return TokenStore(user_path(path), path, read_index(path), split)


def verify_shards(folder: Path, index: Index) -> None:
    """Read every byte of every shard; raise a DataError for a wrong checksum."""
    listed = {shard.name for shard in index.shards}
    for path in sorted(folder.glob("*.bin")):
        if path.name not in listed:
            raise DataError(f"{path}: not listed in {INDEX} and never read; move it elsewhere")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda shard: _verify(folder, shard, index.stamp), index.shards))


def _verify(folder: Path, shard: Shard, stamp: Stamp) -> None:
    digest = hashlib.sha256()
    with open_shard(folder, shard, stamp) as file:
        while block := file.read(BUFFER_BYTES):
            digest.update(block)
    if digest.hexdigest() != shard.sha256:
        raise DataError(
            f"{folder / shard.name}: its content changed since it was written (sha256 "
            f"{digest.hexdigest()[:12]}… instead of {shard.sha256[:12]}…); {RESTORE}"
        )
