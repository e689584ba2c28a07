"""Batches as a pure function of (step, micro-step, rank), so that resuming needs no state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from nsa.data.config import PACKINGS, DataConfig
from nsa.data.source import TokenStore, open_split, stable_random

IGNORED = -100  # a label that the loss leaves out
VALIDATION_ORDER = 0  # seed of the validation split's order, the same in every run


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
        cu_seqlens = self.cu_seqlens
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.to(device, non_blocking=non_blocking)
        return Batch(
            self.input_ids.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            cu_seqlens,
        )


class Batches:
    """Cuts a token stream into samples and deals them out to steps, micro-steps and ranks.

    Sample i is tokens[i·T : i·T + T + 1]: T inputs, and the token after each of them. Positions in
    the endless sequence of samples are counted step by step, micro-step by micro-step, rank by
    rank, row by row; each epoch is its own permutation. So a global batch holds the same samples
    however it is divided, and an epoch that ends inside one still uses each sample exactly once.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        seq_len: int,
        micro_batch: int,
        accumulation: int,
        world_size: int,
        seed: int,
        packing: str = "concat",
    ) -> None:
        self.store = store
        self.seq_len = seq_len
        self.micro_batch = micro_batch
        self.accumulation = accumulation
        self.world_size = world_size
        self.seed = seed
        self.packing = packing
        self.samples = (len(store.tokens) - 1) // seq_len  # in one epoch
        if packing not in PACKINGS:
            raise ValueError(f"data.packing = {packing!r}: choose one of {', '.join(PACKINGS)}")
        if self.samples < 1:
            raise ValueError(
                f"data.seq_len = {seq_len}: the corpus has {len(store.tokens)} tokens, fewer than "
                f"the {seq_len + 1} of one sample; lower data.seq_len or take a larger data.source"
            )

    def batch(self, step: int, micro_step: int, rank: int) -> Batch:
        """The batch of `rank` in one micro-step of one step, each counted from 0."""
        assert step >= 0
        assert 0 <= micro_step < self.accumulation
        assert 0 <= rank < self.world_size
        first = (step * self.accumulation + micro_step) * self.world_size + rank
        rows = np.stack(
            [self._sample(first * self.micro_batch + row) for row in range(self.micro_batch)]
        )
        inputs = rows[:, :-1].astype(np.int64)
        labels = rows[:, 1:].astype(np.int64)
        if self.packing == "concat":
            return Batch(torch.from_numpy(inputs), torch.from_numpy(labels))
        inputs, labels = inputs.reshape(1, -1), labels.reshape(1, -1)
        ends = inputs[0] == self.store.eos_id
        labels[0, ends] = IGNORED
        starts = np.zeros(inputs.size + 1, dtype=bool)
        starts[:: self.seq_len] = True  # the last of them is the end of the row
        starts[1:] |= ends
        cu_seqlens = np.flatnonzero(starts).astype(np.int32)
        return Batch(
            torch.from_numpy(inputs), torch.from_numpy(labels), torch.from_numpy(cu_seqlens)
        )

    def _sample(self, position: int) -> npt.NDArray[np.integer]:
        epoch, index = divmod(position, self.samples)
        start = int(_order(self.seed, epoch, self.samples)[index]) * self.seq_len
        return self.store.tokens[start : start + self.seq_len + 1]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, samples: int) -> npt.NDArray[np.integer]:
    order = stable_random(seed, epoch).permutation(samples)
    order.flags.writeable = False
    return order


def build_batches(
    config: DataConfig,
    split: str,
    *,
    micro_batch: int,
    accumulation: int,
    world_size: int,
    seed: int,
) -> Batches:
    """The batches of one split; validation has one order for all runs, so that they compare."""
    return Batches(
        open_split(config, split, seed),
        seq_len=config.seq_len,
        micro_batch=micro_batch,
        accumulation=accumulation,
        world_size=world_size,
        seed=VALIDATION_ORDER if split == "val" else seed,
        packing=config.packing,
    )
