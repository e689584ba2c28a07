"""Batches, and the shuffled order of samples: computed, not stored, so resuming costs nothing.

tokens  | s0 | s1 | s2 | ...    sample i: tokens[i·T : i·T + T + 1]
order   position     -> source, number   a mixture interleaves the samples of its sources
        number       -> epoch, index     each epoch reads every sample of the source
        epoch, index -> sample           shuffled within the epoch; in blocks if the store grows
step    micro-step 0: rank 0's rows, rank 1's rows; micro-step 1: ...
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from nsa.constants import IGNORE_INDEX
from nsa.data.shards import TokenStore
from nsa.data.tokenizer import TokenArray

MIN_BLOCK, MAX_BLOCK = 16, 512  # samples that are shuffled together in a store that grows
MANY_EPOCHS = 4  # further epochs lower the loss little (arXiv 2305.16264)
ROUNDS = 6  # of the Feistel network that shuffles
RESOLUTION = 1_000_000  # a source's fraction is rounded to a multiple of 1 / RESOLUTION
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Batch:
    """One rank's input to one forward pass; `labels[b, t]` follows `input_ids[b, t]`."""

    input_ids: torch.Tensor  # int64 [B, T], or [1, B·T] for packed documents
    labels: torch.Tensor  # int64, same shape, already shifted; -100: ignored
    cu_seqlens: torch.Tensor | None = None  # int32 [documents + 1]: start of each, and the end
    label_count: int | None = None  # labels that are not -100; None: all

    def positions(self) -> torch.Tensor:
        """Return each token's position in its document, [tokens]."""
        rows, length = self.input_ids.shape
        token = torch.arange(length, device=self.input_ids.device)
        if self.cu_seqlens is None:
            return token.repeat(rows)
        document = torch.searchsorted(self.cu_seqlens, token, right=True) - 1
        return token - self.cu_seqlens[document]

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device; the host does not wait until a GPU has it."""
        device = torch.device(device)

        def copy(x: torch.Tensor) -> torch.Tensor:
            return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)

        cu_seqlens = None if self.cu_seqlens is None else copy(self.cu_seqlens)
        return Batch(copy(self.input_ids), copy(self.labels), cu_seqlens, self.label_count)


def to_batch(rows: TokenArray, eos_id: int, packing: str) -> Batch:
    """Split rows [B, T + 1] into inputs and next-token labels.

    Packing "documents" concatenates the rows. A document ends at its eos token or at the end of its
    row, and the label of an eos token is ignored.
    """
    inputs = rows[:, :-1].astype(np.int64)  # [B, T]
    labels = rows[:, 1:].astype(np.int64)
    if packing == "concat":
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels))
    seq_len = inputs.shape[1]
    inputs, labels = inputs.reshape(1, -1), labels.reshape(1, -1)  # [1, B·T]
    is_eos = inputs[0] == eos_id
    labels[0, is_eos] = IGNORE_INDEX
    starts = np.zeros(inputs.size + 1, dtype=bool)  # [B·T + 1]: a document starts here
    starts[::seq_len] = True  # the first token of each row, and the end of the last row
    starts[1:] |= is_eos
    cu_seqlens = np.flatnonzero(starts).astype(np.int32)
    return Batch(
        torch.from_numpy(inputs),
        torch.from_numpy(labels),
        torch.from_numpy(cu_seqlens),
        label_count=inputs.size - int(is_eos.sum()),
    )


@dataclass(kw_only=True, eq=False)
class Samples:
    """Token stores cut into samples of T + 1 tokens, in an endless order.

    Position i of the order depends on the seed alone: however a global batch is divided among ranks
    and micro-steps, the order continues, and each epoch uses each sample exactly once.
    """

    stores: Sequence[TokenStore] = field(kw_only=False)
    fractions: Sequence[float] = (1.0,)  # of the samples, by store
    seq_len: int
    seed: int
    packing: str = "concat"

    def __post_init__(self) -> None:
        seq_len = self.seq_len
        self._weighted = list(zip(self.stores, self.fractions, strict=True))
        for store in self.stores:
            if self._wait_for(1, store) < 1:
                raise ValueError(
                    f"data.seq_len = {seq_len}: {store.name} has {len(store)} tokens in this "
                    f"split, fewer than the {seq_len + 1} of one sample (with few documents, up to "
                    "half are held out); lower data.seq_len or use a larger data.source"
                )
        contents = (f"{store.fingerprint}*{fraction}" for store, fraction in self._weighted)
        # Identifies the samples and their order.
        self.fingerprint = f"{hash64('order', seq_len, self.seed, *contents):016x}"
        self._mixer = Mixer(self.fractions, [store.name for store in self.stores])

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes of text per token, which convert loss to bits per byte."""
        return sum(store.bytes_per_token * fraction for store, fraction in self._weighted)

    def describe(self, samples: int) -> list[str]:
        """Return lines for the log: each store, and how much of it a run of `samples` reads."""
        lines: list[str] = []
        for store, fraction in self._weighted:
            lines += store.notes
            consumed = round(samples * fraction)
            if store.grows:
                size = "size unknown" if store.size is None else f"{store.size:,} bytes"
                # At least this many: no store has more tokens than bytes. 0 if the size is unknown.
                epochs = consumed * self.seq_len / (store.size or math.inf)
                read = "tokenised as they are read, shuffled in blocks"
            else:
                size = f"{len(store):,} tokens"
                epochs = consumed / max(1, (len(store) - 1) // self.seq_len)
                read = f"{epochs:.2f} epochs" if epochs > 1 else f"{epochs:.1%} of them, once"
            lines.append(
                f"{store.name}: {size} (tokenizer {store.stamp.tokenizer}); the run consumes "
                f"{consumed:,} samples of {self.seq_len:,}: {read}"
            )
            if epochs > MANY_EPOCHS:
                lines.append(
                    f"WARNING: {store.name}: {size}, {epochs:,.0f} epochs: the model will memorize "
                    "it; take a larger data.source, or lower --steps"
                )
        return lines

    def batch(self, positions: Sequence[int]) -> Batch:
        """Return the samples at these positions of the order as one batch."""
        located = [self.locate(position) for position in positions]
        rows = [store.read(start, start + self.seq_len + 1) for store, start in located]
        return to_batch(np.stack(rows), self.stores[0].stamp.eos_id, self.packing)

    def step(
        self, consumed: int, *, rank: int, world_size: int, micro_batch: int, accumulation: int = 1
    ) -> list[Batch]:
        """Return one rank's batches of a step; earlier steps consumed `consumed` samples.

        Wait for their tokens, or raise a DataError.
        """
        first, stride = consumed + rank * micro_batch, world_size * micro_batch
        starts = range(first, first + accumulation * stride, stride)
        return [self.batch(range(start, start + micro_batch)) for start in starts]

    def locate(self, position: int) -> tuple[TokenStore, int]:
        """Return the store of a sample, and the index of its first token.

        In a store that grows, wait until the sample's block is complete or the source has ended:
        then neither the sample's epoch nor the shuffled order can change any more.
        """
        source, number = self._mixer.locate(position)
        store = self.stores[source]
        count = self._wait_for(block_of(number).stop, store)
        epoch, index = divmod(number, count)
        if store.grows:
            block = block_of(index)
            first, stop = block.start, min(block.stop, count)
            shuffle_key = hash64(self.seed, epoch, source, first)
        else:
            first, stop = 0, count
            shuffle_key = hash64(self.seed, epoch, source)
        sample = first + shuffled_index(index - first, stop - first, shuffle_key)
        return store, sample * self.seq_len

    def available(self, samples: int) -> tuple[int, str | None]:
        """Return how many of `samples` come before the first repeat, and the store that repeats."""
        for position in range(samples):
            source, number = self._mixer.locate(position)
            store = self.stores[source]
            if number >= self._wait_for(block_of(number).stop, store):
                return position, store.name
        return samples, None

    def _wait_for(self, samples: int, store: TokenStore) -> int:
        """Wait until a store has `samples` samples or its source ends; return how many it has."""
        return (store.wait_for(samples * self.seq_len + 1) - 1) // self.seq_len


def block_of(index: int) -> range:
    """Return the samples that are shuffled together with sample `index`.

    The first blocks are small, so that a slow source does not delay step 1.
    """
    power_of_2 = 1 << max(0, index.bit_length() - 1)  # the largest up to `index`
    size = min(MAX_BLOCK, max(MIN_BLOCK, power_of_2))
    start = index // size * size
    return range(start, start + size)


def hash64(*parts: int | str) -> int:
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
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class Mixer:
    """Assigns positions to sources by weight, spread as evenly as integers allow.

    The first source gets its fraction of all positions, the second its fraction of the rest, and
    so on. One division counts a source's earlier positions, so nothing is stored.
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
        """Return the source of a position, and how many earlier positions the source has."""
        total = RESOLUTION  # of the counts of this source and of later ones
        for source, count in enumerate(self._counts):
            before = position * count // total
            if (position + 1) * count // total > before:
                return source, before
            position -= before  # from here on it counts only positions of later sources
            total -= count
        raise AssertionError("the last source gets every remaining position")


def _round_to_total(fractions: Sequence[float], total: int) -> list[int]:
    """Return `total` divided by `fractions`, in integers: the largest remainders are rounded up."""
    exact = [fraction * total for fraction in fractions]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: exact[index] % 1, reverse=True)
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts
