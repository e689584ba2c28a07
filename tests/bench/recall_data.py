"""Associative recall and needle-in-a-haystack sequences.

    recall     · f f · f · · f  k k k k k k k k   facts in the first half, questions in the second
    two hops   · p f · p · · f  k K k K k K k K   half of the facts are pointers
    needle     · · · · f · · · · · · · f · · k    a fact at a given depth; the question at the end

A fact is a token that encodes a key and a value. A question is a key; its label is the value of the
fact with that key. A pointer is a token that encodes a key k and the key K of a fact: the label of
k is K, and the label of K, the next token, is the value. Keys, values and positions are random in
each sequence, so only the facts reveal the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.constants import IGNORE_INDEX

# Token ids in this order: keys, values, fillers, facts, pointers.
KEYS = VALUES = FILLERS = 16
FIRST_FACT = KEYS + VALUES + FILLERS
FIRST_POINTER = FIRST_FACT + KEYS * VALUES
VOCABULARY = {1: FIRST_POINTER, 2: FIRST_POINTER + KEYS * KEYS}  # number of ids, by hops


@dataclass(frozen=True)
class TaskBatch:
    """Sequences of one length, [B, T] each."""

    input_ids: Tensor
    labels: Tensor  # the value at a question, else IGNORE_INDEX
    distance: Tensor  # at a question, positions back to its fact; else 0


def recall(rng: torch.Generator, batch: int, seq_len: int, facts: int, hops: int = 1) -> TaskBatch:
    """Return multi-query associative recall: each position of the second half is a question.

    With two hops, even positions ask for pointers and odd ones for the facts they lead to.
    """
    half = seq_len // 2
    assert facts <= min(half, KEYS)
    assert half % hops == facts % hops == 0
    questions = torch.arange(half, seq_len).expand(batch, -1)
    fact_index = torch.randint(facts // hops, (batch, half // hops), generator=rng)
    if hops == 2:
        fact_index = torch.stack((fact_index, fact_index + facts // 2), -1).flatten(1)
    positions = _distinct(rng, batch, half, facts)
    return _build(rng, seq_len, positions, questions, fact_index, hops)


def needle(rng: torch.Generator, batch: int, seq_len: int, facts: int, depth: float) -> TaskBatch:
    """Return a fact at the fraction `depth` of the context, among filler and other facts.

    The last position is the question.
    """
    context = seq_len - 1
    assert facts <= min(context, KEYS)
    positions = _distinct(rng, batch, context, facts)
    target = round(depth * (context - 1))
    # A fact that lies at the target swaps positions with the needle, which is the first fact.
    positions[:, 1:] = positions[:, 1:].where(positions[:, 1:] != target, positions[:, :1])
    positions[:, 0] = target
    question = torch.full((batch, 1), context)
    return _build(rng, seq_len, positions, question, torch.zeros_like(question))


def _build(
    rng: torch.Generator,
    seq_len: int,
    positions: Tensor,
    questions: Tensor,
    fact_index: Tensor,
    hops: int = 1,
) -> TaskBatch:
    """Place facts at `positions` [B, facts]; at `questions` ask for the facts `fact_index`.

    With two hops, the facts of the first half point to those of the second.
    """
    batch, facts = positions.shape
    keys = _distinct(rng, batch, KEYS, facts)
    values = torch.randint(VALUES, keys.shape, generator=rng)
    tokens, answers = FIRST_FACT + keys * VALUES + values, KEYS + values
    if hops == 2:
        half = facts // 2
        tokens[:, :half] = FIRST_POINTER + keys[:, :half] * KEYS + keys[:, half:]
        answers[:, :half] = keys[:, half:]
    ids = KEYS + VALUES + torch.randint(FILLERS, (batch, seq_len), generator=rng)
    ids.scatter_(1, positions, tokens)
    ids.scatter_(1, questions, keys.gather(1, fact_index))
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels.scatter_(1, questions, answers.gather(1, fact_index))
    distance = torch.zeros_like(ids)
    distance.scatter_(1, questions, questions - positions.gather(1, fact_index))
    return TaskBatch(ids, labels, distance)


def _distinct(rng: torch.Generator, batch: int, below: int, count: int) -> Tensor:
    """Return `count` distinct random numbers below `below`, for each of the batch."""
    return torch.rand(batch, below, generator=rng).argsort(1)[:, :count]
