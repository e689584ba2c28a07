"""Validation data: the same samples of the validation split on any number of ranks."""

from __future__ import annotations

from functools import cached_property, partial
from queue import Empty

from nsa.constants import IGNORE_INDEX
from nsa.data.batch_source import PREPARE, build_batches, open_batches, source_names
from nsa.data.batches import Batch, Batches
from nsa.data.config import DataConfig
from nsa.data.prefetch import Prefetcher
from nsa.data.source import DataError
from nsa.data.stream import NOTHING_YET, collect
from nsa.data.token_store import TokenStore
from nsa.data.worker import Worker

# A fixed seed: every run is evaluated on the same samples, whatever train.seed is.
VALIDATION_SHAPE = {"micro_batch": 1, "accumulation": 1, "world_size": 1, "seed": 0}


class ValidationData:
    """The samples that training never sees: the same ones, however many ranks share them."""

    def __init__(
        self, origin: _Collected | Batches, asked: int, micro_batch: int, world_size: int
    ) -> None:
        self._origin, self._asked = origin, asked
        self._micro_batch, self._world_size = micro_batch, world_size

    @cached_property
    def _samples(self) -> Batches:
        return self._origin if isinstance(self._origin, Batches) else self._origin.wait()

    @cached_property
    def sequences(self) -> int:
        """How many there are: fewer than asked for where a source has no more."""
        return self._asked if self._shortest is None else self._shortest[0]

    @cached_property
    def _shortest(self) -> tuple[int, str] | None:
        return self._samples.first_repeat(self._asked)

    @property
    def note(self) -> str | None:
        """What the user should know; None where there is nothing."""
        if self._shortest is None:
            return None
        sequences, source = self._shortest
        return (
            f"validation: {sequences} of the {self._asked} sequences of train.eval_samples, where "
            f"the held-out text of {source} ends; for more, raise data.held_out (of a prepared "
            "folder: prepare it with a larger --held-out), or take a larger source"
        )

    @property
    def bytes_per_token(self) -> float:
        """Of the held-out text, to turn loss into bits per byte."""
        return self._samples.bytes_per_token

    def batches(self, rank: int) -> list[Batch]:
        """What one rank evaluates: as many batches as the others, filled up with ignored rows."""
        total, ranks = self.sequences, self._world_size
        mine = range(rank * total // ranks, (rank + 1) * total // ranks)
        most = -(-total // ranks)
        starts = range(0, most, self._micro_batch)
        return [self._batch(mine[start : start + self._micro_batch]) for start in starts]

    def _batch(self, positions: range) -> Batch:
        missing = self._micro_batch - len(positions)
        batch = self._samples.rows([*positions, *[0] * missing])
        batch.labels.view(self._micro_batch, -1)[len(positions) :] = IGNORE_INDEX
        return batch

    def close(self) -> None:
        """End the process that looks for the samples, where there is one."""
        if not isinstance(self._origin, Batches):
            self._origin.close()


class _Collected:
    """Held-out samples of streams, looked for in the background from the start."""

    def __init__(self, config: DataConfig, sequences: int) -> None:
        self._config = config
        work = partial(collect, config, sequences * config.seq_len + 1)
        self._worker = Worker(work, f"data.source = {source_names(config)!r}, validation")
        self._ahead: Prefetcher[TokenStore] = Prefetcher(self._worker, len(config.parts()))

    def wait(self) -> Batches:
        """The samples; a DataError where nothing new is read for data.timeout seconds."""
        seconds = self._config.timeout
        try:
            stores = [
                self._ahead.take(seconds, lambda: self._worker.heard) for _ in self._config.parts()
            ]
        except Empty:
            source = self._worker.source or source_names(self._config)
            raise DataError(
                f"data.source = {source!r}: no document came for {seconds:g} seconds "
                "(data.timeout), while text for validation was looked for; the last document read "
                f"was {self._worker.place or NOTHING_YET}. Raise data.timeout, or {PREPARE}"
            ) from None
        self.close()
        return build_batches(stores, self._config, **VALIDATION_SHAPE)

    def close(self) -> None:
        self._ahead.stop()
        self._worker.close()
        self._ahead.join()


def open_validation(
    config: DataConfig, *, sequences: int, micro_batch: int, world_size: int
) -> ValidationData:
    """The first `sequences` held-out samples, in an order that training's seed does not change."""
    batches = open_batches(config, "val", **VALIDATION_SHAPE)
    origin = _Collected(config, sequences) if batches is None else batches
    return ValidationData(origin, sequences, micro_batch, world_size)
