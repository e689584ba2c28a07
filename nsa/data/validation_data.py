"""Validation data: the same samples of the validation split on any number of ranks."""

from __future__ import annotations

from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch
from nsa.data.cache import TokenCache

VALIDATION_SEED = 0  # every run is evaluated on the same samples, whatever train.seed is


class ValidationData:
    """The first `sequences` samples of the validation split, divided among the ranks."""

    def __init__(
        self, cache: TokenCache, *, sequences: int, micro_batch: int, world_size: int
    ) -> None:
        """Wait for the samples; raise a DataError if there are none, or data.timeout passes."""
        self._requested, self._micro_batch, self._world_size = sequences, micro_batch, world_size
        self._samples = cache.open_samples("val", VALIDATION_SEED)
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
