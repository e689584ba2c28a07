"""Which tokens are judged, and how much text each of them has before it.

    a sample:                 |----------------- the longest --seq-len -----------------|
    at half of that length:   |============================|============================|
    with --stride as well:    |============================|
                                         ...context...     |========|
                                                  ...context...     |========|

All lengths and strides judge the same tokens, each one once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nsa.constants import IGNORE_INDEX
from nsa.data.batch_source import build_batches, open_batches
from nsa.data.batches import Batch, Batches, to_batch
from nsa.data.config import DataConfig
from nsa.data.source import ALL, DataError
from nsa.data.stream import collect
from nsa.data.tokenizer import TokenArray, Tokenizer
from nsa.data.validation import VALIDATION_SHAPE


@dataclass(frozen=True)
class Text:
    """The first samples of a text, in the order in which training judges them."""

    samples: Batches
    count: int  # of samples; each comes once
    shortest: str | None  # the source whose text ends there, where more was asked for

    @property
    def tokens(self) -> int:
        """How many are read, of which an end of text may have no successor to be predicted."""
        return self.count * self.samples.seq_len


@dataclass(frozen=True)
class Piece:
    """A batch, and where its tokens belong."""

    batch: Batch
    sample: torch.Tensor  # of each label, flattened as labels are
    position: torch.Tensor  # how many tokens of its context each has before it


@dataclass(frozen=True)
class _Window:
    sample: int
    tokens: TokenArray  # T + 1
    judged: slice  # of its T labels


def open_text(config: DataConfig, split: str, tokens: int, tokenizer: Tokenizer) -> Text:
    """The text of `data.source` that holds `tokens` tokens, in samples of `data.seq_len`.

    A source of tokens that are all there is cut as in training, another is read until it is enough.
    """
    from nsa.data.shards import is_prepared

    for name in config.parts():
        if split == ALL and is_prepared(name):
            raise DataError(
                f"--split all: data.source = {name!r} was divided when it was prepared; choose "
                "held_out or train"
            )
    count = max(1, tokens // config.seq_len)
    samples = open_batches(config, split, **VALIDATION_SHAPE)
    if samples is None:
        stores = list(collect(config, count * config.seq_len + 1, split=split))
        samples = build_batches(stores, config, **VALIDATION_SHAPE)
    for store in samples.stores:
        if store.tokenizer != tokenizer.fingerprint:
            raise DataError(
                f"data.source: the tokens of {store.name} were made by the tokenizer "
                f"{store.tokenizer_name!r} and the run's are {tokenizer.name!r}'s; name text that "
                "is not prepared, or prepare it with the run's"
            )
    repeat = samples.first_repeat(count)
    return Text(samples, count, None) if repeat is None else Text(samples, *repeat)


def pieces(text: Text, seq_len: int, stride: int, rows: int) -> Iterator[Piece]:
    """All of `text` in windows of `seq_len` tokens, of each of which `stride` more are judged."""
    found: list[_Window] = []
    for window in _windows(text, seq_len, stride):
        found.append(window)
        if len(found) == rows:
            yield _piece(text, found)
            found = []
    if found:
        yield _piece(text, found)


def _windows(text: Text, seq_len: int, stride: int) -> Iterator[_Window]:
    for sample in range(text.count):
        store, start = text.samples.locate(sample)
        for first in range(start, start + text.samples.seq_len, stride):
            begin = max(0, first + stride - seq_len)
            judged = slice(first - begin, first - begin + stride)
            yield _Window(sample, store.read(begin, begin + seq_len + 1), judged)


def _piece(text: Text, windows: Sequence[_Window]) -> Piece:
    rows = np.stack([window.tokens for window in windows])
    batch = to_batch(rows, text.samples.stores[0].eos_id, text.samples.packing)
    labels = batch.labels.view(len(windows), -1)
    for row, window in zip(labels, windows, strict=True):
        row[: window.judged.start] = IGNORE_INDEX
        row[window.judged.stop :] = IGNORE_INDEX
    length = labels.shape[1]
    token = torch.arange(labels.numel())
    starts = torch.arange(0, len(token), length)
    if batch.cu_seqlens is not None:
        starts = batch.cu_seqlens[:-1].long()
    samples = torch.tensor([window.sample for window in windows]).repeat_interleave(length)
    position = token - starts[torch.searchsorted(starts, token, right=True) - 1]
    return Piece(batch, samples, position)
