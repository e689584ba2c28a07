"""Sequences of the tasks: labels are right, facts lie where they should, and nothing leaks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa.evaluate.tasks.episodes import (
    FILLERS,
    IGNORE_INDEX,
    KEYS,
    VALUES,
    VOCABULARY,
    needle,
    recall,
)

FIRST_FACT = KEYS + VALUES + FILLERS


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def facts_of(sequence: Tensor) -> dict[int, tuple[int, int]]:
    """Each key of a sequence: its value's token, and where its fact is."""
    found = {}
    for position, token in enumerate(sequence.tolist()):
        if token >= FIRST_FACT:
            key, value = divmod(token - FIRST_FACT, VALUES)
            assert key not in found, "a key has two facts"
            found[key] = (KEYS + value, position)
    return found


@pytest.mark.parametrize("seq_len", [32, 64, 130])
def test_every_label_is_the_value_that_the_fact_of_the_asked_key_gives(seq_len: int) -> None:
    for episodes in (recall(draw(), 16, seq_len, 8), needle(draw(), 16, seq_len, 4, 0.5)):
        rows = zip(episodes.input_ids, episodes.labels, episodes.distance, strict=True)
        for ids, labels, distance in rows:
            facts = facts_of(ids)
            asked = (labels != IGNORE_INDEX).nonzero()[:, 0].tolist()
            assert asked
            for position in asked:
                value, place = facts[int(ids[position])]
                assert labels[position] == value
                assert distance[position] == position - place > 0
            elsewhere = labels == IGNORE_INDEX
            assert not distance[elsewhere].any()


def test_recall_asks_at_every_position_of_the_second_half_about_facts_of_the_first() -> None:
    episodes = recall(draw(), 8, 64, 6)
    assert (episodes.labels[:, :32] == IGNORE_INDEX).all()
    assert (episodes.labels[:, 32:] != IGNORE_INDEX).all()
    assert ((episodes.input_ids >= FIRST_FACT).sum(1) == 6).all()
    assert (episodes.input_ids[:, 32:] < KEYS).all()


def test_no_answer_is_written_down() -> None:
    for episodes in (recall(draw(), 64, 64, 8), needle(draw(), 64, 64, 4, 0.2)):
        ids = episodes.input_ids
        assert not ((ids >= KEYS) & (ids < KEYS + VALUES)).any()
        assert ids.max() < VOCABULARY
        before = episodes.labels == IGNORE_INDEX
        assert (ids[before] >= KEYS).all(), "a key is shown where nothing is asked"


def test_neither_the_key_nor_the_place_tells_the_answer() -> None:
    """Knowing either, the best guess is right as often as among all values."""
    episodes = recall(draw(), 4_000, 32, 4)
    asked = episodes.labels != IGNORE_INDEX
    values = episodes.labels[asked] - KEYS
    for known in (episodes.input_ids[asked], episodes.distance[asked]):
        table = torch.zeros(int(known.max()) + 1, VALUES)
        table.index_put_((known, values), torch.ones(len(values)), accumulate=True)
        often = table[table.sum(1) > 2_000]
        assert (often.amax(1) / often.sum(1)).max() < 0.12


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_the_needle_lies_at_its_depth_among_other_facts(depth: float) -> None:
    episodes = needle(draw(), 200, 41, 12, depth)
    assert (episodes.labels[:, :-1] == IGNORE_INDEX).all()
    for ids, distance in zip(episodes.input_ids, episodes.distance, strict=True):
        facts = facts_of(ids)
        assert len(facts) == 12, "another fact was written over"
        assert facts[int(ids[-1])][1] == round(depth * 39) == 40 - int(distance[-1])


def test_the_same_seed_gives_the_same_sequences_and_another_one_others() -> None:
    first, second = (recall(draw(3), 4, 64, 8) for _ in range(2))
    assert first.input_ids.equal(second.input_ids)
    assert not recall(draw(4), 4, 64, 8).input_ids.equal(first.input_ids)


@pytest.mark.parametrize(("seq_len", "facts"), [(16, 9), (64, 17)])
def test_facts_that_find_no_room_or_key_are_refused(seq_len: int, facts: int) -> None:
    with pytest.raises(ValueError, match=f"{facts} facts: .* take fewer facts"):
        recall(draw(), 1, seq_len, facts)
    with pytest.raises(ValueError, match=f"{facts} facts: .* take fewer facts"):
        needle(draw(), 1, seq_len // 2, facts, 0.5)
