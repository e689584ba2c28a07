"""KV cache for decoding: the buffers of each layer, and the length of each sequence.

    buffer         content
    k_sel v_sel    all tokens, position p at index p; k_all v_all for dense attention
    k_cmp v_cmp    all complete compressed blocks, block i at index i
    k_win v_win    a ring of the last w tokens, position p at p % size
    k_tail v_tail  a ring of the last l tokens, input of the compressor's next block

With an index, k_cmp and k_tail hold its keys, and there are no compressed values.

Buffers [B, size, Hkv, D] grow by doubling; a ring stops at its window.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
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
    window: int = sys.maxsize  # a ring of the last `window` tokens; maxsize: all tokens

    def shape(self, config: ModelConfig, capacity: int) -> tuple[int, int, int]:
        """Return [size, Hkv, D] for sequences of `capacity` tokens."""
        dim = config.head_dim if self.kind == "k" else config.value_dim or config.head_dim
        size = min(self.window, capacity)
        if self.entries == "blocks":
            size = config.attention.spec.compressed_len(capacity)
        return size, config.kv_heads, dim


def plan_buffers(config: ModelConfig) -> dict[str, Buffer]:
    """Return the buffers of a layer by name."""
    attention, spec = config.attention, config.attention.spec
    if attention.has_index:
        return {
            "k_sel": Buffer("k", "sel"),
            "v_sel": Buffer("v", "sel"),
            "k_tail": Buffer("k", "index", "pre_rope", spec.block_len),
            "k_cmp": Buffer("k", "index", "blocks"),
        }
    branches = ("all",) if attention.kind == "dense" else attention.branch_names
    plan: dict[str, Buffer] = {}
    for branch in branches:
        window = spec.window if branch == "win" else sys.maxsize
        if branch != "cmp":
            plan |= {f"{kind}_{branch}": Buffer(kind, branch, window=window) for kind in "kv"}
    if "cmp" in branches or "sel" in branches:  # "sel" ranks blocks by their compressed keys
        source = "cmp" if "cmp" in branches else "sel"  # the branch whose keys are compressed
        entries = "tokens" if attention.compressor == "mean" else "pre_rope"
        plan["k_tail"] = Buffer("k", source, entries, spec.block_len)
        plan["v_tail"] = Buffer("v", source, "tokens", spec.block_len)
        plan["k_cmp"] = Buffer("k", "cmp", "blocks")
    if "cmp" in branches:
        plan["v_cmp"] = Buffer("v", "cmp", "blocks")
    return plan


# (buffer size, whether it holds blocks) -> packed entries to store, and the row and index of each
Placement = Callable[[int, bool], tuple[Tensor, Tensor, Tensor]]
Content = dict[str, Tensor]  # entries to store, by the buffer's name


class LayerCache:
    def __init__(self, plan: dict[str, Buffer], buffers: Content) -> None:
        self.plan, self.buffers = plan, buffers

    def read(self, name: str, size: int | None = None) -> Tensor | None:
        """Return the first `size` entries of a buffer; None if the layer has no such buffer."""
        buffer = self.buffers.get(name)
        return None if buffer is None else buffer[:, :size]

    def fill(self, content: Content, placement: Placement) -> None:
        """Store the tokens or blocks of packed prompts, each tensor [1, all of them, Hkv, D]."""
        for name, packed in content.items():
            buffer = self.buffers[name]
            stored, row, index = placement(buffer.shape[1], self.plan[name].entries == "blocks")
            buffer[row, index] = packed[0, stored]

    def append(self, content: Content, index: Tensor, valid: Tensor | None = None) -> None:
        """Store one entry per sequence, [1, B, Hkv, D], at `index` [B] where `valid` [B] is true.

        `index` is a token's position, or the number of a compressed block.
        """
        row = torch.arange(len(index), device=index.device)
        for name, entries in content.items():
            buffer, new = self.buffers[name], entries[0]  # [B, size, Hkv, D] and [B, Hkv, D]
            at = index % buffer.shape[1]
            if valid is not None:
                new = new.where(valid[:, None, None], buffer[row, at])
            buffer[row, at] = new

    def last(self, kind: str, lengths: Tensor, count: int) -> Tensor:
        """Return the compressor's input: the last `count` keys or values, [B, count, Hkv, D]."""
        buffer = self.buffers[f"{kind}_tail"]
        position = lengths[:, None] + torch.arange(-count, 0, device=lengths.device)
        row = torch.arange(len(lengths), device=lengths.device)[:, None]
        return buffer[row, position % buffer.shape[1]]


class KVCache:
    """The cache of a batch of sequences, each with its own length.

    `lengths` int64 [B] is on the device; `host_lengths`, its copy on the host, decides when buffers
    grow, so a step never synchronizes.
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
        self.config, self.capacity = config, capacity
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.dtype, self.device = dtype, self.lengths.device
        self.host_lengths = [0] * batch
        plan, self.layers = plan_buffers(config), list[LayerCache]()
        for _ in range(config.layers):
            buffers = {
                name: torch.zeros(batch, *item.shape(config, capacity), dtype=dtype, device=device)
                for name, item in plan.items()
            }
            self.layers.append(LayerCache(plan, buffers))

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
            for name, buffer in layer.buffers.items():
                size, _, _ = layer.plan[name].shape(self.config, self.capacity)
                if size > buffer.shape[1]:
                    layer.buffers[name] = pad(buffer, (0, 0, 0, 0, 0, size - buffer.shape[1]))

    def start(self, lengths: Sequence[int], reserve: int = 0) -> Placement:
        """Set the prompts' lengths; return where their tokens and blocks are stored."""
        self.reserve(max(lengths) + reserve)
        self.host_lengths = list(lengths)
        self.lengths = torch.tensor(self.host_lengths, device=self.device)
        blocks = [self.config.attention.spec.compressed_len(length) for length in lengths]

        @cache  # computed once for all layers
        def placement(size: int, is_blocks: bool) -> tuple[Tensor, Tensor, Tensor]:
            return ring_indices(blocks if is_blocks else lengths, size, self.device)

        return placement

    def advance(self) -> None:
        """Increase each sequence's length by one, and grow if necessary."""
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
                f"rows is {index.dtype} {tuple(index.shape)}; give the indices of one or more of "
                f"the {self.batch} sequences, or a bool mask [{self.batch}] that keeps one"
            )
        selected = copy(self)
        selected.lengths = self.lengths[index]
        selected.host_lengths = [self.host_lengths[row] for row in index.tolist()]
        selected.layers = [
            LayerCache(layer.plan, {name: buffer[index] for name, buffer in layer.buffers.items()})
            for layer in self.layers
        ]
        return selected


def ring_indices(
    lengths: Sequence[int], size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which packed entries rings of `size` keep, and the row and index of each."""
    length = torch.tensor(lengths)
    row = torch.arange(len(lengths)).repeat_interleave(length)
    start = length.cumsum(0) - length
    position = torch.arange(len(row)) - start[row]
    stored = torch.nonzero(position >= length[row] - size)[:, 0]
    return stored.to(device), row[stored].to(device), (position % max(size, 1))[stored].to(device)
