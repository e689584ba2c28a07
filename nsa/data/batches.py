"""Batches as a pure function of (samples consumed, micro-step, rank): resuming needs no state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nsa.constants import IGNORE_INDEX
from nsa.data.config import PACKINGS
from nsa.data.order import Mixer, key, shuffled
from nsa.data.token_store import TokenStore
from nsa.data.tokenizer import TokenArray


@dataclass(frozen=True)
class Batch:
    """What one rank feeds to one forward pass; `labels[b, t]` follows `input_ids[b, t]`."""

    input_ids: torch.Tensor  # int64 [B, T], or [1, B·T] where documents are packed
    labels: torch.Tensor  # int64, same shape, already shifted; -100: ignored
    cu_seqlens: torch.Tensor | None = None  # int32 [documents + 1]: where each starts, and the end

    @property
    def tokens(self) -> int:
        """How many tokens the model reads."""
        return self.input_ids.numel()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on `device`."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def sequence_part(self, number: int, parts: int) -> Batch:
        """One of so many equal parts of the sequences; `cu_seqlens` stays that of the whole."""
        length = self.input_ids.shape[1] // parts
        mine = slice(number * length, (number + 1) * length)
        return Batch(self.input_ids[:, mine], self.labels[:, mine], self.cu_seqlens)

    def pin_memory(self) -> Batch:
        """The same batch where a GPU can fetch it from while the processor goes on."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        cu_seqlens = None if self.cu_seqlens is None else change(self.cu_seqlens)
        return Batch(change(self.input_ids), change(self.labels), cu_seqlens)


def to_batch(rows: TokenArray, eos_id: int, packing: str) -> Batch:
    """Rows of T + 1 tokens [B, T + 1] as inputs and the token after each of them.

    `documents` lays the rows end to end; a document ends with its row, and nothing is predicted
    across an end of text.
    """
    inputs = rows[:, :-1].astype(np.int64)
    labels = rows[:, 1:].astype(np.int64)
    if packing == "concat":
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels))
    seq_len = inputs.shape[1]
    inputs, labels = inputs.reshape(1, -1), labels.reshape(1, -1)
    ends = inputs[0] == eos_id
    labels[0, ends] = IGNORE_INDEX
    starts = np.zeros(inputs.size + 1, dtype=bool)
    starts[::seq_len] = True  # the last of them is the end of the row
    starts[1:] |= ends
    cu_seqlens = np.flatnonzero(starts).astype(np.int32)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), torch.from_numpy(cu_seqlens))


class Batches:
    """Cuts token streams into samples and deals them out to steps, micro-steps and ranks.

    Sample i of a store is its tokens[i·T : i·T + T + 1]: T inputs, and the token after each of
    them. Samples are consumed step by step, micro-step by micro-step, rank by rank, row by row;
    each epoch of a store is its own permutation. So a global batch holds the same samples however
    it is divided, and the order continues where ranks or accumulation change. An epoch that ends in
    a batch still uses each sample exactly once.
    """

    def __init__(
        self,
        stores: Sequence[TokenStore],
        *,
        shares: Sequence[float] = (1.0,),
        seq_len: int,
        micro_batch: int,
        accumulation: int,
        world_size: int,
        seed: int,
        packing: str = "concat",
    ) -> None:
        if packing not in PACKINGS:
            raise ValueError(f"data.packing = {packing!r}: choose one of {', '.join(PACKINGS)}")
        if seed < 0:
            raise ValueError(f"train.seed = {seed}: must be 0 or more")
        self.stores = list(stores)
        self.seq_len = seq_len
        self.micro_batch = micro_batch
        self.accumulation = accumulation
        self.world_size = world_size
        self.seed = seed
        self.packing = packing
        self.shares = list(shares)
        self.samples = [(len(store) - 1) // seq_len for store in stores]  # in one epoch of each
        for store, samples in zip(stores, self.samples, strict=True):
            if samples < 1:
                raise ValueError(
                    f"data.seq_len = {seq_len}: {store.name} has {len(store)} tokens, fewer than "
                    f"the {seq_len + 1} of one sample; lower data.seq_len or take a larger "
                    "data.source"
                )
        stored = (
            f"{store.fingerprint}*{share}" for store, share in zip(stores, shares, strict=True)
        )
        self._identity: list[int | str] = ["order", seq_len, seed, *stored]
        self._mixer = Mixer(self.shares, [store.name for store in stores])

    @property
    def samples_per_step(self) -> int:
        """Of all ranks together."""
        return self.micro_batch * self.accumulation * self.world_size

    @property
    def fingerprint(self) -> str:
        """Of the samples and their order, which do not depend on how a step is divided."""
        return f"{key(*self._identity):016x}"

    def batch(self, consumed: int, micro_step: int, rank: int) -> Batch:
        """What `rank` reads in one micro-step, after `consumed` samples.

        That is step · samples_per_step in a run whose shape never changed.
        """
        assert consumed >= 0
        assert 0 <= micro_step < self.accumulation
        assert 0 <= rank < self.world_size
        first = consumed + (micro_step * self.world_size + rank) * self.micro_batch
        return self.rows(range(first, first + self.micro_batch))

    def rows(self, positions: Sequence[int]) -> Batch:
        """The samples at these places of the endless sequence, as one batch."""
        rows = np.stack([self._sample(position) for position in positions])
        return to_batch(rows, self.stores[0].eos_id, self.packing)

    def for_rank(self, rank: int, consumed: int = 0) -> Iterator[Batch]:
        """Every batch of one rank, from the step before which `consumed` samples were consumed."""
        while True:
            for micro_step in range(self.accumulation):
                yield self.batch(consumed, micro_step, rank)
            consumed += self.samples_per_step

    def first_repeat(self, samples: int) -> tuple[int, str] | None:
        """How many of the first `samples` come before one comes again, and of which store it is.

        None where there are so many.
        """
        for position in range(samples):
            at, number = self._mixer.locate(position)
            if number >= self.samples[at]:
                return position, self.stores[at].name
        return None

    @property
    def bytes_per_token(self) -> float:
        """Of the text, to turn loss into bits per byte."""
        return sum(
            share * store.bytes_per_token
            for share, store in zip(self.shares, self.stores, strict=True)
        )

    def locate(self, position: int) -> tuple[TokenStore, int]:
        """The store that a sample is cut from, and which of its tokens is the first."""
        at, number = self._mixer.locate(position)
        epoch, index = divmod(number, self.samples[at])
        index = shuffled(index, self.samples[at], key(self.seed, epoch, at))
        return self.stores[at], index * self.seq_len

    def _sample(self, position: int) -> TokenArray:
        store, start = self.locate(position)
        return store.read(start, start + self.seq_len + 1)
