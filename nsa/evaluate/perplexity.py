"""Mean loss per token of a model, overall and by position in the context."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.constants import IGNORE_INDEX
from nsa.evaluate.data import EvalBatch
from nsa.model import LanguageModel
from nsa.model.loss import bucket_edges, token_losses


@dataclass(frozen=True)
class Mean:
    """A mean loss per token, and its standard error over samples; None with a single sample.

    Tokens of one sample are correlated, so the error counts samples, not tokens.
    """

    value: float
    error: float | None

    @classmethod
    def of(cls, losses: Tensor, counts: Tensor) -> Mean:
        """Compute from the sum of losses and the number of tokens of each sample, [samples]."""
        total = counts.sum()
        value = losses.sum() / total
        samples = int((counts > 0).sum())
        if samples < 2:
            return cls(value.item(), None)
        spread = (losses - value * counts).square().sum() * samples / (samples - 1)
        return cls(value.item(), (spread.sqrt() / total).item())


@dataclass(frozen=True)
class Losses:
    """Loss sums and token counts by sample and bucket of positions."""

    sums: Tensor  # float64 [samples, buckets]
    counts: Tensor  # predicted tokens, [samples, buckets]
    edges: list[int]  # positions where buckets begin, and the end

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> Mean:
        return Mean.of(self.sums.sum(1), self.counts.sum(1))

    def buckets(self) -> list[tuple[range, int, Mean]]:
        """Return positions, tokens and mean of each bucket that has tokens."""
        return [
            (range(first, end), int(counts.sum()), Mean.of(sums, counts))
            for first, end, sums, counts in zip(
                self.edges[:-1], self.edges[1:], self.sums.T, self.counts.T, strict=True
            )
            if counts.any()
        ]

    def minus(self, other: Losses) -> Mean:
        """Return the mean difference from another model's losses on the same tokens.

        Its error is paired, so the difficulty of a text, equal for both models, cancels.
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
    inner_edges = torch.tensor(edges[1:-1])
    weight = model.head_weight
    for item in batches:
        batch = item.batch.to(weight.device)
        hidden = model.hidden(batch.input_ids, batch.cu_seqlens).flatten(0, 1)
        labels = batch.labels.flatten()
        kept = labels != IGNORE_INDEX
        losses = token_losses(hidden[kept], weight, labels[kept]).double().cpu()
        bucket = torch.bucketize(item.position, inner_edges, right=True)
        index = (item.sample * sums.shape[1] + bucket)[kept.cpu()]
        sums.view(-1).index_add_(0, index, losses)
        counts.view(-1).index_add_(0, index, torch.ones_like(losses))
    return Losses(sums, counts, edges)


def perplexity(loss: float) -> float:
    """Return exp(loss); math.exp raises an OverflowError above 709."""
    return math.exp(loss) if loss < 700 else math.inf
