"""Tokens on disk: files that are mapped into memory, and the index that lists them.

    | header, 4,096 bytes | tokens, uint16 or uint32 | padding to 8 bytes | ends, int64 |

Header: magic, version, length of the JSON that follows. Ends: behind which token each document is
over. Everything is little-endian.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from nsa.data.source import DataError
from nsa.data.token_store import TokenStore
from nsa.data.tokenizer import TokenArray

MAGIC = b"NSASHARD"
VERSION = 1
HEADER = 4_096
FIXED = struct.Struct("<8sII")  # magic, version, length of the JSON
FORMAT = "nsa shards"
INDEX = "index.json"
PLAN = "prepare.json"  # what an unfinished folder was begun with
READ_AT_ONCE = 1 << 22
DRAFT = ".draft"  # behind the name of a file that is being written
AGAIN = "run the same `nsa data prepare` again"


@dataclass(frozen=True)
class Stamp:
    """What all shards of a folder have in common."""

    source: str
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    eos_id: int
    dtype: str  # "uint16" or "uint32"


@dataclass(frozen=True)
class Shard:
    """One file of one split; `sha256` is of all that follows the header."""

    name: str
    split: str
    tokens: int
    documents: int
    text_bytes: int
    sha256: str

    def bytes(self, dtype: str) -> int:
        """The size that the file has to have."""
        return _ends_at(self.tokens, dtype) + 8 * self.documents


def _ends_at(tokens: int, dtype: str) -> int:
    return HEADER + -(-tokens * np.dtype(dtype).itemsize // 8) * 8


@dataclass(frozen=True)
class Index:
    """A finished folder, as `index.json` lists it."""

    stamp: Stamp
    settings: dict[str, Any]  # what else decides what is in it
    parts: int  # shares of the source that were read side by side
    shards: list[Shard]

    def of(self, split: str) -> list[Shard]:
        """The shards of one split, in their order."""
        return [shard for shard in self.shards if shard.split == split]


def write_file(path: Path, pieces: Iterable[Any]) -> None:
    """Write a file whole or not at all: under another name, to the disk, then in its place."""
    draft = path.with_name(f".{path.name}{DRAFT}")
    views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    try:
        with draft.open("wb") as file:
            for view in views:
                file.write(view)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = sum(view.nbytes for view in views)
            free = shutil.disk_usage(path.parent).free
            raise DataError(
                f"{path.parent}: the disk is full: {path.name} takes {needed:,} bytes and "
                f"{free:,} are free; free some space and {AGAIN}: it goes on where it stopped"
            ) from None
        raise


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON whole or not at all."""
    write_file(path, [(json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()])


def write_shard(
    folder: Path,
    name: str,
    split: str,
    stamp: Stamp,
    documents: Sequence[TokenArray],
    text_bytes: int,
) -> Shard:
    """Write documents, each with the end of text as its last token, as one shard."""
    little = np.dtype(stamp.dtype).newbyteorder("<")
    tokens = np.concatenate(documents).astype(little, copy=False)
    ends = np.cumsum([len(document) for document in documents]).astype("<i8")
    padding = bytes(_ends_at(len(tokens), stamp.dtype) - HEADER - tokens.nbytes)
    payload = (tokens.data, padding, ends.data)
    digest = hashlib.sha256()
    for piece in payload:
        digest.update(piece)
    shard = Shard(name, split, len(tokens), len(documents), text_bytes, digest.hexdigest())
    write_file(folder / name, (_header(shard, stamp), *payload))
    return shard


def _header(shard: Shard, stamp: Stamp) -> bytes:
    text = json.dumps(_described(shard, stamp), ensure_ascii=False).encode()
    if FIXED.size + len(text) > HEADER:
        raise DataError(
            f"{shard.name}: a shard's header has no room for the names of its source and "
            f"tokenizer ({len(text):,} bytes); give them shorter paths"
        )
    return (FIXED.pack(MAGIC, VERSION, len(text)) + text).ljust(HEADER, b"\0")


def _described(shard: Shard, stamp: Stamp) -> dict[str, Any]:
    described = {**asdict(stamp), **asdict(shard)}
    del described["name"]  # a file may be moved
    return described


def check_shard(folder: Path, shard: Shard, stamp: Stamp) -> BinaryIO:
    """The shard's file, opened, if its size and header are those of the index; at once."""
    path = folder / shard.name
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        raise DataError(
            f"{path}: this shard is gone; put it back, or prepare the folder anew"
        ) from None
    try:
        _check_header(path, file.read(HEADER), shard, stamp)
        size, wanted = os.fstat(file.fileno()).st_size, shard.bytes(stamp.dtype)
        if size != wanted:
            raise DataError(
                f"{path}: {'cut off' if size < wanted else 'too long'}: {size:,} bytes instead of "
                f"{wanted:,}; put the whole shard back, or prepare the folder anew"
            )
    except BaseException:
        file.close()
        raise
    return file


def _check_header(path: Path, header: bytes, shard: Shard, stamp: Stamp) -> None:
    if len(header) < HEADER:
        raise DataError(
            f"{path}: cut off: {len(header):,} bytes are less than a header; put the whole shard "
            "back, or prepare the folder anew"
        )
    magic, version, length = FIXED.unpack_from(header)
    if magic != MAGIC:
        raise DataError(
            f"{path} is no shard that `nsa data prepare` wrote (it begins with {magic!r}); put "
            "the right file back"
        )
    if version > VERSION:
        raise DataError(f"{path} was {newer(version)}")
    try:
        found = json.loads(header[FIXED.size : FIXED.size + length])
    except ValueError:
        found = {}
    for what, value in _described(shard, stamp).items():
        if found.get(what) != value:
            raise DataError(
                f"{path} is not the shard that {INDEX} lists: its {what} is {found.get(what)!r} "
                f"instead of {value!r}; put the right file back, or prepare the folder anew"
            )


def newer(version: int) -> str:
    """How the refusal of what a later version wrote goes on."""
    return f"written by a newer nsa (format {version}, this one reads {VERSION}); update this one"


def is_prepared(path: str) -> bool:
    """Whether `nsa data prepare` wrote this folder, finished or not."""
    return any(_is_ours(Path(path).expanduser() / name) for name in (INDEX, PLAN))


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return FORMAT.encode() in file.read(64)  # others, too, call their files index.json
    except OSError:
        return False


def read_index(folder: Path) -> Index:
    """What is in a folder that is finished."""
    path = folder / INDEX
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        if _is_ours(folder / PLAN):
            raise DataError(
                f"{folder} is unfinished: {AGAIN}; it goes on where it stopped"
            ) from None
        raise DataError(f"{folder} is no folder that `nsa data prepare` wrote") from None
    try:
        found = json.loads(content)
        if found["format"] == FORMAT and found["version"] > VERSION:
            raise DataError(f"{path} was {newer(found['version'])}")
        shards = [Shard(**shard) for shard in found["shards"]]
        return Index(Stamp(**found["stamp"]), found["settings"], found["parts"], shards)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is damaged ({error!r}); prepare the folder anew") from None


def write_index(folder: Path, index: Index) -> None:
    """Make a folder a finished one."""
    write_json(folder / INDEX, {"format": FORMAT, "version": VERSION, **asdict(index)})


class ShardStore(TokenStore):
    """One split of a prepared folder, mapped into memory.

    A shard that is replaced by another file stays as it was, for it is mapped; one whose own file
    is written to or cut is refused when it is next read, where the system would end the process.
    """

    def __init__(self, folder: Path, name: str, index: Index, split: str) -> None:
        shards = index.of(split)
        stamp = index.stamp
        self._files: list[BinaryIO] = []
        self._paths = [folder / shard.name for shard in shards]
        pieces: list[TokenArray] = []
        little = np.dtype(stamp.dtype).newbyteorder("<")
        for shard in shards:
            file = check_shard(folder, shard, stamp)
            self._files.append(file)
            mapped = np.memmap(file, little, "r", offset=HEADER, shape=(shard.tokens,))
            pieces.append(mapped.view(np.ndarray))
        self._found = [self._stand(number) for number in range(len(shards))]
        digest = hashlib.sha256("/".join(shard.sha256 for shard in shards).encode())
        super().__init__(
            pieces,
            stamp.eos_id,
            sum(shard.text_bytes for shard in shards) / sum(shard.tokens for shard in shards),
            name=name,
            fingerprint=digest.hexdigest(),
            vocab_size=stamp.vocab_size,
            tokenizer=stamp.tokenizer_fingerprint,
            tokenizer_name=stamp.tokenizer,
        )

    def _piece(self, number: int) -> TokenArray:
        if self._stand(number) != self._found[number]:
            raise DataError(
                f"{self._paths[number]}: overwritten or cut while in use; put it back as it was, "
                "and replace shards by moving whole files into their place"
            )
        return super()._piece(number)

    def _stand(self, number: int) -> tuple[int, int]:
        stat = os.fstat(self._files[number].fileno())
        return stat.st_size, stat.st_mtime_ns


def open_shards(path: str, split: str) -> TokenStore:
    """One split of a prepared folder, at once: sizes and headers are checked, not checksums."""
    folder = Path(path).expanduser()
    index = read_index(folder)
    if not index.of(split):
        raise DataError(
            f"data.source = {path!r} has no document for split {split!r}: it was prepared with "
            f"data.held_out = {index.settings['held_out']}; prepare it anew with another "
            "--held-out, or take a larger source"
        )
    return ShardStore(folder, path, index, split)


def verify_shards(folder: Path, index: Index) -> None:
    """Read every byte of every shard, and refuse what is not as it was written."""
    listed = {shard.name for shard in index.shards}
    for path in sorted(folder.glob("*.bin")):
        if path.name not in listed:
            raise DataError(f"{path} is not listed in {INDEX} and is never read; move it elsewhere")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda shard: _verify(folder, shard, index.stamp), index.shards):
            pass


def _verify(folder: Path, shard: Shard, stamp: Stamp) -> None:
    path = folder / shard.name
    with check_shard(folder, shard, stamp) as file:
        digest = hashlib.sha256()
        while block := file.read(READ_AT_ONCE):
            digest.update(block)
        if digest.hexdigest() != shard.sha256:
            raise DataError(
                f"{path}: its bytes are not those that were written (sha256 "
                f"{digest.hexdigest()[:12]}… instead of {shard.sha256[:12]}…); put the right file "
                "back, or prepare the folder anew"
            )


def document_ends(folder: Path, shard: Shard, stamp: Stamp) -> npt.NDArray[np.int64]:
    """Behind which token of the shard each document is over."""
    with check_shard(folder, shard, stamp) as file:
        file.seek(_ends_at(shard.tokens, stamp.dtype))
        return np.fromfile(file, "<i8", shard.documents)


def longest_document(folder: Path, shard: Shard, stamp: Stamp) -> int:
    """Tokens of the shard's longest document, its end of text included."""
    return int(np.diff(document_ends(folder, shard, stamp), prepend=0).max())
