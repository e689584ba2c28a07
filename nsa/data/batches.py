"""Indexed batches, computed from (samples consumed, micro-step, rank), so resuming is free.

tokens  | s0 | s1 | s2 | ...    sample i: tokens[i·T : i·T + T + 1]
order   s7 s2 s9 ...            a permutation of each epoch; a mixture interleaves its sources
step    micro-step 0: rank 0's rows, rank 1's rows; micro-step 1: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from nsa.constants import IGNORE_INDEX
from nsa.data.order import Mixer, key, shuffled
from nsa.data.token_store import TokenStore
from nsa.data.tokenizer import TokenArray


@dataclass(frozen=True)
class Batch:
    """One rank's input to one forward pass; `labels[b, t]` follows `input_ids[b, t]`."""

    input_ids: torch.Tensor  # int64 [B, T], or [1, B·T] for packed documents
    labels: torch.Tensor  # int64, same shape, already shifted; -100: ignored
    cu_seqlens: torch.Tensor | None = None  # int32 [documents + 1]: start of each, and the end

    @property
    def tokens(self) -> int:
        return self.input_ids.numel()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def sequence_part(self, index: int, count: int) -> Batch:
        """Return one of `count` equal parts of each sequence; `cu_seqlens` stays complete."""
        length = self.input_ids.shape[1] // count
        part = slice(index * length, (index + 1) * length)
        return Batch(self.input_ids[:, part], self.labels[:, part], self.cu_seqlens)

    def pin_memory(self) -> Batch:
        """Return a copy in pinned memory, for asynchronous transfer to a GPU."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        cu_seqlens = None if self.cu_seqlens is None else change(self.cu_seqlens)
        return Batch(change(self.input_ids), change(self.labels), cu_seqlens)


def to_batch(rows: TokenArray, eos_id: int, packing: str) -> Batch:
    """Split rows [B, T + 1] into inputs and next-token labels.

    Packing "documents" concatenates the rows; a document ends with its row at the latest, and no
    label follows an end of text.
    """
    inputs = rows[:, :-1].astype(np.int64)  # [B, T]
    labels = rows[:, 1:].astype(np.int64)
    if packing == "concat":
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels))
    seq_len = inputs.shape[1]
    inputs, labels = inputs.reshape(1, -1), labels.reshape(1, -1)  # [1, B·T]
    ends = inputs[0] == eos_id
    labels[0, ends] = IGNORE_INDEX
    starts = np.zeros(inputs.size + 1, dtype=bool)
    starts[::seq_len] = True  # each row, and the end of the last
    starts[1:] |= ends
    cu_seqlens = np.flatnonzero(starts).astype(np.int32)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), torch.from_numpy(cu_seqlens))


@dataclass(kw_only=True, eq=False)
class Batches:
    """Token stores cut into samples, which are assigned to steps, micro-steps and ranks.

    A global batch holds the same samples however it is divided, so the order continues when the
    number of ranks or the accumulation changes. An epoch that ends within a batch still uses each
    sample exactly once.
    """

    stores: Sequence[TokenStore] = field(kw_only=False)
    fractions: Sequence[float] = (1.0,)  # of the samples, by store
    seq_len: int
    micro_batch: int
    accumulation: int
    world_size: int
    seed: int
    packing: str = "concat"

    def __post_init__(self) -> None:
        seq_len = self.seq_len
        self.samples = [(len(store) - 1) // seq_len for store in self.stores]  # in an epoch of each
        for store, samples in zip(self.stores, self.samples, strict=True):
            if samples < 1:
                raise ValueError(
                    f"data.seq_len = {seq_len}: {store.name} has {len(store)} tokens in this "
                    f"split, fewer than the {seq_len + 1} of one sample (of few documents up to "
                    "half is held out); lower data.seq_len or take a larger data.source"
                )
        weighted = zip(self.stores, self.fractions, strict=True)
        stored = (f"{store.fingerprint}*{fraction}" for store, fraction in weighted)
        # Of the samples and their order.
        self.fingerprint = f"{key('order', seq_len, self.seed, *stored):016x}"
        self._mixer = Mixer(self.fractions, [store.name for store in self.stores])

    @property
    def samples_per_step(self) -> int:
        """Return the samples that all ranks together consume in a step."""
        return self.micro_batch * self.accumulation * self.world_size

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes of text per token, which convert loss to bits per byte."""
        weighted = zip(self.fractions, self.stores, strict=True)
        return sum(fraction * store.bytes_per_token for fraction, store in weighted)

    def batch(self, consumed: int, micro_step: int, rank: int) -> Batch:
        """Return a rank's batch in one micro-step of the step that starts at `consumed` samples."""
        first = consumed + (micro_step * self.world_size + rank) * self.micro_batch
        return self.rows(range(first, first + self.micro_batch))

    def for_rank(self, rank: int, consumed: int = 0) -> Iterator[Batch]:
        """Yield a rank's batches from the step that starts at `consumed` samples."""
        while True:
            for micro_step in range(self.accumulation):
                yield self.batch(consumed, micro_step, rank)
            consumed += self.samples_per_step

    def rows(self, positions: Sequence[int]) -> Batch:
        """Return the samples at these positions of the order as one batch."""
        rows = np.stack([self._sample(position) for position in positions])
        return to_batch(rows, self.stores[0].eos_id, self.packing)

    def first_repeat(self, samples: int) -> tuple[int, str] | None:
        """Return position and store of the first repetition in `samples` samples, or None."""
        for position in range(samples):
            source, number = self._mixer.locate(position)
            if number >= self.samples[source]:
                return position, self.stores[source].name
        return None

    def locate(self, position: int) -> tuple[TokenStore, int]:
        """Return the store of a sample, and the index of its first token."""
        source, number = self._mixer.locate(position)
        epoch, index = divmod(number, self.samples[source])
        index = shuffled(index, self.samples[source], key(self.seed, epoch, source))
        return self.stores[source], index * self.seq_len

    def _sample(self, position: int) -> TokenArray:
        store, start = self.locate(position)
        return store.read(start, start + self.seq_len + 1)
