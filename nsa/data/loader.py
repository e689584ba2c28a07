"""Per-rank batch pipeline: prefetched, resumable, fails loudly.

    token stores  ->  IndexedBatches                         \\
                                                              >  Prefetcher  ->  next_batch()
    streams       ->  worker processes  ->  StreamingBatches /
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from typing import Generic, TypeVar

from nsa.data.batch_source import (
    PREPARE,
    IndexedBatches,
    StreamingBatches,
    open_batches,
    source_names,
)
from nsa.data.batches import Batch
from nsa.data.config import DataConfig
from nsa.data.source import DataError, State

T = TypeVar("T")
JOIN_SECONDS = 5.0  # a thread that hangs in a file system is abandoned after this


class Prefetcher(Generic[T]):
    """Up to `depth` items ready in advance; an error is raised after the items before it."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self.first_seconds: float | None = None  # until the first item was ready
        self._items = items
        self._free = Semaphore(depth)
        self._ready: SimpleQueue[tuple[T] | Exception] = SimpleQueue()
        self._stopped = False
        self._opened = time.monotonic()
        self._thread = Thread(target=self._run, daemon=True, name="nsa data")
        self._thread.start()
        atexit.register(self._close)  # a thread inside PyTorch at Python's exit would abort it

    def next(self, timeout: float, last_progress: Callable[[], float] = lambda: 0.0) -> T:
        """Return the next item; raise Empty `timeout` seconds after the call or last progress."""
        start = time.monotonic()
        while True:
            deadline = max(start, last_progress()) + timeout
            try:
                item = self._ready.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                if max(start, last_progress()) + timeout > deadline:
                    continue
                raise
            if isinstance(item, Exception):
                self._ready.put(item)  # later calls raise it too
                raise item
            self._free.release()
            return item[0]

    def stop(self) -> None:
        """Stop reading after the current item."""
        self._stopped = True
        self._free.release()

    def join(self) -> None:
        """Wait for the thread, after `stop` and once nothing blocks its current item."""
        atexit.unregister(self._close)
        self._thread.join(JOIN_SECONDS)

    def _close(self) -> None:
        self.stop()
        self.join()

    def _run(self) -> None:
        try:
            while True:
                self._free.acquire()
                if self._stopped:
                    return
                item = next(self._items)
                if self.first_seconds is None:
                    self.first_seconds = time.monotonic() - self._opened
                self._ready.put((item,))
        except DataError as error:
            self._ready.put(error)
        except Exception as error:  # all ranks handle a DataError together, but no other error
            wrapped = DataError(f"prefetching failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            self._ready.put(wrapped)


class BatchLoader:
    """One rank's batches in order, up to `data.prefetch` of them ready in advance."""

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
        self._prefetcher = Prefetcher(source, config.prefetch)

    @property
    def first_batch_seconds(self) -> float | None:
        """Return the time from opening until the first batch was ready; None before that."""
        return self._prefetcher.first_seconds

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
            return self._prefetcher.next(self._timeout)
        except Empty:
            source, progress = self.source.progress()
            raise DataError(
                f"data.source = {source!r}: rank {self._rank} got no batch for {self._timeout:g} "
                f"seconds (data.timeout); {progress}. Raise data.timeout or data.workers, or "
                f"{PREPARE}"
            ) from None

    def state(self) -> State | None:
        """Return the state that resumes after the last batch; None for indexed batches."""
        return self._state

    def close(self) -> None:
        """Stop the thread and the worker processes."""
        self._prefetcher.stop()
        self.source.close()
        self._prefetcher.join()


def open_loader(
    config: DataConfig,
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
    shape = {"micro_batch": micro_batch, "world_size": world_size, "seed": seed}
    batches = open_batches(config, "train", accumulation=accumulation, **shape)
    source: IndexedBatches | StreamingBatches
    if batches is not None:
        source, state = IndexedBatches(batches, rank, consumed), None
    elif consumed and state is None:
        raise DataError(
            f"data.source = {source_names(config)!r} is streamed, and no cursor was saved for rank "
            f"{rank}; resume with the source and the number of ranks of the original run, or "
            f"{PREPARE}"
        )
    else:
        source = StreamingBatches(config, rank=rank, state=state, **shape)
    samples_per_step = micro_batch * accumulation * world_size
    return BatchLoader(source, config, rank=rank, samples_per_step=samples_per_step, state=state)
