"""Orders that are computed, not stored: any place of an endless sequence, at once.

position  ->  (source, number of the source's sample)  ->  (epoch, index)  ->  shuffled index
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

ROUNDS = 6
PARTS = 1_000_000  # weights of a mixture are kept to one part in so many
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
        for round_key in _round_keys(shuffle_key):
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        index = left << half | right
        if index < size:
            return index


@lru_cache(maxsize=64)
def _round_keys(shuffle_key: int) -> tuple[int, ...]:
    return tuple(_mix(shuffle_key + number) for number in range(ROUNDS))


def _mix(x: int) -> int:
    """Every bit of x on every bit of the result (the finaliser of SplitMix64)."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


class Mixer:
    """Deals positions out to sources by weight, as evenly as whole numbers can be spread.

    The first source takes its share of all positions, the second its share of what is left over,
    and so on. How many a source has had before is a division, so nothing has to be remembered.
    """

    def __init__(self, shares: Sequence[float], names: Sequence[str]) -> None:
        self._counts = _whole(shares, PARTS)
        for name, share, count in zip(names, shares, self._counts, strict=True):
            if count == 0:
                raise ValueError(
                    f"data.source: {name!r} would get {share:.2g} of the samples; give it at "
                    f"least {1 / PARTS:g}, or leave it out"
                )

    def locate(self, position: int) -> tuple[int, int]:
        """Which source a position belongs to, and how many that source has had before it."""
        left = PARTS
        for source, count in enumerate(self._counts):
            before = position * count // left
            if (position + 1) * count // left > before:
                return source, before
            position -= before
            left -= count
        raise AssertionError("the last source takes whatever is left")


def _whole(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers like `shares` that add up to `total`; the largest rests round up."""
    exact = [share * total for share in shares]
    counts = [int(value) for value in exact]
    by_rest = sorted(range(len(shares)), key=lambda at: counts[at] - exact[at])
    for at in by_rest[: total - sum(counts)]:
        counts[at] += 1
    return counts
