"""Logit gap between a dense model and the NSA model converted from it, on validation data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch, first_samples
from nsa.data.config import DataConfig
from nsa.data.dataset import open_dataset
from nsa.data.validation_data import VALIDATION_SEED
from nsa.model import AttentionConfig, LanguageModel
from nsa.model.distillation import token_divergence

TOKENS = 8_192  # evaluated at each length


def read_samples(data: DataConfig, attention: AttentionConfig) -> Batch:
    """Read samples of the longest length from the validation split of `data.source`."""
    longest = _lengths(attention)[-1]
    dataset = open_dataset(replace(data, seq_len=longest, packing="concat"))
    requested = max(1, TOKENS // longest)
    samples = first_samples(dataset, "val", VALIDATION_SEED, requested)
    return samples.batch(range(samples.available(requested)[0]))


def logit_gaps(dense: LanguageModel, sparse: LanguageModel, batch: Batch) -> Iterator[str]:
    """Yield the lines of a table: both models on the samples, cut to each length.

    Columns: both mean losses, the increase, KL(dense ‖ NSA) of the next-token distributions in
    nats, and the fraction of positions at which both models predict the same token.
    """
    highest = int(batch.input_ids.max())
    if highest >= dense.config.vocab_size:
        raise ValueError(
            f"--gap: the dataset has token ids up to {highest}, but the model's vocabulary is "
            f"{dense.config.vocab_size}; set data.tokenizer to the model's"
        )
    columns = ("dense loss", 12), ("NSA loss", 12), ("increase", 10), ("KL", 10), ("same top-1", 12)
    yield f"{'tokens':>10}" + "".join(f"{name:>{width}}" for name, width in columns)
    for length in _lengths(sparse.config.attention):
        sums = _compare(dense, sparse, batch, length)
        loss, dense_loss, kl, same = (sums[:4] / sums[4]).tolist()
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
def _compare(dense: LanguageModel, sparse: LanguageModel, batch: Batch, length: int) -> Tensor:
    """Sum `token_divergence` and the labels over a batch cut into sequences of `length` tokens."""
    total = torch.zeros(5, dtype=torch.float64)
    for ids, labels in zip(
        batch.input_ids.view(-1, length), batch.labels.view(-1, length), strict=True
    ):
        ours, theirs = ((x.hidden(ids[None])[0], x.head_weight) for x in (sparse, dense))
        total[:4] += token_divergence(ours, theirs, labels).double().sum(0)
        total[4] += (labels != IGNORE_INDEX).sum()
    return total
