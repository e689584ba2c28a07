"""KV cache for decoding: the buffers of each layer, and the length of each sequence.

    reader         content of its buffer
    k_sel v_sel    all tokens, position p at index p; k_all v_all for dense attention
    k_cmp v_cmp    all complete compressed blocks, block i at index i
    k_win v_win    a ring of the last w tokens, position p at p % size
    k_tail v_tail  a ring of the last l tokens, input of the compressor's next block

Readers of the same branch share a buffer, so shared_kv stores nothing twice. Buffers
[B, size, Hkv, D] grow by doubling; a ring stops at what its readers look back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa.model.config import ModelConfig


class Buffer(NamedTuple):
    """The keys or values of one branch."""

    kind: str  # "k" or "v"
    branch: str
    entries: str = "tokens"  # "tokens", "pre_rope" (keys of tokens) or "blocks"


class BufferPlan:
    """The buffers that a layer needs, and which one each reader uses."""

    def __init__(self, config: ModelConfig) -> None:
        attention, spec = config.attention, config.attention.spec
        branches = ("all",) if attention.kind == "dense" else attention.branch_names
        source = {name: branches[0] if attention.shared_kv else name for name in branches}
        self.readers: dict[str, Buffer] = {}
        self._config = config
        self._windows: dict[str, int | None] = {}  # tokens that a branch's readers look back
        for name, window in (("all", None), ("sel", None), ("win", spec.window)):
            if name in branches:
                self._add_reader(name, source[name], window)
        if "cmp" in branches or "sel" in branches:
            compressed = "cmp" if "cmp" in branches else "sel"
            pre_rope = attention.compressor == "mlp"
            self._add_reader("tail", source[compressed], spec.block_len, pre_rope=pre_rope)
            for kind in "kv" if "cmp" in branches else "k":
                self.readers[f"{kind}_cmp"] = Buffer(kind, "cmp", "blocks")
        self.buffers = list(dict.fromkeys(self.readers.values()))

    def _add_reader(
        self, reader: str, branch: str, window: int | None, *, pre_rope: bool = False
    ) -> None:
        known = self._windows.get(branch, 0)
        self._windows[branch] = None if window is None or known is None else max(window, known)
        self.readers[f"k_{reader}"] = Buffer("k", branch, "pre_rope" if pre_rope else "tokens")
        self.readers[f"v_{reader}"] = Buffer("v", branch)

    def shape(self, buffer: Buffer, capacity: int) -> tuple[int, int, int]:
        """[size, Hkv, D] for sequences of `capacity` tokens."""
        config, spec = self._config, self._config.attention.spec
        dim = config.head_dim if buffer.kind == "k" else config.value_dim or config.head_dim
        if buffer.entries == "blocks":
            return spec.compressed_len(capacity), config.kv_heads, dim
        window = spec.block_len if buffer.entries == "pre_rope" else self._windows[buffer.branch]
        return capacity if window is None else min(window, capacity), config.kv_heads, dim


# (buffer size, whether it holds blocks) -> packed entries to store, and the row and index of each
Slots = Callable[[int, bool], tuple[Tensor, Tensor, Tensor]]
Content = dict[Buffer, Tensor]  # what to store, by buffer


class LayerCache:
    """The buffers of one layer."""

    def __init__(self, plan: BufferPlan, buffers: Content) -> None:
        self.plan, self.buffers = plan, buffers

    def read(self, reader: str) -> Tensor | None:
        """Return the buffer that `reader` (k_sel, v_win …) uses, if any."""
        buffer = self.plan.readers.get(reader)
        return None if buffer is None else self.buffers[buffer]

    def fill(self, content: Content, slots: Slots) -> None:
        """Store the tokens, or blocks, of packed prompts, [1, all of them, Hkv, D] each."""
        for key, packed in content.items():
            buffer = self.buffers[key]
            stored, row, index = slots(buffer.shape[1], key.entries == "blocks")
            buffer[row, index] = packed[0, stored]

    def append(self, content: Content, position: Tensor) -> None:
        """Store one token per sequence, [1, B, Hkv, D], at `position` [B]."""
        row = torch.arange(len(position), device=position.device)
        for key, new in content.items():
            buffer = self.buffers[key]
            buffer[row, position % buffer.shape[1]] = new[0]

    def append_blocks(self, content: Content, block: Tensor, complete: Tensor) -> None:
        """Store compressed block number `block` [B] of the sequences where it is `complete`."""
        row = torch.arange(len(block), device=block.device)
        for key, (new,) in content.items():
            buffer = self.buffers[key]
            index = block.clamp(0, buffer.shape[1] - 1)
            buffer[row, index] = torch.where(complete[:, None, None], new, buffer[row, index])

    def last(self, kind: str, lengths: Tensor, count: int) -> Tensor:
        """The last `count` keys or values for the compressor, in order: [B, count, Hkv, D]."""
        buffer = self.buffers[self.plan.readers[f"{kind}_tail"]]
        position = lengths[:, None] + torch.arange(-count, 0, device=lengths.device)
        row = torch.arange(len(lengths), device=lengths.device)[:, None]
        return buffer[row, position % buffer.shape[1]]


class KVCache:
    """The cache of a batch of sequences, each with its own length.

    `lengths` int64 [B] stays on the device; `host_lengths` is its copy for decisions about growth,
    so that a step never synchronizes with the host.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        capacity: int = 0,
    ) -> None:
        self.config, self.plan, self.capacity = config, BufferPlan(config), capacity
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.dtype, self.device = dtype, self.lengths.device
        self.host_lengths = [0] * batch
        self.layers = []
        for _ in range(config.layers):
            buffers = {
                key: torch.zeros(batch, *self.plan.shape(key, capacity), dtype=dtype, device=device)
                for key in self.plan.buffers
            }
            self.layers.append(LayerCache(self.plan, buffers))

    @property
    def batch(self) -> int:
        return len(self.host_lengths)

    @property
    def longest(self) -> int:
        return max(self.host_lengths)

    @property
    def completes_a_block(self) -> bool:
        """Whether the newest token of any sequence ends a compressed block."""
        spec = self.config.attention.spec
        starts = (length - spec.block_len for length in self.host_lengths)
        return any(start >= 0 and start % spec.block_stride == 0 for start in starts)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, including unused capacity."""
        return sum(buffer.nbytes for layer in self.layers for buffer in layer.buffers.values())

    def reserve(self, positions: int) -> None:
        """Grow to at least `positions` tokens per sequence, and at least to twice the capacity."""
        if positions <= self.capacity:
            return
        self.capacity = max(positions, 2 * self.capacity)
        for layer in self.layers:
            for key, buffer in layer.buffers.items():
                more = self.plan.shape(key, self.capacity)[0] - buffer.shape[1]
                if more:
                    layer.buffers[key] = pad(buffer, (0, 0, 0, 0, 0, more))

    def start(self, lengths: Sequence[int], reserve: int = 0) -> Slots:
        """Set the prompts' lengths; return where their tokens and blocks are stored."""
        self.reserve(max(lengths) + reserve)
        self.host_lengths = list(lengths)
        self.lengths = torch.tensor(self.host_lengths, device=self.device)
        blocks = [self.config.attention.spec.compressed_len(length) for length in lengths]

        @cache  # all layers use the same slots
        def slots(size: int, of_blocks: bool) -> tuple[Tensor, Tensor, Tensor]:
            return ring_slots(blocks if of_blocks else lengths, size, self.device)

        return slots

    def advance(self) -> None:
        """Count one token more in each sequence, and grow if necessary."""
        self.reserve(self.longest + 1)
        self.lengths += 1
        self.host_lengths = [length + 1 for length in self.host_lengths]

    def select(self, rows: Tensor | Sequence[int]) -> KVCache:
        """Return a cache with these rows of the batch, in this order; rows may repeat.

        A bool mask [B] keeps the rows where it is true.
        """
        index = torch.as_tensor(rows, device=self.device)
        if index.dtype == torch.bool and index.shape == (self.batch,):
            index = index.nonzero()[:, 0]
        if index.dim() != 1 or not len(index) or index.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"rows is {index.dtype} {tuple(index.shape)}; it must name one or more of "
                f"{self.batch} sequences, or be a mask of them that keeps one"
            )
        selected = copy(self)
        selected.lengths = self.lengths[index]
        selected.host_lengths = [self.host_lengths[row] for row in index.tolist()]
        selected.layers = [
            LayerCache(layer.plan, {key: buffer[index] for key, buffer in layer.buffers.items()})
            for layer in self.layers
        ]
        return selected


def cache_bytes(config: ModelConfig, length: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that one sequence of `length` tokens needs, without spare capacity."""
    plan = BufferPlan(config)
    numbers = sum(prod(plan.shape(buffer, length)) for buffer in plan.buffers)
    return config.layers * numbers * dtype.itemsize


def ring_slots(
    lengths: Sequence[int], size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Of packed entries, those that rings of `size` keep, and the row and index of each."""
    length = torch.tensor(lengths)
    row = torch.arange(len(lengths)).repeat_interleave(length)
    start = length.cumsum(0) - length
    position = torch.arange(len(row)) - start[row]
    stored = torch.nonzero(position >= length[row] - size)[:, 0]
    return stored.to(device), row[stored].to(device), (position % max(size, 1))[stored].to(device)
