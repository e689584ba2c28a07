"""Stateless shuffling and mixing: each position of an endless order is computed, not stored.

position  ->  (source, sample number)  ->  (epoch, index)  ->  shuffled index
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

ROUNDS = 6
RESOLUTION = 1_000_000  # of the weights of a mixture
_MASK = 2**64 - 1


def hash64(*parts: int | str) -> int:
    """Return a 64-bit hash of `parts`."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def shuffled_index(index: int, size: int, shuffle_key: int) -> int:
    """Return the image of `index` under a pseudo-random permutation of range(size).

    A Feistel network over the next power of four is applied until the result is within range.
    There is no table, so shuffling a corpus of any size, or resuming within it, costs nothing.
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
    """Apply the finaliser of SplitMix64: every input bit affects every output bit."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


class Mixer:
    """Assigns positions to sources by weight, spread as evenly as integers allow.

    The first source gets its fraction of all positions, the second its fraction of the rest, and
    so on. The number of earlier positions of a source is a division, so there is no state.
    """

    def __init__(self, fractions: Sequence[float], names: Sequence[str]) -> None:
        self._counts = _round_to_total(fractions, RESOLUTION)
        for name, fraction, count in zip(names, fractions, self._counts, strict=True):
            if count == 0:
                raise ValueError(
                    f"data.source: {name!r} would get {fraction:.2g} of the samples; give it at "
                    f"least {1 / RESOLUTION:g}, or leave it out"
                )

    def locate(self, position: int) -> tuple[int, int]:
        """Return the source of a position, and the number of its earlier positions."""
        left = RESOLUTION
        for source, count in enumerate(self._counts):
            before = position * count // left
            if (position + 1) * count // left > before:
                return source, before
            position -= before
            left -= count
        raise AssertionError("the last source gets every remaining position")


def _round_to_total(fractions: Sequence[float], total: int) -> list[int]:
    """Return integers proportional to `fractions` with sum `total`; round up largest remainders."""
    exact = [fraction * total for fraction in fractions]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts
