"""Logit gap between a dense model and the NSA model converted from it, on validation data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch
from nsa.data.config import DataConfig
from nsa.data.validation import open_validation
from nsa.model import LanguageModel

TOKENS = 8_192  # evaluated at each length
CHUNK_LOGITS = 2**25  # of each model at a time


@dataclass(frozen=True)
class LogitGap:
    """Means over the tokens of texts of `seq_len` tokens."""

    seq_len: int
    dense_loss: float
    loss: float
    kl: float  # nats: KL(dense ‖ NSA) of the next-token distributions
    same: float  # fraction of tokens for which both models rank the same one first

    def __str__(self) -> str:
        more, kl = (round(x, 4) + 0.0 for x in (self.loss - self.dense_loss, self.kl))  # no -0
        return (
            f"{self.seq_len:>10,}{self.dense_loss:>12.4f}{self.loss:>12.4f}{more:>+10.4f}"
            f"{kl:>10.4f}{self.same:>12.1%}"
        )


HEADER = f"{'tokens':>10}{'dense loss':>12}{'NSA loss':>12}{'more':>10}{'KL':>10}{'same first':>12}"


def logit_gaps(
    dense: LanguageModel, sparse: LanguageModel, data: DataConfig, lengths: Sequence[int]
) -> Iterator[LogitGap]:
    """Compare on the validation split of `data.source`, cut to each length.

    Each length divides the last.
    """
    longest = lengths[-1]
    data = replace(data, seq_len=longest, packing="concat")
    samples = max(1, TOKENS // longest)
    validation = open_validation(data, sequences=samples, micro_batch=1, world_size=1)
    with closing(validation):
        batches = validation.batches(0)
    highest = max(int(batch.input_ids.max()) for batch in batches)
    if highest >= dense.config.vocab_size:
        raise ValueError(
            f"--gap: data.tokenizer = {data.tokenizer!r} gives tokens up to {highest}, but the "
            f"model's vocabulary is {dense.config.vocab_size}; set data.tokenizer to its own"
        )
    for length in lengths:
        sums = torch.zeros(5, dtype=torch.float64)
        for batch in batches:
            sums += _compare_batch(dense, sparse, batch, length)
        *totals, count = sums.tolist()
        yield LogitGap(length, *(total / count for total in totals))


@torch.no_grad()
def _compare_batch(
    dense: LanguageModel, sparse: LanguageModel, batch: Batch, length: int
) -> Tensor:
    """`compare`, summed over a sample cut into pieces of `length` tokens."""
    pieces = zip(batch.input_ids.view(-1, length), batch.labels.view(-1, length), strict=True)
    rows = max(1, CHUNK_LOGITS // dense.config.vocab_size)
    total = torch.zeros(5, dtype=torch.float64)
    for ids, labels in pieces:
        hidden = [model.hidden(ids[None])[0].split(rows) for model in (dense, sparse)]
        for of_dense, of_sparse, label in zip(*hidden, labels.split(rows), strict=True):
            total += compare(_log_p(of_dense, dense), _log_p(of_sparse, sparse), label)
    return total


def _log_p(hidden: Tensor, model: LanguageModel) -> Tensor:
    return F.log_softmax(F.linear(hidden, model.embed.weight).float(), -1)


def compare(dense: Tensor, sparse: Tensor, labels: Tensor) -> Tensor:
    """Sums over the labels that count: both losses, KL, agreement, and 1.

    `dense` and `sparse` are log-probabilities [tokens, V].
    """
    counted = labels != IGNORE_INDEX
    dense, sparse, labels = dense[counted], sparse[counted], labels[counted]
    kl = (dense.exp() * (dense - sparse)).sum(-1)
    same = dense.argmax(-1) == sparse.argmax(-1)
    losses = (-x.gather(-1, labels[:, None])[:, 0] for x in (dense, sparse))
    return torch.stack([x.double().sum() for x in (*losses, kl, same, counted)])
