"""Task sequences: labels and positions are right, and only the fact reveals the answer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa.evaluate.tasks.data import (
    FIRST_FACT,
    FIRST_POINTER,
    IGNORE_INDEX,
    KEYS,
    VALUES,
    VOCABULARY,
    needle,
    recall,
)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def facts_of(sequence: Tensor) -> dict[int, tuple[int, int]]:
    """Return for each key of a sequence its value's token and its fact's position."""
    facts = {}
    for position, token in enumerate(sequence.tolist()):
        if token >= FIRST_FACT:
            key, value = divmod(token - FIRST_FACT, VALUES)
            assert key not in facts, "a key has two facts"
            facts[key] = (KEYS + value, position)
    return facts


@pytest.mark.parametrize("seq_len", [32, 64, 130])
def test_every_label_is_the_value_of_the_fact_with_the_questions_key(seq_len: int) -> None:
    for batch in (recall(rng(), 16, seq_len, 8), needle(rng(), 16, seq_len, 4, 0.5)):
        rows = zip(batch.input_ids, batch.labels, batch.distance, strict=True)
        for ids, labels, distance in rows:
            facts = facts_of(ids)
            questions = (labels != IGNORE_INDEX).nonzero()[:, 0].tolist()
            assert questions
            for position in questions:
                value, fact = facts[int(ids[position])]
                assert labels[position] == value
                assert distance[position] == position - fact > 0
            elsewhere = labels == IGNORE_INDEX
            assert not distance[elsewhere].any()


def test_recall_questions_fill_the_second_half_and_facts_are_in_the_first() -> None:
    batch = recall(rng(), 8, 64, 6)
    assert (batch.labels[:, :32] == IGNORE_INDEX).all()
    assert (batch.labels[:, 32:] != IGNORE_INDEX).all()
    assert ((batch.input_ids >= FIRST_FACT).sum(1) == 6).all()
    assert (batch.input_ids[:, 32:] < KEYS).all()


def test_answers_are_never_shown() -> None:
    for batch in (recall(rng(), 64, 64, 8), needle(rng(), 64, 64, 4, 0.2)):
        ids = batch.input_ids
        assert not ((ids >= KEYS) & (ids < KEYS + VALUES)).any()
        assert ids.max() < VOCABULARY[1]
        before = batch.labels == IGNORE_INDEX
        assert (ids[before] >= KEYS).all(), "a key is shown where there is no question"


def test_neither_key_nor_distance_predicts_the_answer() -> None:
    """The best guess from either is right no more often than chance."""
    batch = recall(rng(), 4_000, 32, 4)
    questions = batch.labels != IGNORE_INDEX
    values = batch.labels[questions] - KEYS
    for feature in (batch.input_ids[questions], batch.distance[questions]):
        table = torch.zeros(int(feature.max()) + 1, VALUES)
        table.index_put_((feature, values), torch.ones(len(values)), accumulate=True)
        frequent = table[table.sum(1) > 2_000]
        assert (frequent.amax(1) / frequent.sum(1)).max() < 0.12


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_the_needle_is_at_its_depth_among_other_facts(depth: float) -> None:
    batch = needle(rng(), 200, 41, 12, depth)
    assert (batch.labels[:, :-1] == IGNORE_INDEX).all()
    for ids, distance in zip(batch.input_ids, batch.distance, strict=True):
        facts = facts_of(ids)
        assert len(facts) == 12, "a fact was overwritten"
        assert facts[int(ids[-1])][1] == round(depth * 39) == 40 - int(distance[-1])


def test_sequences_are_a_function_of_the_seed() -> None:
    first, second = (recall(rng(3), 4, 64, 8) for _ in range(2))
    assert first.input_ids.equal(second.input_ids)
    assert not recall(rng(4), 4, 64, 8).input_ids.equal(first.input_ids)


def test_with_two_hops_an_answer_is_the_pointers_key_and_then_its_value() -> None:
    batch = recall(rng(), 16, 64, 8, hops=2)
    assert batch.input_ids.max() < VOCABULARY[2]
    for ids, labels, distance in zip(batch.input_ids, batch.labels, batch.distance, strict=True):
        facts = facts_of(ids * (ids < FIRST_POINTER))
        pointers = {}
        for position in (ids >= FIRST_POINTER).nonzero()[:, 0].tolist():
            key, to = divmod(int(ids[position]) - FIRST_POINTER, KEYS)
            pointers[key] = to, position
        assert len(pointers) == len(facts) == 4
        assert {to for to, _ in pointers.values()} == facts.keys()
        for position in range(32, 64, 2):
            to, first = pointers[int(ids[position])]
            value, second = facts[to]
            assert labels[position] == ids[position + 1] == to
            assert labels[position + 1] == value
            assert distance[position] == position - first
            assert distance[position + 1] == position + 1 - second
