"""Validation data: the same samples of the validation split on any number of ranks."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from queue import Empty

from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch, Samples, build_samples, open_samples
from nsa.data.dataset import NO_DOCUMENT, Dataset
from nsa.data.loader import PREPARE, Prefetcher
from nsa.data.source import DataError
from nsa.data.worker import Worker

VALIDATION_SEED = 0  # every run is evaluated on the same samples, whatever train.seed is


class ValidationData:
    """The first `sequences` samples of the validation split, divided among the ranks."""

    def __init__(
        self, dataset: Dataset, *, sequences: int, micro_batch: int, world_size: int
    ) -> None:
        """Read the samples; raise a DataError if there are none, or data.timeout passes."""
        self._requested, self._micro_batch, self._world_size = sequences, micro_batch, world_size
        samples = open_samples(dataset, "val", VALIDATION_SEED)
        self._samples = samples or _read_samples(dataset, sequences * dataset.config.seq_len + 1)
        self._available = self._samples.available(sequences)

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


def _read_samples(dataset: Dataset, tokens: int) -> Samples:
    """Read the samples of streamed sources, in a process: one that hangs ends in an error."""
    config = dataset.config
    names, timeout = config.source_names(), config.timeout
    work = partial(dataset.stores, "val", tokens)
    worker = Worker(work, f"data.source = {names!r}, validation")
    with closing(Prefetcher(worker, len(config.sources()), worker.close)) as stores:
        try:
            read = [stores.next(timeout, lambda: worker.last_progress) for _ in config.sources()]
        except Empty:
            raise DataError(
                f"data.source = {worker.source or names!r}: no document for {timeout:g} seconds "
                "(data.timeout) while reading the validation split; the last document read was "
                f"{worker.location or NO_DOCUMENT}. Raise data.timeout, or {PREPARE}"
            ) from None
    return build_samples(config, read, VALIDATION_SEED)
