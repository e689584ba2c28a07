"""A source, tokenised once and written as shards: in parallel, and restartable.

    source.part(i, n) -> documents -> tokens | eos -> train-<i>-<k>.bin, val-<i>-<k>.bin
                                                      part-<i>.json: these, and where to go on

A part writes its shards, then its state; the index comes last. So whenever all of it is killed, the
same command goes on behind the last state, and writes what an undisturbed one would have written.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nsa.data.config import DataConfig
from nsa.data.factory import open_source
from nsa.data.shards import (
    AGAIN,
    DRAFT,
    FORMAT,
    INDEX,
    PLAN,
    VERSION,
    Index,
    Shard,
    Stamp,
    check_shard,
    newer,
    read_index,
    write_index,
    write_json,
    write_shard,
)
from nsa.data.source import SPLITS, DataError, Document, Reader, State, held_out
from nsa.data.tokenizer import TokenArray, Tokenizer, build_tokenizer, id_type, with_eos

DOCUMENTS_AT_ONCE = 1_000  # that are tokenised together, ...
BYTES_AT_ONCE = 4 << 20  # ... or fewer, where they are long
# What decides, beside source and tokenizer, which tokens a folder holds.
SETTINGS = ("subset", "split", "files", "text_field", "held_out", "synthetic_bytes")


@dataclass
class Written:
    """What is gathered for the next shard of one split."""

    documents: list[TokenArray] = field(default_factory=list)
    tokens: int = 0
    text_bytes: int = 0


def prepare(
    config: DataConfig,
    out: Path,
    *,
    shard_tokens: int = 100_000_000,
    workers: int | None = None,
    progress: bool = True,
) -> Index:
    """Write the source's tokens into the folder `out`, or go on with that where it was stopped."""
    config.validate()
    for name, number in (("--shard-tokens", shard_tokens), ("--workers", workers)):
        if number is not None and number < 1:
            raise DataError(f"{name} {number}: must be 1 or more")
    tokenizer = build_tokenizer(config)
    stamp = _stamp(config, tokenizer)
    settings = {name: getattr(config, name) for name in SETTINGS} | {"shard_tokens": shard_tokens}
    plan = {"format": FORMAT, "version": VERSION, "stamp": asdict(stamp), "settings": settings}
    source = None if (out / INDEX).exists() else open_source(config, stamp.source)
    out.mkdir(parents=True, exist_ok=True)
    with _alone_in(out):
        parts = _begin(out, plan | {"parts": workers or os.cpu_count() or 1})
        if source is not None:
            _shards(out, stamp, parts)  # those of a run that was stopped are still there
            work = _Work(config, tokenizer, stamp, out, shard_tokens, parts)
            try:
                _run_parts(work, source.size() if progress else None, progress)
            except DataError:
                if not any(out.glob("part-*.json")):
                    (out / PLAN).unlink()  # nothing was written: another try may ask for another
                raise
            shards = _shards(out, stamp, parts)
            if not shards:
                _forget(out, parts)
                raise DataError(f"data.source = {stamp.source!r} holds no documents")
            write_index(out, Index(stamp, settings, parts, shards))
        return read_index(out)


def _stamp(config: DataConfig, tokenizer: Tokenizer) -> Stamp:
    if isinstance(config.source, dict):
        raise DataError(
            f"data.source = {config.source!r}: prepare each source of a mixture into a folder of "
            "its own, and mix the folders"
        )
    return Stamp(
        source=config.source,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=np.dtype(id_type(tokenizer.vocab_size)).name,
    )


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with this process
        yield
    except BlockingIOError:
        raise DataError(f"{out}: another `nsa data prepare` is writing into it") from None
    finally:
        os.close(handle)


def _begin(out: Path, plan: dict[str, Any]) -> int:
    """In how many parts the work is done: those it was begun with, if it was."""
    path = out / PLAN
    if not path.exists():
        others = [found.name for found in out.iterdir() if not found.name.endswith(DRAFT)]
        if others:
            raise DataError(f"--out {out}: there is {others[0]!r} in it already; name a new folder")
        write_json(path, plan)
    begun = json.loads(path.read_text())
    if begun["version"] > VERSION:
        raise DataError(f"{path} was {newer(begun['version'])}")
    for what in ("stamp", "settings"):
        for name, value in plan[what].items():
            was = begun[what].get(name)
            if was != value and name != "tokenizer":  # its fingerprint tells it better
                raise DataError(
                    f"{out} was begun with {name} = {was!r}, not {value!r}; name another --out, "
                    "or delete this folder"
                )
    return begun["parts"]


def _shards(out: Path, stamp: Stamp, parts: int) -> list[Shard]:
    """What all parts have written so far, split by split, part by part."""
    shards = [Shard(**found) for part in range(parts) for found in _state(out, part)["shards"]]
    for shard in shards:
        check_shard(out, shard, stamp).close()
    return sorted(shards, key=lambda shard: (SPLITS.index(shard.split), shard.name))


def _forget(out: Path, parts: int) -> None:
    for path in (*(_state_path(out, part) for part in range(parts)), out / PLAN):
        path.unlink()


def _state_path(out: Path, part: int) -> Path:
    return out / f"part-{part:03}.json"


def _state(out: Path, part: int) -> State:
    path = _state_path(out, part)
    if path.exists():
        return json.loads(path.read_text())
    return {"shards": [], "reader": None, "text_bytes": 0, "done": False}


@dataclass(frozen=True)
class _Work:
    """What each process has to know."""

    config: DataConfig
    tokenizer: Tokenizer
    stamp: Stamp
    out: Path
    shard_tokens: int
    parts: int


def _run_parts(work: _Work, size: int | None, progress: bool) -> None:
    """A process for each part that is not done, until all are, or one fails."""
    states = [_state(work.out, part) for part in range(work.parts)]
    context = multiprocessing.get_context("spawn")  # a fork would copy locks of threads
    processes: dict[Connection, tuple[int, BaseProcess]] = {}
    bar = tqdm(
        total=size,
        initial=sum(state["text_bytes"] for state in states),
        unit="B",
        unit_scale=True,
        desc=f"{work.out}",
        mininterval=0.1 if sys.stderr.isatty() else 30.0,
        disable=not progress,
    )
    try:
        for part in (part for part, state in enumerate(states) if not state["done"]):
            ours, theirs = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(
                target=_run_part, args=(work, part, theirs), daemon=True
            )
            with _no_interrupts():
                process.start()
            theirs.close()
            processes[ours] = (part, process)
        while processes:
            for ready in connection.wait(list(processes)):
                assert isinstance(ready, Connection)
                if _heard(ready, *processes[ready], bar):
                    del processes[ready]
    finally:
        bar.close()
        for _, process in processes.values():
            process.terminate()
            process.join()
        for draft in work.out.glob(f".*{DRAFT}"):
            draft.unlink()


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """What is started here never sees Ctrl-C: whoever started it does, and ends it."""
    resource_tracker.ensure_running()  # it is started with the first process, and unblocks Ctrl-C
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _heard(ready: Connection, part: int, process: BaseProcess, bar: tqdm) -> bool:
    """Whether a part has ended, by what its process says; raises where it failed."""
    try:
        kind, said = ready.recv()
    except (EOFError, OSError):  # the latter where it died in the middle of a word
        process.join()
        if process.exitcode == 0:
            return True
        raise DataError(
            f"the worker of part {part} died with exit code {process.exitcode}"
            f"{' (killed: out of memory?)' if process.exitcode == -signal.SIGKILL else ''}; "
            f"{AGAIN}: it goes on where it stopped"
        ) from None
    if kind == "bytes":
        bar.update(said)
        return False
    raise (DataError if kind == "refused" else RuntimeError)(said)


def _run_part(work: _Work, part: int, said: Connection) -> None:
    """A worker's whole life; it ends with the process that started it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if work.parts > 1 else "true"
    try:
        _write_part(work, part, said)
    except BrokenPipeError:
        os._exit(1)  # nobody listens any more
    except (ValueError, OSError) as error:
        said.send(("refused", str(error)))
    except Exception:
        said.send(("failed", f"part {part} failed:\n{traceback.format_exc()}"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write_part(work: _Work, part: int, said: Connection) -> None:
    state = _state(work.out, part)
    source = open_source(work.config, work.stamp.source).part(part, work.parts)
    reader = source.read(state["reader"])
    while not state["done"]:
        gathered, done = _gather(work, reader, said)
        for split in SPLITS:
            if gathered[split].documents:
                number = sum(shard["split"] == split for shard in state["shards"])
                name = f"{split}-{part:03}-{number:05}.bin"
                found = gathered[split]
                shard = write_shard(
                    work.out, name, split, work.stamp, found.documents, found.text_bytes
                )
                state["shards"].append(asdict(shard))
                state["text_bytes"] += shard.text_bytes
        state |= {"reader": reader.state(), "done": done}
        write_json(_state_path(work.out, part), state)


def _gather(work: _Work, reader: Reader, said: Connection) -> tuple[dict[str, Written], bool]:
    """Tokens until a shard of one split is full, and whether the part's documents have ended."""
    gathered = {split: Written() for split in SPLITS}
    room = min(BYTES_AT_ONCE, work.shard_tokens)  # a shard grows by this much at a time
    while documents := _next_documents(reader, room):
        texts = [document.text for document in documents]
        for text, ids in zip(texts, work.tokenizer.encode_many(texts), strict=True):
            written = gathered["val" if held_out(text, work.config.held_out) else "train"]
            written.documents.append(with_eos(work.tokenizer, ids))
            written.tokens += len(ids) + 1
            written.text_bytes += len(text)
        said.send(("bytes", sum(map(len, texts))))
        if max(written.tokens for written in gathered.values()) >= work.shard_tokens:
            return gathered, False
    return gathered, True


def _next_documents(reader: Reader, room: int) -> list[Document]:
    """A few documents, of `room` bytes together; none where the reader is at its end."""
    documents: list[Document] = []
    for document in reader:
        documents.append(document)
        room -= len(document.text)
        if room <= 0 or len(documents) == DOCUMENTS_AT_ONCE:
            break
    return documents
