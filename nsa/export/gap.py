"""How far a model is from the dense one that it was made of, on text that neither has learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch
from nsa.data.config import DataConfig
from nsa.data.validation import open_validation
from nsa.model import LanguageModel

TOKENS = 8_192  # judged for each length
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
) -> Iterator[Gap]:
    """The gap on held-out text of `data.source`, cut to each length; each divides the last."""
    longest = lengths[-1]
    text = open_validation(
        replace(data, seq_len=longest, packing="concat"),
        sequences=max(1, TOKENS // longest),
        micro_batch=1,
        world_size=1,
    )
    try:
        batches = text.batches(0)
    finally:
        text.close()
    highest = max(int(batch.input_ids.max()) for batch in batches)
    if highest >= dense.config.vocab_size:
        raise ValueError(
            f"--gap: data.tokenizer = {data.tokenizer!r} gives tokens up to {highest}, and the "
            f"model knows {dense.config.vocab_size}; set data.tokenizer to its own"
        )
    for length in lengths:
        total = sum(_sums(dense, sparse, batch, length) for batch in batches)
        assert isinstance(total, Tensor)
        *sums, count = total.tolist()
        yield Gap(length, *(x / count for x in sums))


@torch.no_grad()
def _sums(dense: LanguageModel, sparse: LanguageModel, batch: Batch, length: int) -> Tensor:
    """Over a sample's tokens, each with its own piece of `length` as context: see `compared`."""
    inputs, labels = (x.view(-1, length) for x in (batch.input_ids, batch.labels))
    rows = max(1, AT_ONCE // dense.config.vocab_size)
    total = torch.zeros(5, dtype=torch.float64)
    for some, wanted in zip(inputs, labels, strict=True):
        hidden = [model.hidden(some[None])[0] for model in (dense, sparse)]
        for of_dense, of_sparse, label in zip(
            *(x.split(rows) for x in (*hidden, wanted)), strict=True
        ):
            total += compared(_log_p(of_dense, dense), _log_p(of_sparse, sparse), label)
    return total


def _log_p(hidden: Tensor, model: LanguageModel) -> Tensor:
    return F.log_softmax(F.linear(hidden, model.embed.weight).float(), -1)


def compared(dense: Tensor, sparse: Tensor, labels: Tensor) -> Tensor:
    """Sums of both losses, KL and agreement over the labels that count, and their number."""
    kept = labels != IGNORE_INDEX
    dense, sparse, labels = dense[kept], sparse[kept], labels[kept]
    kl = (dense.exp() * (dense - sparse)).sum(-1)
    same = dense.argmax(-1) == sparse.argmax(-1)
    losses = (-x.gather(-1, labels[:, None])[:, 0] for x in (dense, sparse))
    return torch.stack([x.double().sum() for x in (*losses, kl, same, kept)])
