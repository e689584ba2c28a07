"""Evaluation data: samples, and the windows of context in which their tokens are evaluated.

    a sample:                 |----------------- the longest --seq-len -----------------|
    at half of that length:   |============================|============================|
    with --stride as well:    |============================|
                                         ...context...     |========|
                                                  ...context...     |========|

All lengths and strides evaluate each token of the samples exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch, Samples, first_samples, to_batch
from nsa.data.dataset import Dataset
from nsa.data.source import ALL, DataError
from nsa.data.tokenizer import TokenArray, Tokenizer
from nsa.data.validation_data import VALIDATION_SEED


@dataclass(frozen=True)
class EvalData:
    """The first samples of a dataset, in the order of validation in training."""

    samples: Samples
    count: int  # samples
    exhausted: str | None  # name of the source that has fewer samples than requested

    @property
    def tokens(self) -> int:
        """Tokens read; fewer are evaluated if packed, as a document's last token has no label."""
        return self.count * self.samples.seq_len


@dataclass(frozen=True)
class EvalBatch:
    """A batch, and the sample and position of each of its labels, flattened."""

    batch: Batch
    sample: torch.Tensor
    position: torch.Tensor  # tokens of context before it


Window = tuple[int, TokenArray, slice]  # sample, tokens [T + 1], labels to evaluate


def open_eval_data(dataset: Dataset, split: str, tokens: int, tokenizer: Tokenizer) -> EvalData:
    """Return the first `tokens` tokens of a dataset, in samples of `data.seq_len`.

    An indexed source is cut into samples as in training; a streamed one is read in order.
    """
    for source in dataset.sources:
        if split == ALL and source.is_prepared:
            raise DataError(
                f"--split all: data.source = {source.name!r} was split when it was prepared; "
                "choose held_out or train"
            )
    count = max(1, tokens // dataset.config.seq_len)
    samples = first_samples(dataset, split, VALIDATION_SEED, count)
    for store in samples.stores:
        if store.tokenizer_fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"data.source: {store.name} was prepared with the tokenizer {store.tokenizer!r}, "
                f"and the run uses {tokenizer.name!r}; name text that is not prepared, or prepare "
                "it with the run's tokenizer"
            )
    return EvalData(samples, *samples.available(count))


def eval_batches(data: EvalData, seq_len: int, stride: int, rows: int) -> Iterator[EvalBatch]:
    """Yield windows of `seq_len` tokens, `rows` at a time, with `stride` new labels each."""
    windows = _windows(data, seq_len, stride)
    while group := list(islice(windows, rows)):
        yield _to_eval_batch(data, group)


def _windows(data: EvalData, seq_len: int, stride: int) -> Iterator[Window]:
    for sample in range(data.count):
        store, start = data.samples.locate(sample)
        for first in range(start, start + data.samples.seq_len, stride):
            begin = max(0, first + stride - seq_len)
            evaluated = slice(first - begin, first - begin + stride)
            yield sample, store.read(begin, begin + seq_len + 1), evaluated


def _to_eval_batch(data: EvalData, windows: list[Window]) -> EvalBatch:
    samples, tokens, evaluated = zip(*windows, strict=True)
    rows = np.stack(tokens)
    batch = to_batch(rows, data.samples.stores[0].eos_id, data.samples.packing)
    labels = batch.labels.view(len(windows), -1)
    for row, kept in zip(labels, evaluated, strict=True):
        row[: kept.start] = row[kept.stop :] = IGNORE_INDEX
    length = labels.shape[1]
    index = torch.arange(labels.numel())
    starts = torch.arange(0, len(index), length)
    if batch.cu_seqlens is not None:
        starts = batch.cu_seqlens[:-1].long()
    sample = torch.tensor(samples).repeat_interleave(length)
    position = index - starts[torch.searchsorted(starts, index, right=True) - 1]
    return EvalBatch(batch, sample, position)
