"""Token cache: shards of sources that are not prepared, written by a background process.

    run 1  --starts-->  writer  -->  data-cache/<source>-<key>/train-000-00000.bin, ...
    run 1, run 2, their ranks   <--  memory-mapped, as soon as a shard is complete

A process that lacks tokens starts the writer unless one is running. The writer writes as many
tokens as its run needs. The position of a token never depends on how many are written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch, Samples, block_of, hash64
from nsa.data.config import DataConfig
from nsa.data.dataset import Dataset, DividedSource
from nsa.data.shards import INDEX, Index, Stamp, TokenStore, find_index, open_shards, read_index
from nsa.data.source import DataError
from nsa.data.tokenizer import Tokenizer, build_tokenizer
from nsa.data.writer import Job, Writer, lock, plan_of, progress_of

POLL_SECONDS = 0.05
CACHE = "data-cache"  # beside a run's folder
VALIDATION_SEED = 0  # every run is evaluated on the same samples, whatever train.seed is


def cache_folder(config: DataConfig, run_dir: Path) -> Path:
    """Return the folder of the tokens that this run shares with others."""
    return run_dir.parent / CACHE if config.cache is None else Path(config.cache)


class TokenCache:
    """The tokens of a dataset: its prepared folders, and a cache of the other sources."""

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        self.config = config = dataset.config
        self._cached = {
            source.name: CachedSource(source, build_tokenizer(config), folder)
            for source in dataset.sources
            if not source.is_prepared
        }
        self.stamps: list[Stamp] = []
        for name in config.sources():
            cached = self._cached.get(name)
            stamp = read_index(name).stamp if cached is None else cached.stamp
            self.stamps.append(stamp)
            first = self.stamps[0]
            if stamp.tokenizer_fingerprint != first.tokenizer_fingerprint:
                raise DataError(
                    f"data.source: {dataset.sources[0].name} and {name} have different tokenizers "
                    f"({first.tokenizer} {first.tokenizer_fingerprint[:8]}, {stamp.tokenizer} "
                    f"{stamp.tokenizer_fingerprint[:8]}); set data.tokenizer to a prepared one's, "
                    "or prepare them again with one tokenizer"
                )

    def start(self, samples: Mapping[str, int]) -> None:
        """Start the writers, which write the tokens of this many samples of each split."""
        for name, source in self._cached.items():
            for split, count in samples.items():
                source_samples = math.ceil(count * self.config.sources()[name])
                # Up to the end of the next sample's shuffle block, and one more token: a label.
                source.need(split, block_of(source_samples).stop * self.config.seq_len + 1)
            source.start()

    def stores(self, split: str) -> list[TokenStore]:
        """Return a split of each source, as soon as it has tokens."""
        return [
            self._cached[name].store(split) if name in self._cached else open_shards(name, split)
            for name in self.config.sources()
        ]

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
        for source in self._cached.values():
            source.close()


class CachedSource:
    """A source whose tokens a process writes in the background, and the folder of its shards."""

    def __init__(self, source: DividedSource, tokenizer: Tokenizer, root: Path) -> None:
        plan = plan_of(source, tokenizer)
        # The stamp's fingerprint identifies the tokenizer; its name may be a path.
        settings = {**asdict(plan.stamp), **plan.settings, "tokenizer": None}
        self._key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        slug = re.sub(r"[^\w.-]+", "_", source.name.rstrip("/").rpartition("/")[2])[:40]
        self.stamp, self._folder = plan.stamp, root / f"{slug}-{self._key}"
        self._job = Job(source, tokenizer, self._folder, plan)
        self._index, self._version = plan, (0, 0)  # version: inode and mtime of the index's file
        self._writer: Writer | None = None

    def need(self, split: str, tokens: int) -> None:
        """Make the next writer write this many tokens; it writes all of a small source anyway."""
        if not self._job.source.is_small:
            self._job.needs[split] = max(tokens, self._job.needs.get(split, 0))

    def start(self) -> None:
        """Start a writer if tokens are missing and no process writes them."""
        if self._job.is_enough(self._refresh()):
            return
        if (locked := lock(self._folder)) is not None:
            self._writer = Writer(self._job, locked)

    def store(self, split: str) -> TokenStore:
        """Return a split, as soon as it has tokens."""
        source, folder = self._job.source, self._folder
        if source.is_small:
            # Wait for all of it, to shuffle it as a whole, like a prepared folder.
            store = TokenStore(folder, source.name, self._wait_for(split, math.inf), split)
            tokens = store.read(0, len(store)).astype(np.uint32)
            store.fingerprint = hashlib.sha256(tokens.tobytes()).hexdigest()
            return store
        wait = partial(self._wait_for, split)
        index = wait(1)
        store = TokenStore(folder, source.name, index, split, wait)
        revision = (index.cursor or {}).get("revision")  # of a hub dataset
        # Later tokens are not written yet, so the fingerprint is that of the settings.
        store.fingerprint = f"{hash64('growing', self._key, str(revision)):016x}"
        store.size = source.size
        return store

    def _wait_for(self, split: str, tokens: float) -> Index:
        """Return the index once a split has `tokens` tokens or is complete.

        Raise the writer's error, or a DataError after data.timeout seconds without a document.
        """
        source, config = self._job.source, self._job.source.config
        if math.isfinite(tokens):
            self.need(split, int(tokens))
        progress, changed_at = (0, ""), time.monotonic()
        index = self._refresh()
        while not index.finished and index.tokens(split) < tokens:
            if self._writer is None or not self._writer.is_running():
                self.close()
                self.start()
            newest = progress_of(self._folder)
            if newest != progress:
                progress, changed_at = newest, time.monotonic()
            elif time.monotonic() - changed_at > config.timeout:
                raise DataError(
                    f"data.source = {source.name!r}: no document for {config.timeout:g} seconds "
                    f"(data.timeout); the last one read was {newest[1]}. Raise data.timeout, or "
                    "write shards with `nsa data prepare` and name their folder in data.source"
                )
            time.sleep(POLL_SECONDS)
            index = self._refresh()
        if index.skipped.number and config.on_error == "stop":
            raise DataError(f"{index.skipped.first}, or set data.on_error=skip")
        return index

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _refresh(self) -> Index:
        """Read the index again if it changed."""
        with suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(self._folder / INDEX)
            version = status.st_ino, status.st_mtime_ns
            if version != self._version:
                self._index = find_index(self._folder) or self._index
                self._version = version
        return self._index


class ValidationData:
    """The first `sequences` samples of the validation split, divided among the ranks.

    They are the same samples on any number of ranks.
    """

    def __init__(
        self, cache: TokenCache, *, sequences: int, micro_batch: int, world_size: int
    ) -> None:
        """Wait for the samples; raise a DataError if there are none, or data.timeout passes."""
        self._requested, self._micro_batch, self._world_size = sequences, micro_batch, world_size
        self._samples = cache.open_samples("val", VALIDATION_SEED)
        # Fewer than requested if a source has no more samples; then `_exhausted` is its name.
        self.sequences, self._exhausted = self._samples.available(sequences)
        self.bytes_per_token = self._samples.bytes_per_token

    @property
    def notes(self) -> list[str]:
        """Return a note for the log if there are fewer samples than requested."""
        if self._exhausted is None:
            return []
        return [
            f"train.eval_samples = {self._requested}: the validation split of {self._exhausted} "
            f"has {self.sequences} sequences, and all are used; for more take a larger source, or "
            "raise data.held_out if it is below 0.5 (for a prepared folder: prepare it again with "
            "a larger --held-out)"
        ]

    def batches(self, rank: int) -> list[Batch]:
        """Return a rank's batches, equally many on all ranks; unlabelled rows pad the last."""
        total, ranks, size = self.sequences, self._world_size, self._micro_batch
        samples = range(rank * total // ranks, (rank + 1) * total // ranks)
        batches = []
        for start in range(0, math.ceil(total / ranks), size):
            numbers = list(samples[start : start + size])
            batch = self._samples.batch(numbers + [0] * (size - len(numbers)))
            batch.labels.view(size, -1)[len(numbers) :] = IGNORE_INDEX
            batches.append(batch)
        return batches
