"""Token cache: shards of sources that are not prepared, written by a background process.

    run 1  --starts-->  writer  -->  data-cache/<source>-<key>/train-000-00000.bin, ...
    run 1, run 2, their ranks   <--  memory-mapped, as soon as a shard is complete

A process that lacks tokens starts the writer unless one is running. The writer writes as many
tokens as its run needs. Positions in the tokens never depend on how many of them are written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nsa.data.batches import Samples, block_of
from nsa.data.config import DataConfig
from nsa.data.dataset import Dataset, OpenedSource
from nsa.data.order import hash64
from nsa.data.shards import INDEX, PLAN, Index, ShardStore, find_index, open_shards, read_index
from nsa.data.source import DataError
from nsa.data.token_store import TokenStore
from nsa.data.tokenizer import Tokenizer, build_tokenizer
from nsa.data.worker import Worker
from nsa.data.writer import LOCK, Job, lock, no_documents, plan_of, start_writer
from nsa.system import in_background
from nsa.text import printable
from nsa.untrusted import read_text

POLL_SECONDS = 0.05
PREPARE = "write shards with `nsa data prepare` and name their folder in data.source"
CACHE = "data-cache"  # beside a run's folder


def cache_folder(config: DataConfig, run_dir: Path) -> Path:
    """Return the folder of the tokens that this run shares with others."""
    return run_dir.parent / CACHE if config.cache is None else Path(config.cache)


class TokenCache:
    """The tokens of a dataset: its prepared folders, and a cache of the other sources."""

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        self.config, self._folder = dataset.config, folder
        config = dataset.config
        self._sources = [
            PreparedSource(source.name)
            if source.is_prepared
            else CachedSource(source, build_tokenizer(config), folder)
            for source in dataset.sources
        ]
        self.stamps = [source.stamp for source in self._sources]
        first = self.stamps[0]
        for source, stamp in zip(dataset.sources, self.stamps, strict=True):
            if stamp.tokenizer_fingerprint != first.tokenizer_fingerprint:
                tokenizers = (
                    f"{x.tokenizer} {x.tokenizer_fingerprint[:8]}" for x in (first, stamp)
                )
                raise DataError(
                    f"data.source: {dataset.sources[0].name} and {source.name} have different "
                    f"tokenizers ({', '.join(tokenizers)}); set data.tokenizer to a prepared "
                    "one's, or prepare them again with one tokenizer"
                )

    def start(self, samples: Mapping[str, int]) -> None:
        """Start the writers, which write the tokens of this many samples of each split."""
        fractions = self.config.sources().values()
        for source, fraction in zip(self._sources, fractions, strict=True):
            for split, count in samples.items():
                last = math.ceil(count * fraction)
                source.need(split, block_of(last).stop * self.config.seq_len + 1)
            source.start()

    def stores(self, split: str) -> list[TokenStore]:
        """Return a split of each source, as soon as it has tokens."""
        return [source.store(split) for source in self._sources]

    def open_samples(self, split: str, seed: int) -> Samples:
        """Return the samples of a split, as soon as each source has one."""
        config = self.config
        return Samples(
            self.stores(split),
            fractions=list(config.sources().values()),
            seq_len=config.seq_len,
            seed=seed,
            packing=config.packing,
        )

    def close(self) -> None:
        """End the writers; remove the folder if they wrote nothing."""
        for source in self._sources:
            source.close()
        with suppress(OSError):
            self._folder.rmdir()


class PreparedSource:
    """A source that needs no writer."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.stamp = read_index(Path(name).expanduser()).stamp

    def store(self, split: str) -> TokenStore:
        """Return a split, as soon as it has tokens."""
        return open_shards(self._name, split)

    def need(self, split: str, tokens: int) -> None:
        """Let the next writer write this many tokens of a split, unless it writes all anyway."""

    def start(self) -> None:
        """Start a writer if tokens are missing and no process writes them."""

    def close(self) -> None:
        """End the writer."""


class CachedSource(PreparedSource):
    """A source whose tokens a process writes in the background, and the folder of its shards."""

    def __init__(self, source: OpenedSource, tokenizer: Tokenizer, root: Path) -> None:
        plan = plan_of(source, tokenizer)
        settings = {**asdict(plan.stamp), **plan.settings, "tokenizer": None}
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        slug = re.sub(r"[^\w.-]+", "_", source.name.rstrip("/").rpartition("/")[2])[:40]
        self.name, self.size = source.name, source.size
        self.key, self.folder = key, root / f"{slug}-{key}"
        self.stamp = plan.stamp
        self._needs: dict[str, int] = {}  # {}: the whole source
        self._job = Job(source, tokenizer, self.folder, plan, self._needs)
        self._index, self._seen = plan, list[Any]()
        self._writer: Worker | None = None
        self._ended: Future[object] | None = None  # of the writer

    def need(self, split: str, tokens: int) -> None:
        if not self._job.source.is_small:
            self._needs[split] = max(tokens, self._needs.get(split, 0))

    def start(self) -> None:
        if self._job.is_enough(self._refresh()) or (locked := lock(self.folder)) is None:
            return
        self._writer = start_writer(self._job, locked)
        self._ended = in_background(partial(deque, self._writer, 0))

    def store(self, split: str) -> TokenStore:
        # A small source is complete first, and then shuffled like a prepared one.
        small = self._job.source.is_small
        index = self.wait_for(split, math.inf if small else 1)
        if not index.of(split):
            raise no_documents(self.name, index, split)
        if not small:
            return GrowingStore(self, index, split)
        store = ShardStore(self.folder, self.name, index, split)
        tokens = store.read(0, len(store)).astype(np.uint32)
        store.fingerprint = hashlib.sha256(tokens.tobytes()).hexdigest()
        return store

    def wait_for(self, split: str, tokens: float) -> Index:
        """Return the index once a split has `tokens` tokens or is complete.

        Raise the writer's error, or one if no document is read for data.timeout seconds.
        """
        config = self._job.source.config
        if math.isfinite(tokens):
            self.need(split, int(tokens))
        location, since = None, time.monotonic()
        while not ((index := self._refresh()).finished or index.tokens(split) >= tokens):
            if self._ended is not None and self._ended.done():
                self._ended.result()
                self.close()
            if self._ended is None:
                self.start()
            newest = self._location()
            if newest != location:
                location, since = newest, time.monotonic()
            elif time.monotonic() - since > config.timeout:
                raise DataError(
                    f"data.source = {self.name!r}: no document for {config.timeout:g} seconds "
                    f"(data.timeout); the last one read was {newest or 'none yet'}. Raise "
                    f"data.timeout, or {PREPARE}"
                )
            time.sleep(POLL_SECONDS)
        if index.skipped.number and config.on_error == "stop":
            raise DataError(f"{index.skipped.first}, or set data.on_error=skip")
        return index

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = self._ended = None

    def _refresh(self) -> Index:
        """Read the index again if it changed."""
        seen = [_status(self.folder / name) for name in (INDEX, PLAN)]
        if seen != self._seen:
            self._index, self._seen = find_index(self.folder) or self._job.plan, seen
        return self._index

    def _location(self) -> str:
        with suppress(OSError, ValueError):
            return printable(read_text(self.folder / LOCK, "replace"))
        return ""


def _status(path: Path) -> tuple[int, int, int] | None:
    with suppress(FileNotFoundError):
        status = os.stat(path)
        return status.st_ino, status.st_mtime_ns, status.st_size
    return None


class GrowingStore(ShardStore):
    """One split of a source that is still read.

    It takes no more shards than are needed, so its size does not depend on when it is read.
    """

    def __init__(self, source: CachedSource, index: Index, split: str) -> None:
        super().__init__(source.folder, source.name, index, split, tokens=1)
        revision = (index.cursor or {}).get("revision")  # of a dataset of the hub
        self.grows, self.size = True, source.size
        self._source, self._split = source, split
        self.fingerprint = f"{hash64('growing', source.key, str(revision)):016x}"
        self._is_complete = False

    def wait_for(self, tokens: int) -> int:
        if tokens > len(self) and not self._is_complete:
            index = self._source.wait_for(self._split, tokens)
            self.extend(index, tokens)
            self._is_complete = index.finished and len(self) == index.tokens(self._split)
        return len(self)
