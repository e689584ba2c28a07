"""Per-rank batch pipeline: prefetched, resumable, fails loudly.

    token stores  ->  IndexedBatches                         \\
                                                              >  Prefetcher  ->  next_batch()
    stream        ->  worker process  ->  StreamingBatches   /
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from typing import Any, Generic, TypeVar

from nsa.data.batches import Batch, Samples, open_samples, to_batch
from nsa.data.config import DataConfig
from nsa.data.dataset import NO_DOCUMENT, Dataset
from nsa.data.order import hash64
from nsa.data.source import DataError, Skipped, State, is_path
from nsa.data.stream import SHUFFLE_DOCUMENTS, stream_rows
from nsa.data.token_store import coverage, epochs_warning
from nsa.data.tokenizer import build_tokenizer
from nsa.data.worker import Worker
from nsa.untrusted import short_repr

T = TypeVar("T")
PREFETCH = 8  # micro-batches ready in advance
JOIN_SECONDS = 5.0  # a thread that hangs in a file system is abandoned after this
PREPARE = "write shards with `nsa data prepare` and name their folder in data.source"


class IndexedBatches(Iterator[tuple[Batch, None]]):
    """A rank's batches of samples in order; their only state is the number consumed."""

    def __init__(
        self, samples: Samples, *, rank: int, world_size: int, micro_batch: int, consumed: int
    ) -> None:
        self.fingerprint = samples.fingerprint  # of the samples and their order
        self.vocab_size = max(store.vocab_size for store in samples.stores)  # above every token id
        self.tokenizer = samples.stores[0].tokenizer
        self.tokenizer_fingerprint = samples.stores[0].tokenizer_fingerprint
        self._samples, self._rank, self._next = samples, rank, consumed + rank * micro_batch
        self._micro_batch, self._stride = micro_batch, world_size * micro_batch

    def __next__(self) -> tuple[Batch, None]:
        batch = self._samples.batch(range(self._next, self._next + self._micro_batch))
        self._next += self._stride
        return batch, None

    def progress(self) -> tuple[str, str]:
        """Return the source being read and the progress in it, for messages."""
        names = ", ".join(store.name for store in self._samples.stores)
        return names, f"the next sample is number {self._next:,}"

    def describe(self, samples: int) -> list[str]:
        """Return lines for the log of a run that consumes `samples` samples."""
        data = self._samples
        return coverage(data.stores, data.fractions, data.seq_len, samples)

    def skipped(self) -> list[str]:
        """Return lines for the end of the log: what data.on_error left out on this rank."""
        return [note for store in self._samples.stores for note in store.notes if not self._rank]

    def close(self) -> None:
        pass


class StreamingBatches(Iterator[tuple[Batch, State]]):
    """Batches of a worker process, which reads this rank's part of the source.

    Each batch comes with the state that resumes after it.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        rank: int,
        world_size: int,
        micro_batch: int,
        seed: int,
        state: State | None,
    ) -> None:
        config, divisions = dataset.config, [source.division for source in dataset.sources]
        tokenizer = build_tokenizer(config)
        text = _text_settings(config, seed)
        self._sizes = [source.documents.size() for source in dataset.sources]
        identity = [tokenizer.fingerprint, repr(text), repr(self._sizes)]
        if any(division.by_position for division in divisions):
            identity.append(repr(divisions))
        self.fingerprint = f"{hash64('stream', *identity):016x}"
        self.vocab_size = tokenizer.vocab_size
        self.tokenizer = tokenizer.name
        self.tokenizer_fingerprint = tokenizer.fingerprint
        self._config, self._eos_id = config, tokenizer.eos_id
        self._settings = {
            **text,
            "number of ranks": world_size,
            "data.workers": 1,  # of earlier versions, which could have more
            "rank": rank,
        }
        cursor = None
        if state is not None:
            saved = state["under"] | {"data.workers": len(state["workers"])}  # one cursor for each
            _check_unchanged(saved, self._settings)
            (cursor,) = state["workers"]
        self._worker = Worker(
            partial(
                stream_rows,
                dataset,
                seed=seed,
                part=rank,
                parts=world_size,
                rows=micro_batch,
                state=cursor,
            ),
            f"data.source = {config.source_names()!r}, rank {rank}",
        )
        self._skipped: dict[str, Skipped] = {}  # by source, since the start

    def __next__(self) -> tuple[Batch, State]:
        rows, cursor, self._skipped = next(self._worker)
        # In checkpoints: "under" holds the settings, "workers" the worker's cursor.
        state = {"under": self._settings, "workers": [cursor]}
        return to_batch(rows, self._eos_id, self._config.packing), state

    def progress(self) -> tuple[str, str]:
        last = f"the last document read was {self._worker.location or NO_DOCUMENT}"
        return self._worker.source or self._config.source_names(), last

    def describe(self, samples: int) -> list[str]:
        lines, seq_len = [], self._config.seq_len
        for (name, fraction), size in zip(self._config.sources().items(), self._sizes, strict=True):
            line = (
                f"{name}: streamed, tokenizer {self.tokenizer}, documents shuffled "
                f"{SHUFFLE_DOCUMENTS:,} at a time; "
                f"the run consumes {round(samples * fraction):,} samples of {seq_len:,}"
            )
            if not size:
                lines.append(line)
                continue
            epochs = samples * fraction * seq_len / size  # a token has one byte or more
            lines.append(f"{line}: at least {epochs:.2f} epochs of {size:,} bytes")
            lines += epochs_warning(name, f"{size:,} bytes", epochs)
        return lines

    def skipped(self) -> list[str]:
        return [line for name, skipped in self._skipped.items() for line in skipped.note(name)]

    def close(self) -> None:
        self._worker.close()


def _text_settings(config: DataConfig, seed: int) -> dict[str, Any]:
    """Return the settings that determine a stream's documents and their order, as JSON values.

    Names and order are those of earlier versions: they are part of the fingerprint.
    """
    sources = config.sources()
    return {
        "data.source": [list(source) for source in sources.items()],
        "data.subset": config.subset,
        "data.split": config.split,
        "data.files": None if all(map(is_path, sources)) else config.pattern,
        "data.text_field": config.text_field,
        "data.tokenizer": config.tokenizer,
        "data.held_out": config.held_out,
        "data.shuffle_documents": SHUFFLE_DOCUMENTS,
        "train.seed": seed,
    }


def _check_unchanged(saved: dict[str, Any], current: dict[str, Any]) -> None:
    for name, value in current.items():
        if saved.get(name) != value:
            before = short_repr(saved.get(name))
            raise DataError(
                f"{name} = {value}: this run's stream cursor was saved with {before}, and a "
                f"stream resumes only with the same; resume with the settings, ranks and version "
                f"that saved it, or {PREPARE}: shards resume on any number of ranks"
            )


class Prefetcher(Generic[T]):
    """Up to `depth` items ready in advance; an error is raised after the items before it.

    `close_items` ends a call of `next(items)` that waits.
    """

    def __init__(self, items: Iterator[T], depth: int, close_items: Callable[[], None]) -> None:
        self.first_seconds: float | None = None  # until the first item was ready
        self._items, self._close_items = items, close_items
        self._free = Semaphore(depth)
        self._ready: SimpleQueue[tuple[T] | DataError] = SimpleQueue()
        self._stopped = False
        self._started = time.monotonic()
        self._thread = Thread(target=self._run, daemon=True, name="nsa data")
        self._thread.start()
        atexit.register(self.close)  # a thread inside PyTorch at Python's exit would abort it

    def next(self, timeout: float, last_progress: Callable[[], float] = lambda: 0.0) -> T:
        """Return the next item; raise Empty after `timeout` seconds without progress."""
        start = time.monotonic()
        while True:
            deadline = max(start, last_progress()) + timeout
            try:
                item = self._ready.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                if max(start, last_progress()) + timeout > deadline:
                    continue
                raise
            if isinstance(item, DataError):
                self._ready.put(item)  # later calls raise it too
                raise item
            self._free.release()
            return item[0]

    def close(self) -> None:
        """Stop the thread and close the items."""
        self._stopped = True
        self._free.release()
        self._close_items()
        self._thread.join(JOIN_SECONDS)
        atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            while True:
                self._free.acquire()
                if self._stopped:
                    return
                item = next(self._items)
                if self.first_seconds is None:
                    self.first_seconds = time.monotonic() - self._started
                self._ready.put((item,))
        except DataError as error:
            self._ready.put(error)
        except Exception as error:  # all ranks handle a DataError together, but no other error
            wrapped = DataError(f"prefetching failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            self._ready.put(wrapped)


class BatchLoader(Prefetcher[tuple[Batch, State | None]]):
    """One rank's batches in order, up to PREFETCH of them ready in advance."""

    def __init__(
        self,
        source: IndexedBatches | StreamingBatches,
        config: DataConfig,
        *,
        rank: int,
        samples_per_step: int,
        state: State | None = None,
    ) -> None:
        self.source = source
        self.samples_per_step = samples_per_step  # of all ranks together
        self._timeout, self._rank = config.timeout, rank
        self._state = state
        self._first: tuple[Batch, State | None] | None = None
        super().__init__(source, PREFETCH, source.close)

    def wait_until_ready(self) -> None:
        """Wait for the first batch; raise the error that `next_batch` would raise."""
        self._first = self._first or self._next()

    def next_batch(self) -> Batch:
        """Return the next batch; raise a DataError after data.timeout seconds without one."""
        batch, self._state = self._first or self._next()
        self._first = None
        return batch

    def _next(self) -> tuple[Batch, State | None]:
        try:
            return self.next(self._timeout)
        except Empty:
            source, progress = self.source.progress()
            raise DataError(
                f"data.source = {source!r}: rank {self._rank} got no batch for {self._timeout:g} "
                f"seconds (data.timeout); {progress}. Raise data.timeout, or {PREPARE}"
            ) from None

    def state(self) -> State | None:
        """Return the state that resumes after the last batch; None for indexed batches."""
        return self._state


def open_loader(
    dataset: Dataset,
    *,
    rank: int,
    world_size: int,
    micro_batch: int,
    accumulation: int,
    seed: int,
    consumed: int = 0,
    state: State | None = None,
) -> BatchLoader:
    """Open a rank's loader at the step that starts after `consumed` samples of all ranks.

    `state` is what this rank's `BatchLoader.state` returned at that step.
    """
    config, samples = dataset.config, open_samples(dataset, "train", seed)
    shape = {"rank": rank, "world_size": world_size, "micro_batch": micro_batch}
    source: IndexedBatches | StreamingBatches
    if samples is not None:
        source, state = IndexedBatches(samples, consumed=consumed, **shape), None
    elif consumed and state is None:
        raise DataError(
            f"data.source = {config.source_names()!r} is streamed, and no cursor was saved for "
            f"rank {rank}; resume with the source and the number of ranks of the original run, or "
            f"{PREPARE}"
        )
    else:
        source = StreamingBatches(dataset, state=state, seed=seed, **shape)
    samples_per_step = micro_batch * accumulation * world_size
    return BatchLoader(source, config, rank=rank, samples_per_step=samples_per_step, state=state)
