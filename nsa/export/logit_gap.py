"""Logit gap between a dense model and the NSA model converted from it, on validation data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch
from nsa.data.config import DataConfig
from nsa.data.validation_data import ValidationData
from nsa.model import AttentionConfig, LanguageModel

TOKENS = 8_192  # evaluated at each length
CHUNK_LOGITS = 2**25  # of each model at a time


def read_samples(data: DataConfig, attention: AttentionConfig) -> list[Batch]:
    """Read samples of the longest length from the validation split of `data.source`."""
    longest = _lengths(attention)[-1]
    data = replace(data, seq_len=longest, packing="concat")
    samples = max(1, TOKENS // longest)
    validation = ValidationData(data, sequences=samples, micro_batch=1, world_size=1)
    with closing(validation):
        return validation.batches(0)


def logit_gaps(dense: LanguageModel, sparse: LanguageModel, samples: list[Batch]) -> Iterator[str]:
    """Yield the lines of a table: both models on the samples, cut to each length.

    Columns: both mean losses, the increase, KL(dense ‖ NSA) of the next-token distributions in
    nats, and the fraction of positions at which both models predict the same token.
    """
    highest = max(int(batch.input_ids.max()) for batch in samples)
    if highest >= dense.config.vocab_size:
        raise ValueError(
            f"--gap: the dataset has token ids up to {highest}, but the model's vocabulary is "
            f"{dense.config.vocab_size}; set data.tokenizer to the model's"
        )
    columns = ("dense loss", 12), ("NSA loss", 12), ("increase", 10), ("KL", 10), ("same top-1", 12)
    yield f"{'tokens':>10}" + "".join(f"{name:>{width}}" for name, width in columns)
    for length in _lengths(sparse.config.attention):
        sums = torch.zeros(5, dtype=torch.float64)
        for batch in samples:
            sums += _compare_batch(dense, sparse, batch, length)
        dense_loss, loss, kl, same = (sums[:4] / sums[4]).tolist()
        increase, kl = (round(x, 4) + 0.0 for x in (loss - dense_loss, kl))  # no -0
        yield (
            f"{length:>10,}{dense_loss:>12.4f}{loss:>12.4f}{increase:>+10.4f}{kl:>10.4f}"
            f"{same:>12.1%}"
        )


def _lengths(attention: AttentionConfig) -> list[int]:
    """Double half of the window, which no branch cuts, to at least twice what a branch can see."""
    spec = attention.spec
    lengths = [max(1, spec.window // 2)]
    while lengths[-1] < 2 * max(spec.window, spec.select_top * spec.select_len):
        lengths.append(2 * lengths[-1])
    return lengths


@torch.no_grad()
def _compare_batch(
    dense: LanguageModel, sparse: LanguageModel, batch: Batch, length: int
) -> Tensor:
    """Sum `compare` over a batch cut into sequences of `length` tokens."""
    rows = max(1, CHUNK_LOGITS // dense.config.vocab_size)
    total = torch.zeros(5, dtype=torch.float64)
    for ids, labels in zip(
        batch.input_ids.view(-1, length), batch.labels.view(-1, length), strict=True
    ):
        hidden = [model.hidden(ids[None])[0].split(rows) for model in (dense, sparse)]
        for *states, label in zip(*hidden, labels.split(rows), strict=True):
            log_p = [
                F.log_softmax(F.linear(x, model.head_weight).float(), -1)
                for x, model in zip(states, (dense, sparse), strict=True)
            ]
            total += compare(log_p[0], log_p[1], label)
    return total


def compare(dense: Tensor, sparse: Tensor, labels: Tensor) -> Tensor:
    """Sum both losses, KL, equal predictions and 1 over the labels that are not ignored.

    `dense` and `sparse` are log-probabilities [tokens, V].
    """
    counted = labels != IGNORE_INDEX
    dense, sparse, labels = dense[counted], sparse[counted], labels[counted]
    kl = (dense.exp() * (dense - sparse)).sum(-1)
    same = dense.argmax(-1) == sparse.argmax(-1)
    losses = (-x.gather(-1, labels[:, None])[:, 0] for x in (dense, sparse))
    return torch.stack([x.double().sum() for x in (*losses, kl, same, counted)])
