"""Tokenise a source into a folder of shards, restartable: for `nsa data prepare` and the cache.

    documents  ->  tokens | eos  ->  train-000-<k>.bin, val-000-<k>.bin
                                     prepare.json: their names, and a cursor; at the end index.json

One process at a time writes, which holds a lock. Shards come before the file that lists them: after
a kill at any moment, the next process continues where the last complete shard ended, and the files
are those of an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from nsa.atomic_io import no_symlink
from nsa.data.config import DataConfig
from nsa.data.dataset import OpenedSource, open_dataset
from nsa.data.shards import (
    PLAN,
    RERUN,
    Index,
    Stamp,
    find_index,
    open_shard,
    read_index,
    write_index,
    write_shard,
)
from nsa.data.source import SPLITS, Cursor, DataError, Document, Documents, HeldOut
from nsa.data.tokenizer import TokenArray, Tokenizer, build_tokenizer, id_type
from nsa.data.worker import Worker, WorkerDied

DOCUMENTS_PER_CALL = 1_000  # of the tokenizer; fewer if they have more bytes than the next
BYTES_PER_CALL = 4 << 20
FIRST_SHARD, LAST_SHARD = 1 << 16, 1 << 22  # tokens of a cache's shards, which double in size
# The settings that determine a folder's tokens, besides source and tokenizer.
SETTINGS = ("subset", "split", "pattern", "text_field", "held_out")
LOCK = ".lock"  # its text: the location of the last document read
LOCATION_SECONDS = 0.5
ORPHAN_SECONDS = 3.0
DRAFT = re.compile(r"\..+\.(bin|json)\.\d+")  # of an interrupted write


@dataclass(frozen=True)
class Job:
    """The arguments of the process that writes a folder."""

    source: OpenedSource
    tokenizer: Tokenizer
    folder: Path
    plan: Index  # without shards
    needs: Mapping[str, int]  # tokens of each split at which it stops; {}: at the source's end

    def full_shard(self, index: Index) -> int:
        """Return the tokens of the next shard."""
        growing = min(max(FIRST_SHARD, index.tokens("train")), LAST_SHARD)
        return int(self.plan.settings.get("shard_tokens", growing))

    def is_enough(self, index: Index) -> bool:
        stops = [index.tokens(split) >= tokens for split, tokens in self.needs.items()]
        return index.finished or (bool(stops) and all(stops))


def plan_of(source: OpenedSource, tokenizer: Tokenizer, shard_tokens: int | None = None) -> Index:
    """Return the index that a folder of this source starts with."""
    stamp = Stamp(
        source=source.name,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=np.dtype(id_type(tokenizer.vocab_size)).name,
    )
    settings = {name: getattr(source.config, name) for name in SETTINGS}
    if source.division.by_position:
        settings["held_out_of_each"] = source.division.fraction
    else:
        settings["held_out"] = source.division.fraction
    if shard_tokens is not None:
        settings["shard_tokens"] = shard_tokens
    if source.content:
        settings["content"] = source.content
    return Index(stamp, settings, [], finished=False)


def lock(folder: Path) -> BinaryIO | None:
    """Create and lock a folder, until the file is closed in this process and its children.

    Return None if another process has the lock.
    """
    path = folder / LOCK
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path, "r+b", 0, opener=_open_or_create))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                stack.pop_all()
                return file
        except (BlockingIOError, FileNotFoundError):  # not found: its writer just removed it
            return None
        except OSError as error:
            text = f"{folder}: cannot be written or locked ({error}); name another folder"
            raise DataError(text) from None
    return None


def _wait_for_lock(folder: Path) -> BinaryIO | None:
    """Lock a folder; the process of a command that was just killed ends a moment after it."""
    end = time.monotonic() + ORPHAN_SECONDS
    while (locked := lock(folder)) is None and time.monotonic() < end:
        time.sleep(0.05)
    return locked


def _open_or_create(path: str, flags: int) -> int:
    return no_symlink(path, flags | os.O_CREAT)


def start_writer(job: Job, locked: BinaryIO) -> Worker:
    """Start a process that writes the shards, and yields the bytes of text that it tokenised.

    It takes over the lock.
    """
    with locked:
        number = locked.fileno()
        return Worker(partial(_write, job, number), f"{job.folder}", number)


def _write(job: Job, lock_file: int) -> Iterator[int]:
    location = ["none yet"]
    Thread(target=_report, args=(lock_file, location), daemon=True).start()
    index = find_index(job.folder) or job.plan
    check_same(job.folder, index, job.plan)
    try:
        for shard in index.shards:
            open_shard(job.folder, shard, index.stamp).close()
        remove_drafts(job.folder)
        write_index(job.folder, index)
        documents = _located(job.source.documents.read(index.cursor), location)
        while not job.is_enough(index):
            index = yield from _write_shards(job, index, documents)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(f"{job.folder}: cannot be written ({error})") from error
        raise _disk_full(job, index) from None
    finally:
        if not index.shards:  # the settings may change
            for path in (job.folder / PLAN, *job.folder.glob("*.bin")):
                path.unlink(missing_ok=True)
        if not index.shards or index.finished:
            (job.folder / LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            job.folder.rmdir()  # if it is empty


def _report(lock_file: int, location: list[str]) -> None:
    """Write the location of the last document into the lock file, for readers that wait."""
    written = ""
    while True:
        if (now := location[0]) != written:
            with contextlib.suppress(OSError):  # a full disk: the next attempt may succeed
                os.ftruncate(lock_file, os.pwrite(lock_file, now.encode(), 0))
                written = now
        time.sleep(LOCATION_SECONDS)


def _located(documents: Documents, location: list[str]) -> Documents:
    for document, cursor in documents:
        if isinstance(document, Document):
            location[0] = document.location
        yield document, cursor


def check_same(folder: Path, index: Index, plan: Index) -> None:
    """Raise a DataError if a folder was started with other settings."""
    before, now = ({**asdict(one.stamp), **one.settings} for one in (index, plan))
    for name, value in now.items():
        saved = before.get(name)
        if saved == value or name == "tokenizer":  # its fingerprint decides
            continue
        expected = f"not {value!r}"
        if name == "tokenizer_fingerprint":
            saved, tokenizer = before["tokenizer"], now["tokenizer"]
            expected = "which has changed" if saved == tokenizer else f"not {tokenizer!r}"
            name = "tokenizer"
        if name == "content":
            raise DataError(
                f"{folder}: the files of {index.stamp.source} changed since it was started; "
                "restore them, name another --out, or delete this folder"
            )
        raise DataError(
            f"{folder} was started with {name} = {saved!r}, {expected}; name another --out, or "
            "delete this folder"
        )


def remove_drafts(folder: Path, process: int | None = None) -> None:
    """Remove what interrupted writes left, of one process or of all."""
    ending = "" if process is None else f".{process}"
    for path in folder.iterdir():
        if DRAFT.fullmatch(path.name) and path.name.endswith(ending):
            path.unlink(missing_ok=True)


def _write_shards(job: Job, index: Index, documents: Documents) -> Generator[int, None, Index]:
    """Write the next shard of each split; return the index that lists them."""
    full = job.full_shard(index)
    call_bytes = min(BYTES_PER_CALL, full)  # a shard overshoots by less than this
    pending: dict[str, list[TokenArray]] = {split: [] for split in SPLITS}
    tokens, text_bytes = Counter[str](), Counter[str]()
    cursor, skipped, finished = index.cursor, index.skipped, True
    while batch := _next_documents(documents, call_bytes):
        cursor, texts = batch[-1][1], list[bytes]()
        for document, _ in batch:
            if isinstance(document, DataError):
                skipped = skipped.plus(document)
            else:
                texts.append(document.text)
        pieces = [
            (split, part)
            for text in texts
            for split in SPLITS
            if (part := job.source.division.text_for(text, split))
        ]
        encoded = job.tokenizer.encode_documents([part for _, part in pieces])
        for (split, part), ids in zip(pieces, encoded, strict=True):
            pending[split].append(ids)
            tokens[split] += len(ids)
            text_bytes[split] += len(part)
        yield sum(map(len, texts))
        if max(tokens.values(), default=0) >= full:
            finished = False
            break
    shards = list(index.shards)
    for split, written in pending.items():
        if written:
            name = f"{split}-000-{len(index.of(split)):05}.bin"
            stamp = index.stamp
            shards.append(write_shard(job.folder, name, split, stamp, written, text_bytes[split]))
    index = replace(index, shards=shards, cursor=cursor, skipped=skipped, finished=finished)
    if not shards:
        raise no_documents(job.source.name, index)
    write_index(job.folder, index)
    return index


def _next_documents(documents: Documents, size: int) -> list[tuple[Document | DataError, Cursor]]:
    """Return up to DOCUMENTS_PER_CALL documents, until they have `size` bytes; [] at the end."""
    batch = []
    for document, cursor in documents:
        batch.append((document, cursor))
        size -= len(document.text) if isinstance(document, Document) else 0
        if size <= 0 or len(batch) == DOCUMENTS_PER_CALL:
            break
    return batch


def no_documents(name: str, index: Index, split: str | None = None) -> DataError:
    """Return the error for a source, or a split of it, without documents."""
    if split is None:
        text = f"data.source = {name!r} holds no documents"
    else:
        verb, held_out = ("lower" if split == "train" else "raise"), index.settings["held_out"]
        text = f"data.source = {name!r} has no document for split {split!r}; {verb} data.held_out"
        text += f" = {held_out}, or take a larger source"
    return DataError("; ".join([text, *index.skipped.note(name)]))


def _disk_full(job: Job, index: Index) -> DataError:
    size = np.dtype(index.stamp.dtype).itemsize
    left = sum(max(0, tokens - index.tokens(split)) for split, tokens in job.needs.items())
    needed = f"the run still needs {left * size:,} bytes"
    if not job.needs:
        needed = f"the next shard takes {job.full_shard(index) * size:,} bytes"
    free = shutil.disk_usage(job.folder).free
    return DataError(
        f"{job.folder}: the disk is full: {needed} and {free:,} are free; free some space and "
        f"{RERUN}: it resumes where it stopped"
    )


def prepare(
    config: DataConfig, out: Path, *, shard_tokens: int = 100_000_000, progress: bool = True
) -> Index:
    """Write the source's tokens into the folder `out`; continue a folder that is unfinished."""
    config.validate()
    if isinstance(config.source, dict):
        raise DataError(
            f"data.source = {config.source!r}: prepare each source of a mixture into a separate "
            "folder, and mix the folders"
        )
    tokenizer, index = build_tokenizer(config), find_index(out)
    if index is not None and index.finished:  # its source may be gone
        unopened = OpenedSource(config, config.source, HeldOut(config.held_out))
        check_same(out, index, plan_of(unopened, tokenizer, shard_tokens))
        return index
    dataset = open_dataset(config)
    (source,) = dataset.sources
    if source.is_prepared:
        raise DataError(f"data.source = {source.name!r}: is prepared already; train on it")
    others = [path.name for path in out.iterdir()] if out.is_dir() and index is None else []
    if others := [name for name in others if name != LOCK and not DRAFT.fullmatch(name)]:
        raise DataError(f"--out {out}: it already holds {others[0]!r}; name a new folder")
    if (locked := _wait_for_lock(out)) is None:
        raise DataError(f"{out}: another process is writing into it")
    for line in dataset.notes if progress else ():
        print(line)
    bar = tqdm(
        total=source.size,
        initial=sum(shard.text_bytes for shard in index.shards) if index else 0,
        unit="B",
        unit_scale=True,
        desc=f"{out}",
        mininterval=0.1 if sys.stderr.isatty() else 30.0,
        disable=not progress,
    )
    job = Job(source, tokenizer, out, plan_of(source, tokenizer, shard_tokens), needs={})
    writer = start_writer(job, locked)
    try:
        with bar, closing(writer):
            for size in writer:
                bar.update(size)
    except WorkerDied as error:
        raise DataError(f"{error}; {RERUN}: it resumes where it stopped") from None
    finally:
        if out.exists():
            remove_drafts(out, writer.pid)
    return read_index(out)
