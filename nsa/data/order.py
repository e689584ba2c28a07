"""Orders that are computed, not stored: any place of an endless sequence, at once.

position  ->  (source, number of the source's sample)  ->  (epoch, index)  ->  shuffled index
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

ROUNDS = 6
PERIOD = 10_000  # samples within which a mixture keeps its weights exactly
_WORD = 2**64 - 1


def key(*parts: int | str) -> int:
    """A number that two different lists of parts do not share."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def shuffled(index: int, size: int, shuffle_key: int) -> int:
    """Where a permutation of range(size) sends `index`.

    A Feistel network over the next power of four, walked until it comes back into the range: no
    table, so a corpus of any size costs nothing to shuffle and a resumed run nothing to find its
    place.
    """
    assert 0 <= index < size
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_mix(right + shuffle_key + number) & mask)
        index = left << half | right
        if index < size:
            return index


def _mix(x: int) -> int:
    """Every bit of x on every bit of the result (the finaliser of SplitMix64)."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


class Mixer:
    """Deals positions out to sources by weight: in each period every source gets its exact share."""

    def __init__(self, shares: Sequence[float], seed: int, names: Sequence[str]) -> None:
        self._counts = _whole(shares, PERIOD)
        for name, share, count in zip(names, shares, self._counts, strict=True):
            if count == 0:
                raise ValueError(
                    f"data.source: {name!r} would get {share:.2g} of the samples; give it at "
                    f"least {1 / PERIOD:g}, or leave it out"
                )
        self._ends = list(accumulate(self._counts))
        self._seed = seed

    def place(self, position: int) -> tuple[int, int]:
        """Which source a position belongs to, and how many that source has had before it."""
        if len(self._counts) == 1:
            return 0, position
        period, slot = divmod(position, PERIOD)
        slot = shuffled(slot, PERIOD, key(self._seed, "mixture", period))
        source = bisect_right(self._ends, slot)
        before = self._ends[source] - self._counts[source]
        return source, period * self._counts[source] + slot - before


def _whole(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to `shares` that add up to `total`; the largest rests round up."""
    exact = [share * total for share in shares]
    counts = [int(value) for value in exact]
    by_rest = sorted(range(len(shares)), key=lambda at: counts[at] - exact[at])
    for at in by_rest[: total - sum(counts)]:
        counts[at] += 1
    return counts
