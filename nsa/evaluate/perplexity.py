"""Mean loss per token of a model, overall and by position in the context.

    a sample:                 |----------------- the longest --seq-len -----------------|
    at half of that length:   |============================|============================|

All lengths evaluate each token of the samples exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch, Samples, to_batch
from nsa.data.cache import VALIDATION_SEED, TokenCache
from nsa.data.dataset import Dataset
from nsa.data.source import DataError, HeldOut
from nsa.data.tokenizer import TokenArray, Tokenizer
from nsa.model import LanguageModel
from nsa.model.loss import bucket_edges, bucket_of, token_losses

ALL = "all"  # documents of both splits; the shards of a prepared folder are already split
# A batch, and the sample and position of each of its labels, flattened.
EvalBatch = tuple[Batch, Tensor, Tensor]


@dataclass(frozen=True)
class EvalData:
    """The first samples of a dataset, in the order of validation in training."""

    samples: Samples
    count: int  # samples
    exhausted: str | None  # name of the source that has fewer samples than requested, if any

    @property
    def tokens(self) -> int:
        """Tokens read; packing "documents" evaluates fewer: a document's last has no label."""
        return self.count * self.samples.seq_len


def open_eval_data(
    dataset: Dataset, split: str, tokens: int, tokenizer: Tokenizer, folder: Path
) -> EvalData:
    """Return the first `tokens` tokens of a dataset, in samples of `data.seq_len`.

    Samples are cut and shuffled as in training; `folder` caches sources that are not prepared.
    """
    count = max(1, tokens // dataset.config.seq_len)
    if split == ALL:
        for source in dataset.sources:
            if source.is_prepared:
                raise DataError(
                    f"--split all: data.source = {source.name!r} was split when it was prepared; "
                    "choose held_out or train"
                )
        # Nothing is held out, so the training split has all documents.
        sources = [replace(source, division=HeldOut(0.0)) for source in dataset.sources]
        dataset, split = replace(dataset, sources=sources), "train"
    with closing(TokenCache(dataset, folder)) as cache:
        for stamp in cache.stamps:
            if stamp.tokenizer_fingerprint != tokenizer.fingerprint:
                raise DataError(
                    f"data.source: {stamp.source} was prepared with the tokenizer "
                    f"{stamp.tokenizer!r}, and the run uses {tokenizer.name!r}; name text that is "
                    "not prepared, or prepare it with the run's tokenizer"
                )
        cache.start({split: count})
        samples = cache.open_samples(split, VALIDATION_SEED)
        return EvalData(samples, *samples.available(count))


def eval_batches(data: EvalData, seq_len: int, rows: int) -> Iterator[EvalBatch]:
    """Yield windows of `seq_len` tokens of the samples, `rows` at a time."""
    windows = _windows(data, seq_len)
    while group := list(islice(windows, rows)):
        samples, tokens = zip(*group, strict=True)
        batch = to_batch(
            np.stack(tokens), data.samples.stores[0].stamp.eos_id, data.samples.packing
        )
        yield batch, torch.tensor(samples).repeat_interleave(seq_len), batch.positions()


def _windows(data: EvalData, seq_len: int) -> Iterator[tuple[int, TokenArray]]:
    """Cut samples into windows; yield the sample's number and the tokens, [T + 1]."""
    for sample in range(data.count):
        store, start = data.samples.locate(sample)
        for begin in range(start, start + data.samples.seq_len, seq_len):
            yield sample, store.read(begin, begin + seq_len + 1)


@dataclass(frozen=True)
class Mean:
    """A mean loss per token, and its standard error over samples; None with a single sample.

    Tokens of one sample are correlated, so the error counts samples, not tokens.
    """

    value: float
    error: float | None

    @classmethod
    def of(cls, losses: Tensor, counts: Tensor) -> Mean:
        """Return the mean, from each sample's sum of losses and number of tokens, [samples]."""
        total = counts.sum()
        value = losses.sum() / total
        samples = int((counts > 0).sum())
        if samples < 2:
            return cls(value.item(), None)
        # The standard error of a ratio of two sums over samples.
        spread = (losses - value * counts).square().sum() * samples / (samples - 1)
        return cls(value.item(), (spread.sqrt() / total).item())


@dataclass(frozen=True)
class Losses:
    """Loss sums and token counts by sample and bucket of positions."""

    sums: Tensor  # float64 [samples, buckets]
    counts: Tensor  # predicted tokens, [samples, buckets]
    edges: list[int]  # the first position of each bucket, and the end of the last

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> Mean:
        return Mean.of(self.sums.sum(1), self.counts.sum(1))

    def buckets(self) -> list[tuple[range, int, Mean]]:
        """Return the positions, number of tokens and mean of each bucket that has tokens."""
        return [
            (range(first, end), int(counts.sum()), Mean.of(sums, counts))
            for first, end, sums, counts in zip(
                self.edges[:-1], self.edges[1:], self.sums.T, self.counts.T, strict=True
            )
            if counts.any()
        ]

    def minus(self, other: Losses) -> Mean:
        """Return the mean difference from another model's losses on the same tokens.

        The standard error is of paired losses, so the difficulty of a text, equal for both
        models, cancels.
        """
        counts = self.counts.sum(1)
        assert torch.equal(counts, other.counts.sum(1))
        return Mean.of(self.sums.sum(1) - other.sums.sum(1), counts)


@torch.no_grad()
def evaluate(
    model: LanguageModel, batches: Iterable[EvalBatch], samples: int, seq_len: int
) -> Losses:
    """Return the losses of all labels; compute the logits of a few tokens at a time."""
    edges = bucket_edges(seq_len)
    sums = torch.zeros(samples, len(edges) - 1, dtype=torch.float64)
    counts = torch.zeros_like(sums)
    weight = model.head_weight
    for batch, sample, position in batches:
        batch = batch.to(weight.device)
        hidden = model.hidden(batch.input_ids, batch.cu_seqlens).flatten(0, 1)
        labels = batch.labels.flatten()
        kept = labels != IGNORE_INDEX
        losses = token_losses(hidden[kept], weight, labels[kept]).double().cpu()
        index = (sample * sums.shape[1] + bucket_of(position, edges))[kept.cpu()]
        sums.view(-1).index_add_(0, index, losses)
        counts.view(-1).index_add_(0, index, torch.ones_like(losses))
    return Losses(sums, counts, edges)


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite above 700: math.exp raises an OverflowError above 709."""
    return math.exp(loss) if loss < 700 else math.inf
