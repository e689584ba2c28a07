"""Orders that are computed: permutations without a table, and mixtures that keep their weights."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.data.order import Mixer, key, shuffled


@settings(deadline=None)
@given(size=st.integers(1, 600), seed=st.integers(0, 2**64))
def test_every_index_goes_to_a_place_of_its_own(size: int, seed: int) -> None:
    assert sorted(shuffled(index, size, seed) for index in range(size)) == list(range(size))


def test_a_corpus_of_any_size_is_shuffled_at_once() -> None:
    size = 10**15
    places = {shuffled(index, size, 7) for index in range(1_000)}
    assert len(places) == 1_000
    assert max(places) > 0.99 * size
    assert min(places) < 0.01 * size


def test_the_order_is_the_one_that_earlier_runs_were_trained_in() -> None:
    first, second = (
        [shuffled(at, 10, key(1337, epoch, 0)) for at in range(10)] for epoch in (0, 1)
    )
    assert first == [5, 2, 8, 0, 9, 7, 4, 1, 3, 6]
    assert second == [9, 3, 1, 0, 8, 6, 5, 4, 7, 2]


def test_first_places_and_distances_are_spread_as_chance_would_spread_them() -> None:
    """Chi-square over 4,000 keys; 12 values each, so 11 and 10 degrees of freedom."""
    size, draws = 12, 4_000
    orders = [[shuffled(index, size, key("chance", at)) for index in (0, 1)] for at in range(draws)]
    firsts = Counter(first for first, _ in orders)
    steps = Counter((second - first) % size for first, second in orders)
    assert chi_square(firsts, size, draws) < 31.3  # one in a thousand
    assert chi_square(steps, size - 1, draws) < 29.6


def chi_square(counts: Counter[int], kinds: int, draws: int) -> float:
    assert len(counts) == kinds
    expected = draws / kinds
    return sum((count - expected) ** 2 / expected for count in counts.values())


@settings(deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=5),
    start=st.integers(0, 10**15),
)
def test_a_mixture_spreads_its_sources_evenly_and_counts_each_without_a_gap(
    weights: list[float], start: int
) -> None:
    shares = [weight / sum(weights) for weight in weights]
    mixer = Mixer(shares, [str(source) for source in range(len(shares))])
    taken: dict[int, list[int]] = {source: [] for source in range(len(shares))}
    for position in range(start, start + 300):
        source, index = mixer.locate(position)
        taken[source].append(index)
    for source, indices in taken.items():
        assert indices == list(range(indices[0], indices[0] + len(indices))) if indices else True
        assert abs(len(indices) - 300 * shares[source]) < len(shares) + 1
    if start == 0:
        assert all(indices[0] == 0 for indices in taken.values() if indices)


def test_a_mixture_begins_each_source_at_its_first_sample() -> None:
    mixer = Mixer([0.5, 0.3, 0.2], ["a", "b", "c"])
    places = [mixer.locate(position) for position in range(10)]
    assert [sorted(index for source, index in places if source == at) for at in range(3)] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2],
        [0, 1],
    ]


def test_a_share_too_small_to_keep_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"data\.source: 'rare' would get 1e-07"):
        Mixer([1 - 1e-7, 1e-7], ["common", "rare"])


def test_keys_differ_where_any_part_differs() -> None:
    parts = [(1, 23), (12, 3), (1, 2, 3), (123,), ("1", 24), (0, 23)]
    assert len({key(*some) for some in parts}) == len(parts)
