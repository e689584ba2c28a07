"""`nsa data prepare`: tokenise a source once into shards, in parallel and restartable.

    source.part(i, n) -> documents -> tokens | eos -> train-<i>-<k>.bin, val-<i>-<k>.bin
                                                      part-<i>.json: their names, and a cursor

A part writes its shards, then its state; the index comes last. After a kill at any moment, the same
command resumes from the last states and writes the same files as an uninterrupted one.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nsa.data.config import DataConfig
from nsa.data.dataset import OpenedSource, open_dataset
from nsa.data.shards import (
    FORMAT,
    INDEX,
    PLAN,
    RERUN,
    VERSION,
    Index,
    Shard,
    Stamp,
    check_version,
    open_shard,
    read_index,
    write_index,
    write_json,
    write_shard,
)
from nsa.data.source import SPLITS, DataError, Document, Reader, Skipped, State
from nsa.data.tokenizer import TokenArray, Tokenizer, build_tokenizer, id_type
from nsa.data.worker import Worker, WorkerDied

DOCUMENTS_PER_CALL = 1_000  # of the tokenizer; fewer if they have more bytes than the next
BYTES_PER_CALL = 4 << 20
# The settings that determine a folder's tokens, besides source and tokenizer.
SETTINGS = ("subset", "split", "pattern", "text_field", "held_out")
# Files of an interrupted write: .<name>.<process id>, of earlier versions .<name>.draft
DRAFT = re.compile(r"\..+\.(bin|json)\.(\d+|draft)")


def prepare(
    config: DataConfig,
    out: Path,
    *,
    shard_tokens: int = 100_000_000,
    workers: int | None = None,
    progress: bool = True,
) -> Index:
    """Write the source's tokens into the folder `out`; continue a folder that is unfinished."""
    config.validate()
    tokenizer = build_tokenizer(config)
    stamp = _stamp(config, tokenizer)
    settings = {name: getattr(config, name) for name in SETTINGS} | {"shard_tokens": shard_tokens}
    dataset = None if (out / INDEX).exists() else open_dataset(config)
    if dataset is not None:
        (source,) = dataset.sources
        if source.is_prepared:
            raise DataError(f"data.source = {stamp.source!r}: is prepared already; train on it")
        if source.division.by_position:
            settings["held_out_of_each"] = source.division.fraction
        for line in dataset.notes if progress else ():
            print(line)
    plan = {"format": FORMAT, "version": VERSION, "stamp": asdict(stamp), "settings": settings}
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        parts = _start_or_resume(out, plan | {"parts": workers or os.cpu_count() or 1})
        if dataset is not None:
            _written_shards(out, stamp, parts)  # check those of a stopped run
            job = _Job(source, tokenizer, stamp, out, shard_tokens, parts)
            try:
                _run_parts(job, progress)
                shards = _written_shards(out, stamp, parts)
                if not shards:
                    text = f"data.source = {stamp.source!r} holds no documents"
                    raise DataError("; ".join([text, *skipped(out, stamp.source, parts)]))
            except DataError:
                if not any(out.glob("*.bin")):  # nothing written: the settings may change
                    for path in (*out.glob("part-*.json"), out / PLAN):
                        path.unlink()
                raise
            write_index(out, Index(stamp, settings, parts, shards))
        return read_index(out)


def _stamp(config: DataConfig, tokenizer: Tokenizer) -> Stamp:
    if isinstance(config.source, dict):
        raise DataError(
            f"data.source = {config.source!r}: prepare each source of a mixture into a separate "
            "folder, and mix the folders"
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
def _locked(out: Path) -> Iterator[None]:
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when this process ends
        yield
    except BlockingIOError:
        raise DataError(f"{out}: another `nsa data prepare` is writing into it") from None
    finally:
        os.close(handle)


def _start_or_resume(out: Path, plan: dict[str, Any]) -> int:
    """Write the plan, or check it against a stopped run's; return the number of parts."""
    path = out / PLAN
    if not path.exists():
        others = [entry.name for entry in out.iterdir() if not DRAFT.fullmatch(entry.name)]
        if others:
            raise DataError(f"--out {out}: it already holds {others[0]!r}; name a new folder")
        write_json(path, plan)
    saved = json.loads(path.read_text())
    check_version(path, saved["version"])
    for section in ("stamp", "settings"):
        for name, value in plan[section].items():
            before = saved[section].get(name)
            if before == value or name == "tokenizer":  # its fingerprint decides
                continue
            now = f"not {value!r}"
            if name == "tokenizer_fingerprint":
                before, tokenizer = (tree["stamp"]["tokenizer"] for tree in (saved, plan))
                now = "which has changed" if before == tokenizer else f"not {tokenizer!r}"
                name = "tokenizer"
            raise DataError(
                f"{out} was started with {name} = {before!r}, {now}; name another --out, or delete "
                "this folder"
            )
    return saved["parts"]


def _written_shards(out: Path, stamp: Stamp, parts: int) -> list[Shard]:
    """Return the shards written so far, ordered by split and part; check their headers."""
    shards = [Shard(**shard) for part in range(parts) for shard in _state(out, part)["shards"]]
    for shard in shards:
        open_shard(out, shard, stamp).close()
    return sorted(shards, key=lambda shard: (SPLITS.index(shard.split), shard.name))


def _state_path(out: Path, part: int) -> Path:
    return out / f"part-{part:03}.json"


def _state(out: Path, part: int) -> State:
    path = _state_path(out, part)
    if path.exists():
        return json.loads(path.read_text())
    return {"shards": [], "reader": None, "text_bytes": 0, "done": False}


def skipped(out: Path, source: str, parts: int) -> list[str]:
    """Return a line that counts what all launches skipped by data.on_error."""
    total = Skipped()
    for part in range(parts):
        total = total.plus(Skipped(*_state(out, part).get("skipped", ())))
    return total.note(source)


@dataclass(frozen=True)
class _Job:
    """The arguments of every worker process."""

    source: OpenedSource
    tokenizer: Tokenizer
    stamp: Stamp
    out: Path
    shard_tokens: int
    parts: int


def _run_parts(job: _Job, progress: bool) -> None:
    """Run a worker for each unfinished part until all end or one fails."""
    states = [_state(job.out, part) for part in range(job.parts)]
    bar = tqdm(
        total=job.source.documents.size() if progress else None,
        initial=sum(state["text_bytes"] for state in states),
        unit="B",
        unit_scale=True,
        desc=f"{job.out}",
        mininterval=0.1 if sys.stderr.isatty() else 30.0,
        disable=not progress,
    )
    workers = [
        Worker(partial(_write_part, job, part), f"{job.out}, part {part}")
        for part, state in enumerate(states)
        if not state["done"]
    ]

    def follow(worker: Worker) -> None:
        for size in worker:
            bar.update(size)

    try:
        with ThreadPoolExecutor(max(1, len(workers))) as pool:
            try:
                for done in as_completed([pool.submit(follow, worker) for worker in workers]):
                    done.result()
            finally:  # ends the threads that wait for a worker
                for worker in workers:
                    worker.close()
    except WorkerDied as error:
        raise DataError(f"{error}; {RERUN}: it resumes where it stopped") from None
    finally:
        bar.close()
        for path in job.out.iterdir():
            if DRAFT.fullmatch(path.name):
                path.unlink()


def _write_part(job: _Job, part: int, on_document: Callable[[str, str], None]) -> Iterator[int]:
    """Write the shards of one part; yield the bytes of text that were tokenised."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if job.parts > 1 else "true"
    state = _state(job.out, part)
    earlier = Skipped(*state.get("skipped", ()))
    try:
        reader = job.source.documents.part(part, job.parts).read(state["reader"])
        while not state["done"]:
            pending: dict[str, list[TokenArray]] = {split: [] for split in SPLITS}
            text_bytes: Counter[str] = Counter()  # of each split
            state["done"] = yield from _tokenise(job, reader, pending, text_bytes)
            for split, documents in pending.items():
                if documents:
                    number = sum(shard["split"] == split for shard in state["shards"])
                    name = f"{split}-{part:03}-{number:05}.bin"
                    shard = write_shard(
                        job.out, name, split, job.stamp, documents, text_bytes[split]
                    )
                    state["shards"].append(asdict(shard))
                    state["text_bytes"] += shard.text_bytes
            state["reader"] = reader.state()
            state["skipped"] = earlier.plus(reader.skipped)
            write_json(_state_path(job.out, part), state)
    except OSError as error:
        raise DataError(str(error)) from error


def _tokenise(
    job: _Job, reader: Reader, pending: dict[str, list[TokenArray]], text_bytes: Counter[str]
) -> Generator[int, None, bool]:
    """Tokenise until a shard of one split is full; return whether the documents ended."""
    call_bytes = min(BYTES_PER_CALL, job.shard_tokens)  # a shard overshoots by less than this
    tokens: Counter[str] = Counter()
    while documents := _next_documents(reader, call_bytes):
        pieces = [
            (split, text)
            for document in documents
            for split in SPLITS
            if (text := job.source.division.text_for(document.text, split))
        ]
        encoded = job.tokenizer.encode_documents([text for _, text in pieces])
        for (split, text), ids in zip(pieces, encoded, strict=True):
            pending[split].append(ids)
            tokens[split] += len(ids)
            text_bytes[split] += len(text)
        yield sum(len(document.text) for document in documents)
        if max(tokens.values()) >= job.shard_tokens:
            return False
    return True


def _next_documents(reader: Reader, size: int) -> list[Document]:
    """Return up to DOCUMENTS_PER_CALL documents, until they have `size` bytes; [] at the end."""
    documents: list[Document] = []
    for document in reader:
        documents.append(document)
        size -= len(document.text)
        if size <= 0 or len(documents) == DOCUMENTS_PER_CALL:
            break
    return documents
