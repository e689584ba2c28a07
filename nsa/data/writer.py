"""Tokenise a source into a folder of shards, restartable: for `nsa data prepare` and the cache.

    documents  ->  tokens | eos  ->  train-000-<k>.bin, val-000-<k>.bin
                                     index.json: their names, and a cursor

A separate process writes, and holds a lock. It writes a shard before the index that lists it. So
after a kill at any moment the next process continues after the last complete shard, and the files
equal those of a process that was never interrupted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from nsa.atomic_io import no_symlink
from nsa.data.config import DataConfig
from nsa.data.dataset import DividedSource, open_dataset
from nsa.data.shards import (
    INDEX,
    RERUN,
    Index,
    Stamp,
    find_index,
    open_shard,
    read_index,
    write_index,
    write_shard,
)
from nsa.data.source import SPLITS, DataError, Document, Documents, HeldOut
from nsa.data.tokenizer import TokenArray, Tokenizer, build_tokenizer, id_type
from nsa.system import isolated_environment
from nsa.text import printable
from nsa.untrusted import read_text

DOCUMENTS_PER_CALL = 1_000  # of the tokenizer; fewer once they have BYTES_PER_CALL
BYTES_PER_CALL = 4 << 20
FIRST_SHARD, LAST_SHARD = 1 << 16, 1 << 22  # tokens of a cache's shards, which double in size
# The settings that determine a folder's tokens, besides source and tokenizer.
TOKEN_SETTINGS = ("subset", "split", "pattern", "text_field", "held_out")
LOCK = ".lock"  # its text: bytes of text read, and the location of the last document
ORPHAN_SECONDS = 3.0
REFUSED = 2  # exit code of a process that wrote its DataError


@dataclass(frozen=True)
class Job:
    """The arguments of the process that writes a folder."""

    source: DividedSource
    tokenizer: Tokenizer
    folder: Path
    plan: Index  # without shards
    # By split, the number of tokens to stop at; {}: write all of the source.
    needs: dict[str, int] = field(default_factory=dict)

    def shard_tokens(self, index: Index) -> int:
        """Return the number of tokens that fill the next shard."""
        growing = min(max(FIRST_SHARD, index.tokens("train")), LAST_SHARD)
        return int(self.plan.settings.get("shard_tokens", growing))

    def is_enough(self, index: Index) -> bool:
        if not self.needs:
            return index.finished
        reached = (index.tokens(split) >= tokens for split, tokens in self.needs.items())
        return index.finished or all(reached)


def plan_of(source: DividedSource, tokenizer: Tokenizer, shard_tokens: int | None = None) -> Index:
    """Return the index that a folder of this source starts with."""
    stamp = Stamp(
        source=source.name,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=np.dtype(id_type(tokenizer.vocab_size)).name,
    )
    settings = {name: getattr(source.config, name) for name in TOKEN_SETTINGS}
    held_out = "held_out_of_each" if source.division.by_position else "held_out"
    settings[held_out] = source.division.fraction  # may differ from data.held_out
    if shard_tokens is not None:
        settings["shard_tokens"] = shard_tokens
    if source.content:
        settings["content"] = source.content
    return Index(stamp, settings, [], finished=False)


def lock(folder: Path) -> BinaryIO | None:
    """Create and lock a folder, until the file is closed in this process and its children.

    Return None if another process has the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not in a mode for appending, in which `_with_progress` could not overwrite.
        descriptor = no_symlink(str(folder / LOCK), os.O_RDWR | os.O_CREAT)
        file = open(descriptor, "r+b", 0)  # noqa: SIM115 (returned)
    except OSError as error:
        text = f"{folder}: cannot be written or locked ({error}); name another folder"
        raise DataError(text) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def progress_of(folder: Path) -> tuple[int, str]:
    """Return the bytes of text that the folder's writer has read, and the last location."""
    with suppress(OSError, ValueError):
        size, location = read_text(folder / LOCK, "replace").partition("\n")[0].split(" ", 1)
        return int(size), printable(location)
    return 0, "none yet"


class WorkerDied(DataError):
    """A writer that was killed or crashed: no setting is wrong, a restart may succeed."""


class Writer:
    """A process that writes the shards of a job; it ends with this process.

    It is a new process, not a fork: a rank already holds a GPU, threads and connections.
    """

    def __init__(self, job: Job, locked: BinaryIO) -> None:
        """Start the process, which takes over the lock."""
        self._folder = job.folder
        self._error_file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        with locked:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from nsa.data.writer import main; main()"],
                stdin=subprocess.PIPE,
                stdout=self._error_file,
                env=isolated_environment(),
                pass_fds=[locked.fileno()],
                start_new_session=True,  # Ctrl-C is for this process
            )
            assert self._process.stdin is not None
            self._stdin = self._process.stdin
            with suppress(BrokenPipeError):  # it died, which is_running reports
                pickle.dump((job, locked.fileno()), self._stdin)
                self._stdin.flush()

    def is_running(self) -> bool:
        """Return whether it still writes; raise its error."""
        code = self._process.poll()
        if code is None:
            return True
        if code == 0:
            return False
        if code == REFUSED:
            self._error_file.seek(0)
            raise pickle.load(self._error_file)
        cause = f"ended with exit code {code}, after the error above"
        if code < 0:
            cause = f"was ended by signal {-code} ({signal.Signals(-code).name})"
        if code == -signal.SIGKILL:
            cause += ", possibly out of memory"
        raise WorkerDied(
            f"{self._folder}: its worker {cause}; {RERUN}: it resumes where it stopped"
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._error_file.close()
        with suppress(BrokenPipeError):
            self._stdin.close()


def main() -> None:
    """Write the shards of the job on standard input until it is done, or the parent ends."""
    error_file = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries that print must not write into this file
    job, lock_file = pickle.load(sys.stdin.buffer)
    Thread(target=_exit_with_parent, daemon=True).start()
    code = 0
    try:
        _write(job, lock_file)
    except DataError as error:
        pickle.dump(error, error_file)
        error_file.flush()
        code = REFUSED
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # some threads of streaming libraries abort a regular exit


def _exit_with_parent() -> None:
    os.read(0, 1)  # returns at end of file
    os._exit(1)


def _write(job: Job, lock_file: int) -> None:
    os.ftruncate(lock_file, 0)
    index = find_index(job.folder)
    if index is None or not index.shards:  # the settings may have changed
        index = job.plan
    try:
        for shard in index.shards:
            open_shard(job.folder, shard, index.stamp).close()  # raises if it is damaged
        for pattern in (".*.bin.*", f".{INDEX}.*"):  # of interrupted writes
            for draft in job.folder.glob(pattern):
                draft.unlink()
        write_index(job.folder, index)
        size = sum(shard.text_bytes for shard in index.shards)
        documents = _with_progress(job.source.documents.read(index.cursor), size, lock_file)
        while not job.is_enough(index):
            index = _write_shards(job, index, documents)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(f"{job.folder}: cannot be written ({error})") from error
        left = [tokens - index.tokens(split) for split, tokens in job.needs.items()]
        needed = sum(max(0, tokens) for tokens in left) or job.shard_tokens(index)
        token_bytes, free = np.dtype(index.stamp.dtype).itemsize, shutil.disk_usage(job.folder).free
        raise DataError(
            f"{job.folder}: the disk is full: {needed * token_bytes:,} bytes or more are needed, "
            f"and {free:,} are free; free some space and {RERUN}: it resumes where it stopped"
        ) from None


def _with_progress(documents: Documents, size: int, lock_file: int) -> Documents:
    """Yield the documents; write the progress into the lock file, for readers that wait."""
    for document, cursor in documents:
        if isinstance(document, Document):
            size += len(document.text)
            os.pwrite(lock_file, f"{size} {document.location}\n".encode(errors="replace"), 0)
        yield document, cursor


def _write_shards(job: Job, index: Index, documents: Documents) -> Index:
    """Write the next shard of each split; return the index that lists them."""
    full = job.shard_tokens(index)
    pending: dict[str, list[TokenArray]] = {split: [] for split in SPLITS}
    tokens, text_bytes = Counter[str](), Counter[str]()
    cursor, skipped = index.cursor, index.skipped
    # A shard exceeds `full` tokens by less than those of one call, which has about `full` bytes.
    while batch := next_documents(documents, min(BYTES_PER_CALL, full)):
        cursor = batch[-1][1]
        pieces = []
        for document, _ in batch:
            if isinstance(document, DataError):
                skipped = skipped.plus(document)
                continue
            for split in SPLITS:
                if part := job.source.division.text_for(document.text, split):
                    pieces.append((split, part))
        encoded = job.tokenizer.encode_documents([part for _, part in pieces])
        for (split, part), ids in zip(pieces, encoded, strict=True):
            pending[split].append(ids)
            tokens[split] += len(ids)
            text_bytes[split] += len(part)
        if max(tokens.values(), default=0) >= full:
            break
    shards = list(index.shards)
    for split, arrays in pending.items():
        if arrays:
            name = f"{split}-000-{len(index.of(split)):05}.bin"
            size = text_bytes[split]
            shards.append(write_shard(job.folder, name, split, index.stamp, arrays, size))
    index = replace(index, shards=shards, cursor=cursor, skipped=skipped, finished=not batch)
    if not shards:
        text = f"data.source = {job.source.name!r} holds no documents"
        raise DataError("; ".join([text, *skipped.note(job.source.name)]))
    write_index(job.folder, index)
    return index


def next_documents(documents: Documents, size: int) -> list[tuple[Document | DataError, Any]]:
    """Return up to DOCUMENTS_PER_CALL documents, until they have `size` bytes; [] at the end."""
    batch = []
    for document, cursor in documents:
        batch.append((document, cursor))
        size -= len(document.text) if isinstance(document, Document) else 0
        if size <= 0 or len(batch) == DOCUMENTS_PER_CALL:
            break
    return batch


def check_same(folder: Path, index: Index, plan: Index) -> None:
    """Raise a DataError if a folder was started with other settings."""
    before, now = ({**asdict(one.stamp), **one.settings} for one in (index, plan))
    if before["tokenizer_fingerprint"] == now["tokenizer_fingerprint"]:
        del now["tokenizer"]  # the same tokenizer may have another name
    for name, value in now.items():
        if before.get(name) != value:
            raise DataError(
                f"{folder} was started with {name} = {before.get(name)!r}, not {value!r}; name "
                "another --out, or delete this folder"
            )


def prepare(config: DataConfig, out: Path, *, shard_tokens: int = 100_000_000) -> Index:
    """Write the source's tokens into the folder `out`; continue a folder that is unfinished."""
    config.validate()
    if isinstance(config.source, dict):
        raise DataError(
            f"data.source = {config.source!r}: prepare each source of a mixture into a separate "
            "folder, and mix the folders"
        )
    tokenizer, index = build_tokenizer(config), find_index(out)
    if index is not None and index.finished:  # do not open its source, which may be gone
        source = DividedSource(config, config.source, HeldOut(config.held_out))
        check_same(out, index, plan_of(source, tokenizer, shard_tokens))
        return index
    dataset = open_dataset(config)
    (source,) = dataset.sources
    if source.is_prepared:
        raise DataError(f"data.source = {source.name!r}: is prepared already; train on it")
    plan = plan_of(source, tokenizer, shard_tokens)
    if index is not None and index.shards:
        check_same(out, index, plan)
    if index is None and out.is_dir():
        for path in out.iterdir():
            if not path.name.startswith("."):
                raise DataError(f"--out {out}: it already holds {path.name!r}; name a new folder")
    end = time.monotonic() + ORPHAN_SECONDS  # the writer of a killed command ends a moment later
    while (locked := lock(out)) is None:
        if time.monotonic() > end:
            raise DataError(f"{out}: another process is writing into it")
        time.sleep(0.05)
    for line in dataset.notes:
        print(line)
    bar = tqdm(
        total=source.size,
        unit="B",
        unit_scale=True,
        desc=f"{out}",
        mininterval=0.1 if sys.stderr.isatty() else 30.0,
    )
    with bar, closing(Writer(Job(source, tokenizer, out, plan), locked)) as writer:
        while writer.is_running():
            bar.update(progress_of(out)[0] - bar.n)
            time.sleep(0.05)
        bar.update(progress_of(out)[0] - bar.n)
    return read_index(out)
