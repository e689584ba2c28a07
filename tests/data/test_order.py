"""Stateless order: permutations without a table, and mixtures that keep their weights."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.data.order import Mixer, hash64, shuffled_index


@settings(deadline=None)
@given(size=st.integers(1, 600), seed=st.integers(0, 2**64))
def test_shuffled_indices_are_a_permutation(size: int, seed: int) -> None:
    assert sorted(shuffled_index(index, size, seed) for index in range(size)) == list(range(size))


def test_a_corpus_of_any_size_is_shuffled_without_a_table() -> None:
    size = 10**15
    indices = {shuffled_index(index, size, 7) for index in range(1_000)}
    assert len(indices) == 1_000
    assert max(indices) > 0.99 * size
    assert min(indices) < 0.01 * size


@settings(deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=5),
    start=st.integers(0, 10**15),
)
def test_a_mixture_spreads_its_sources_evenly_and_numbers_each_without_gaps(
    weights: list[float], start: int
) -> None:
    fractions = [weight / sum(weights) for weight in weights]
    mixer = Mixer(fractions, [str(source) for source in range(len(fractions))])
    numbers: dict[int, list[int]] = {source: [] for source in range(len(fractions))}
    for position in range(start, start + 300):
        source, index = mixer.locate(position)
        numbers[source].append(index)
    for source, indices in numbers.items():
        assert indices == list(range(indices[0], indices[0] + len(indices))) if indices else True
        assert abs(len(indices) - 300 * fractions[source]) < len(fractions) + 1


def test_a_fraction_below_the_resolution_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"data\.source: 'rare' would get 1e-07"):
        Mixer([1 - 1e-7, 1e-7], ["common", "rare"])


def test_keys_differ_if_any_part_differs() -> None:
    parts = [(1, 23), (12, 3), (1, 2, 3), (123,), ("1", 24), (0, 23)]
    assert len({hash64(*each) for each in parts}) == len(parts)
