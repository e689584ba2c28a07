"""Batch sources of a loader: `IndexedBatches` from token stores, `StreamingBatches` from workers.

A streaming source has `data.workers` worker processes, which deliver batches in turn:

    worker 0:  b0      b2      ...
    worker 1:      b1      b3  ...    state: batches consumed, and each worker's stream cursor
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from nsa.data.batches import Batch, Batches, to_batch
from nsa.data.config import DataConfig
from nsa.data.factory import fits_in_memory, held_out, is_indexed, open_source, open_store
from nsa.data.order import key
from nsa.data.source import ALL, DataError, State
from nsa.data.stream import NO_DOCUMENT, stream_rows
from nsa.data.token_store import TokenStore, coverage, warn_of_epochs
from nsa.data.tokenizer import build_tokenizer
from nsa.data.worker import Worker
from nsa.untrusted import short

PREPARE = "write shards with `nsa data prepare` and name their folder in data.source"


class IndexedBatches(Iterator[tuple[Batch, None]]):
    """Batches computed from their index; they need no state beyond the samples consumed."""

    def __init__(self, batches: Batches, rank: int, consumed: int) -> None:
        self.fingerprint = batches.fingerprint  # of the samples and their order
        self.vocab_size = max(store.vocab_size for store in batches.stores)  # above every token id
        self.tokenizer = batches.stores[0].tokenizer
        self.tokenizer_fingerprint = batches.stores[0].tokenizer_fingerprint
        self._batches, self._iterator = batches, batches.for_rank(rank, consumed)
        self._read = 0

    def __next__(self) -> tuple[Batch, None]:
        batch = next(self._iterator)
        self._read += 1
        return batch, None

    def progress(self) -> tuple[str, str]:
        """Return the source being read and the progress in it, for messages."""
        names = ", ".join(store.name for store in self._batches.stores)
        return names, f"batches read so far: {self._read:,}"

    def describe(self, samples: int) -> list[str]:
        """Return lines for the log of a run that consumes `samples` samples."""
        batches = self._batches
        return coverage(batches.stores, batches.fractions, batches.seq_len, samples)

    def close(self) -> None:
        pass


class StreamingBatches(Iterator[tuple[Batch, State]]):
    """Batches of worker processes in turn, each of which reads its part of the source.

    Each batch comes with the state that resumes after it.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        rank: int,
        world_size: int,
        micro_batch: int,
        seed: int,
        state: State | None,
    ) -> None:
        tokenizer = build_tokenizer(config)
        text = _text_settings(config, seed)
        # Opened here as well: a missing source is refused before a worker or an engine starts.
        self._sizes = [open_source(config, name).size() for name in config.sources()]
        identity = [tokenizer.fingerprint, repr(text), repr(self._sizes)]
        divisions = [held_out(config, name) for name in config.sources()]
        if any(division.by_position for division in divisions):
            identity.append(repr(divisions))
        self.fingerprint = f"{key('stream', *identity):016x}"
        self.vocab_size = tokenizer.vocab_size
        self.tokenizer = tokenizer.name
        self.tokenizer_fingerprint = tokenizer.fingerprint
        self._config, self._eos_id = config, tokenizer.eos_id
        self._settings = {
            **text,
            "number of ranks": world_size,
            "data.workers": config.workers,
            "rank": rank,
        }
        if state is not None:
            _check_unchanged(
                state["under"] | {"data.workers": len(state["workers"])}, self._settings
            )
        self._consumed = state["taken"] if state else 0
        self._cursors = list(state["workers"]) if state else [None] * config.workers
        work = partial(
            stream_rows, config, seed=seed, parts=world_size * config.workers, rows=micro_batch
        )
        name = f"data.source = {source_names(config)!r}, rank {rank}"
        self._workers = [
            Worker(partial(work, part=rank * config.workers + number, state=cursor), name)
            for number, cursor in enumerate(self._cursors)
        ]

    def __next__(self) -> tuple[Batch, State]:
        current = self._current
        rows, self._cursors[current] = next(self._workers[current])
        self._consumed += 1
        state = {"under": self._settings, "taken": self._consumed, "workers": list(self._cursors)}
        return to_batch(rows, self._eos_id, self._config.packing), state

    @property
    def _current(self) -> int:
        """Return the number of the worker that delivers the next batch."""
        return self._consumed % len(self._workers)

    def progress(self) -> tuple[str, str]:
        worker = self._workers[self._current]
        last = f"the last document read was {worker.location or NO_DOCUMENT}"
        return worker.source or source_names(self._config), last

    def describe(self, samples: int) -> list[str]:
        lines, seq_len = [], self._config.seq_len
        for (name, fraction), size in zip(self._config.sources().items(), self._sizes, strict=True):
            lines.append(
                f"{name}: streamed, tokenizer {self.tokenizer}, documents shuffled "
                f"{self._config.shuffle_documents:,} at a time; "
                f"the run consumes {round(samples * fraction):,} samples of {seq_len:,}"
            )
            if size:  # a lower bound of the epochs: a token has at least one byte
                epochs = samples * fraction * seq_len / size
                lines += warn_of_epochs(name, f"{size:,} bytes", epochs)
        return lines

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def open_batches(config: DataConfig, split: str, **shape: int) -> Batches | None:
    """Open indexed batches of `data.source`; None if it is streamed.

    Few documents are indexed unless they are mixed with a stream or evaluated completely, in order.
    """
    names = list(config.sources())
    streamed = [name for name in names if not is_indexed(name)]
    if split != ALL and all(fits_in_memory(config, name) for name in streamed):
        streamed = []
    if len(streamed) == len(names):
        return None
    if streamed:
        indexed = ", ".join(name for name in names if name not in streamed)
        joined = ", ".join(streamed)
        raise DataError(
            f"data.source mixes streams ({joined}) with indexed tokens ({indexed}); write shards "
            f"of {joined} with `nsa data prepare` and name their folders instead"
        )
    stores = [open_store(config, name, split) for name in names]
    first, *others = stores
    for store in others:
        if store.tokenizer_fingerprint != first.tokenizer_fingerprint:
            fingerprints = [each.tokenizer_fingerprint[:12] for each in (first, store)]
            raise DataError(
                f"data.source: {first.name} and {store.name} have different tokenizers "
                f"({', '.join(fingerprints)}); prepare one of them again with the other's"
            )
    return build_batches(stores, config, **shape)


def build_batches(stores: Sequence[TokenStore], config: DataConfig, **shape: int) -> Batches:
    """Build the batches of these stores; `shape`: micro_batch, accumulation, world_size, seed."""
    fractions = list(config.sources().values())
    return Batches(
        stores, fractions=fractions, seq_len=config.seq_len, packing=config.packing, **shape
    )


def source_names(config: DataConfig) -> str:
    """Return `data.source` for messages."""
    return ", ".join(config.sources())


def _text_settings(config: DataConfig, seed: int) -> dict[str, Any]:
    """Return the settings that determine a stream's documents and their order, as JSON values."""
    names = ("subset", "split", "files", "text_field", "tokenizer", "held_out", "shuffle_documents")
    return {
        "data.source": [list(source) for source in config.sources().items()],
        **{f"data.{name}": getattr(config, name) for name in names},
        "train.seed": seed,
    }


def _check_unchanged(saved: dict[str, Any], current: dict[str, Any]) -> None:
    for name, value in current.items():
        if saved.get(name) != value:
            before = short(saved.get(name))
            raise DataError(
                f"{name} = {value}: this run's stream cursor was saved with {before}, and a "
                f"stream resumes only with the same; set it back, or {PREPARE}: shards resume on "
                "any number of ranks"
            )
