"""Sequences with questions that only what stood before them can answer.

    recall   · f f · f · · f  k k k k k k k k     facts in the first half; the second one asks
    needle   · · · · f · · · · · · · f · · k      one of them at a given depth; the end asks for it

A fact is one token that stands for a key and a value, a question is a key, and its label is the
value that the fact with this key gave it in this sequence. Keys, values and places are drawn anew
each time, and no answer is ever written down: nothing but the fact tells it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.constants import IGNORE_INDEX

KEYS = VALUES = FILLERS = 16
_FACTS = KEYS + VALUES + FILLERS  # the first token that is a fact
VOCABULARY = _FACTS + KEYS * VALUES


@dataclass(frozen=True)
class Episodes:
    """Sequences of one length, [B, T] each."""

    input_ids: Tensor
    labels: Tensor  # the value at a question, else -100
    distance: Tensor  # at a question, how many positions back its fact is; else 0


def recall(draw: torch.Generator, batch: int, seq_len: int, facts: int) -> Episodes:
    """Multi-query associative recall: every position of the second half asks for some fact."""
    half = seq_len // 2
    if facts > min(half, KEYS):
        raise ValueError(
            f"{facts} facts: the first half of {seq_len} positions holds {half}, and there are "
            f"{KEYS} keys; take fewer facts"
        )
    asked = torch.arange(half, seq_len).expand(batch, -1)
    which = torch.randint(facts, asked.shape, generator=draw)
    return _written(draw, seq_len, _some(draw, batch, half, facts), asked, which)


def needle(draw: torch.Generator, batch: int, seq_len: int, facts: int, depth: float) -> Episodes:
    """A needle in a haystack of filler and other facts; the last position asks for it.

    It lies at the share `depth` of the positions before the question.
    """
    before = seq_len - 1
    if facts > min(before, KEYS):
        raise ValueError(
            f"{facts} facts: {before} positions come before the question, and there are {KEYS} "
            "keys; take fewer facts, or a longer context"
        )
    at = _some(draw, batch, before, facts)
    place = round(depth * (before - 1))
    at[:, 1:] = at[:, 1:].where(at[:, 1:] != place, at[:, :1])  # who lies there changes places
    at[:, 0] = place
    asked = torch.full((batch, 1), before)
    return _written(draw, seq_len, at, asked, torch.zeros_like(asked))


def _written(
    draw: torch.Generator, seq_len: int, at: Tensor, asked: Tensor, which: Tensor
) -> Episodes:
    """Facts at `at` [B, facts], questions at `asked` [B, questions] for the facts `which`."""
    batch, facts = at.shape
    keys = _some(draw, batch, KEYS, facts)
    values = torch.randint(VALUES, keys.shape, generator=draw)
    ids = KEYS + VALUES + torch.randint(FILLERS, (batch, seq_len), generator=draw)
    ids.scatter_(1, at, _FACTS + keys * VALUES + values).scatter_(1, asked, keys.gather(1, which))
    labels = torch.full_like(ids, IGNORE_INDEX).scatter_(1, asked, KEYS + values.gather(1, which))
    distance = torch.zeros_like(ids).scatter_(1, asked, asked - at.gather(1, which))
    return Episodes(ids, labels, distance)


def _some(draw: torch.Generator, batch: int, count: int, wanted: int) -> Tensor:
    """`wanted` different numbers below `count` for each of the batch, in a random order."""
    return torch.rand(batch, count, generator=draw).argsort(1)[:, :wanted]
