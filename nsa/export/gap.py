"""How far a model is from the dense one that it was made of, on text that neither has learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.data.batches import IGNORED, Batch
from nsa.data.config import DataConfig
from nsa.data.feed import open_held_out
from nsa.model import LanguageModel

TOKENS = 16_384  # judged for each length
AT_ONCE = 2**25  # logits of each model


@dataclass(frozen=True)
class Gap:
    """Means over the tokens of texts of `seq_len` tokens."""

    seq_len: int
    dense_loss: float
    loss: float
    kl: float  # nats: of the dense model's distribution of the next token from the other's
    same: float  # share of tokens for which both find the same one the likeliest

    def __str__(self) -> str:
        more, kl = (round(x, 4) + 0.0 for x in (self.loss - self.dense_loss, self.kl))  # no -0
        return (
            f"{self.seq_len:>10,}{self.dense_loss:>12.4f}{self.loss:>12.4f}{more:>+10.4f}"
            f"{kl:>10.4f}{self.same:>12.1%}"
        )


HEADER = f"{'tokens':>10}{'dense loss':>12}{'NSA loss':>12}{'more':>10}{'KL':>10}{'same first':>12}"


def gaps(
    dense: LanguageModel, sparse: LanguageModel, data: DataConfig, lengths: Sequence[int]
) -> list[Gap]:
    """The gap on held-out text of `data.source`, for texts of each length."""
    found = []
    for length in lengths:
        count = max(1, TOKENS // length)
        text = open_held_out(
            replace(data, seq_len=length, packing="concat"),
            sequences=count,
            micro_batch=1,
            world_size=1,
        )
        try:
            found.append(gap(dense, sparse, text.batches(0)))
        finally:
            text.close()
    return found


@torch.no_grad()
def gap(dense: LanguageModel, sparse: LanguageModel, batches: Sequence[Batch]) -> Gap:
    """The gap on these batches."""
    total = torch.zeros(5, dtype=torch.float64)
    for batch in batches:
        hidden = [model.hidden(batch.input_ids)[0] for model in (dense, sparse)]
        rows = max(1, AT_ONCE // dense.config.vocab_size)
        parts = zip(*(x.split(rows) for x in (*hidden, batch.labels.flatten())), strict=True)
        for of_dense, of_sparse, labels in parts:
            log_p = _log_p(of_dense, dense), _log_p(of_sparse, sparse)
            total += _sums(*log_p, labels)
    dense_loss, loss, kl, same, count = total.tolist()
    length = batches[0].input_ids.shape[1]
    return Gap(length, dense_loss / count, loss / count, kl / count, same / count)


def _log_p(hidden: Tensor, model: LanguageModel) -> Tensor:
    return F.log_softmax(F.linear(hidden, model.embed.weight).float(), -1)


def _sums(dense: Tensor, sparse: Tensor, labels: Tensor) -> Tensor:
    """Of both losses, of KL and of agreement over the tokens that are judged, and how many."""
    kept = labels != IGNORED
    dense, sparse, labels = dense[kept], sparse[kept], labels[kept]
    kl = (dense.exp() * (dense - sparse)).sum(-1)
    same = dense.argmax(-1) == sparse.argmax(-1)
    losses = (-x.gather(-1, labels[:, None])[:, 0] for x in (dense, sparse))
    return torch.stack([x.double().sum() for x in (*losses, kl, same, kept)])
