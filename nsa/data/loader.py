"""How a rank gets its batches: read ahead, in an order that can be gone on with, or an error.

    tokens that are all there   ->  Batches, computed          \\
                                                                >  a thread that keeps some ready
    documents that are streamed ->  worker processes, in turn  /
"""

from __future__ import annotations

from queue import Empty

from nsa.data.batch_source import (
    PREPARE,
    BatchSource,
    IndexedBatches,
    StreamingBatches,
    open_batches,
    source_names,
)
from nsa.data.batches import Batch
from nsa.data.config import DataConfig
from nsa.data.prefetch import Prefetcher
from nsa.data.source import DataError, State


class BatchLoader:
    """One rank's batches in their order, some of them ready beforehand."""

    def __init__(
        self,
        origin: BatchSource,
        config: DataConfig,
        *,
        rank: int,
        samples_per_step: int,
        state: State | None = None,
    ) -> None:
        self.fingerprint = origin.fingerprint
        self.vocab_size = origin.vocab_size
        self.tokenizer = origin.tokenizer
        self.tokenizer_fingerprint = origin.tokenizer_fingerprint
        self.samples_per_step = samples_per_step  # of all ranks together
        self._origin, self._timeout, self._rank = origin, config.timeout, rank
        self._state = state
        self._first: tuple[Batch, State | None] | None = None
        self._ahead = Prefetcher(origin, config.prefetch)

    @property
    def first_batch_seconds(self) -> float | None:
        """From opening to the first batch that was ready; None before that."""
        return self._ahead.first_seconds

    def wait_until_ready(self) -> None:
        """Return once the next batch is ready, or raise what `next_batch` would raise."""
        self._first = self._first or self._take()

    def next_batch(self) -> Batch:
        """The next batch; a DataError after data.timeout seconds without one."""
        batch, self._state = self._first or self._take()
        self._first = None
        return batch

    def _take(self) -> tuple[Batch, State | None]:
        try:
            return self._ahead.take(self._timeout)
        except Empty:
            source, place = self._origin.whereabouts()
            raise DataError(
                f"data.source = {source!r}: rank {self._rank} got no batch for {self._timeout:g} "
                f"seconds (data.timeout); {place}. Raise data.timeout or data.workers, or {PREPARE}"
            ) from None

    def state(self) -> State | None:
        """What `open_loader` needs to resume after the last batch, if more than its number."""
        return self._state

    def describe(self, samples: int) -> list[str]:
        """What a run that deals so many samples takes of the text, in lines for people."""
        return self._origin.describe(samples)

    def close(self) -> None:
        """End the thread and the worker processes."""
        self._ahead.stop()
        self._origin.close()
        self._ahead.join()


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
    """A rank's batches from the step before which `consumed` samples were consumed to all ranks.

    `state` is this rank's, where `BatchLoader.state` gave one then.
    """
    batches = open_batches(
        config,
        "train",
        micro_batch=micro_batch,
        accumulation=accumulation,
        world_size=world_size,
        seed=seed,
    )
    origin: BatchSource
    if batches is not None:
        origin = IndexedBatches(batches, rank, consumed)
    elif consumed and state is None:
        raise DataError(
            f"data.source = {source_names(config)!r} is streamed, and no place in the stream was "
            f"saved for rank {rank}; go on with the source and the number of ranks that the run "
            f"was begun with, or {PREPARE}"
        )
    else:
        origin = StreamingBatches(
            config,
            rank=rank,
            world_size=world_size,
            micro_batch=micro_batch,
            seed=seed,
            state=state,
        )
    return BatchLoader(
        origin,
        config,
        rank=rank,
        samples_per_step=micro_batch * accumulation * world_size,
        state=None if batches is not None else state,
    )
