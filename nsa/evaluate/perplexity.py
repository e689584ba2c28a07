"""The loss of a model on text, by how much of the text it has seen before."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.constants import IGNORE_INDEX
from nsa.evaluate.text import Piece
from nsa.model import LanguageModel
from nsa.model.loss import token_losses

FIRST_BUCKET = 64  # tokens; each next bucket ends at twice the position


@dataclass(frozen=True)
class Mean:
    """A mean loss per token, and its standard error; None where there was one sample alone.

    Tokens of a sample are alike, so that samples are what is counted.
    """

    value: float
    error: float | None

    @classmethod
    def of(cls, losses: Tensor, counts: Tensor) -> Mean:
        """From the sum of losses and the number of tokens of each sample, [samples]."""
        total = counts.sum()
        value = losses.sum() / total
        samples = int((counts > 0).sum())
        if samples < 2:
            return cls(value.item(), None)
        spread = (losses - value * counts).square().sum() * samples / (samples - 1)
        return cls(value.item(), (spread.sqrt() / total).item())


@dataclass(frozen=True)
class Judged:
    """Losses of a model: sums over the tokens of each sample and bucket of positions."""

    losses: Tensor  # float64 [samples, buckets]
    counts: Tensor  # the tokens that were predicted
    edges: list[int]  # positions at which the buckets begin, and the end

    @property
    def tokens(self) -> int:
        """How many were predicted."""
        return int(self.counts.sum())

    @property
    def loss(self) -> Mean:
        """Over all tokens."""
        return Mean.of(self.losses.sum(1), self.counts.sum(1))

    def buckets(self) -> list[tuple[range, int, Mean]]:
        """Positions, tokens and loss of each bucket that has any."""
        return [
            (range(first, end), int(counts.sum()), Mean.of(losses, counts))
            for first, end, losses, counts in zip(
                self.edges[:-1], self.edges[1:], self.losses.T, self.counts.T, strict=True
            )
            if counts.any()
        ]

    def less(self, other: Judged) -> Mean:
        """By how much the loss is above that of another model on the same tokens.

        Its error is that of the differences: a text that is hard is so for both.
        """
        counts = self.counts.sum(1)
        assert torch.equal(counts, other.counts.sum(1))
        return Mean.of(self.losses.sum(1) - other.losses.sum(1), counts)


@torch.no_grad()
def judge(model: LanguageModel, found: Iterable[Piece], samples: int, seq_len: int) -> Judged:
    """The loss of every label in `found`; logits of a few tokens exist at a time."""
    edges = bucket_edges(seq_len)
    losses = torch.zeros(samples, len(edges) - 1, dtype=torch.float64)
    counts = torch.zeros_like(losses)
    inner = torch.tensor(edges[1:-1])
    weight = model.embed.weight
    for piece in found:
        batch = piece.batch.to(weight.device)
        hidden = model.hidden(batch.input_ids, batch.cu_seqlens).flatten(0, 1)
        labels = batch.labels.flatten()
        kept = labels != IGNORE_INDEX
        each = token_losses(hidden[kept], weight, labels[kept]).double().cpu()
        place = piece.sample * losses.shape[1] + torch.bucketize(piece.position, inner, right=True)
        place = place[kept.cpu()]
        losses.view(-1).index_add_(0, place, each)
        counts.view(-1).index_add_(0, place, torch.ones_like(each))
    return Judged(losses, counts, edges)


def bucket_edges(seq_len: int) -> list[int]:
    """0, 64, 128, 256 and so on, up to the length."""
    doublings = max(0, math.ceil(math.log2(seq_len / FIRST_BUCKET)))
    return [0, *(FIRST_BUCKET << number for number in range(doublings)), seq_len]
