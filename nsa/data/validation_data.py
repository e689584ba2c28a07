"""Validation data: the same samples of the validation split on any number of ranks."""

from __future__ import annotations

from functools import cached_property, partial
from queue import Empty

from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch, Samples, build_samples, open_samples
from nsa.data.dataset import NO_DOCUMENT, Dataset
from nsa.data.loader import PREPARE, Prefetcher
from nsa.data.source import DataError
from nsa.data.token_store import TokenStore
from nsa.data.worker import Worker

VALIDATION_SEED = 0  # every run is evaluated on the same samples, whatever train.seed is


class ValidationData:
    """The first `sequences` samples of the validation split, divided among the ranks.

    Streamed sources are read by a background process.
    """

    def __init__(
        self, dataset: Dataset, *, sequences: int, micro_batch: int, world_size: int
    ) -> None:
        config = dataset.config
        self._config, self._requested = config, sequences
        self._micro_batch, self._world_size = micro_batch, world_size
        self._indexed = open_samples(dataset, "val", VALIDATION_SEED)
        if self._indexed is None:
            tokens = sequences * config.seq_len + 1
            work = partial(dataset.stores, "val", tokens)
            self._worker = Worker(work, f"data.source = {config.source_names()!r}, validation")
            self._stores: Prefetcher[TokenStore] = Prefetcher(
                self._worker, len(config.sources()), self._worker.close
            )

    @cached_property
    def _samples(self) -> Samples:
        """The samples, once read; a DataError after data.timeout seconds without a document."""
        if self._indexed is not None:
            return self._indexed
        timeout, worker = self._config.timeout, self._worker
        try:
            stores = [
                self._stores.next(timeout, lambda: worker.last_progress)
                for _ in self._config.sources()
            ]
        except Empty:
            source = worker.source or self._config.source_names()
            raise DataError(
                f"data.source = {source!r}: no document for {timeout:g} seconds (data.timeout) "
                "while reading the validation split; the last document read was "
                f"{worker.location or NO_DOCUMENT}. Raise data.timeout, or {PREPARE}"
            ) from None
        self.close()
        return build_samples(self._config, stores, VALIDATION_SEED)

    @cached_property
    def _available(self) -> tuple[int, str | None]:
        return self._samples.available(self._requested)

    def wait_until_ready(self) -> None:
        """Wait for the samples; raise a DataError if the split is empty, or data.timeout passes."""
        assert self.sequences > 0

    @property
    def sequences(self) -> int:
        """Return the number of samples: fewer than requested if a source has no more."""
        return self._available[0]

    @property
    def note(self) -> str | None:
        """Return a note for the log if there are fewer samples than requested."""
        sequences, source = self._available
        if source is None:
            return None
        return (
            f"train.eval_samples = {self._requested}: the validation split of {source} ends after "
            f"{sequences} sequences; lower train.eval_samples, take a larger source, or raise "
            "data.held_out if it is below 0.5 (of a prepared folder: prepare it again with a "
            "larger --held-out)"
        )

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes of text per token, which convert loss to bits per byte."""
        return self._samples.bytes_per_token

    def batches(self, rank: int) -> list[Batch]:
        """Return a rank's batches, equally many on all ranks; ignored rows fill the last."""
        total, ranks = self.sequences, self._world_size
        positions = range(rank * total // ranks, (rank + 1) * total // ranks)
        longest = -(-total // ranks)  # of the ranks' ranges
        starts = range(0, longest, self._micro_batch)
        return [self._batch(positions[start : start + self._micro_batch]) for start in starts]

    def _batch(self, positions: range) -> Batch:
        missing = self._micro_batch - len(positions)
        batch = self._samples.batch([*positions, *[0] * missing])
        batch.labels.view(self._micro_batch, -1)[len(positions) :] = IGNORE_INDEX
        return batch

    def close(self) -> None:
        """Stop the background process of a streamed source."""
        if self._indexed is None:
            self._stores.close()
