"""What decoding keeps of the tokens so far: buffers for each layer, a length for each sequence.

    read as        holds
    k_sel v_sel    all tokens, position p at p; k_all v_all where attention is dense
    k_cmp v_cmp    all complete blocks, block i at i
    k_win v_win    a ring of the last w tokens, position p at p % size
    k_tail v_tail  a ring of the last l tokens: what φ makes the next block of

Fewer branches keep less, and nothing is kept twice: with shared_kv the window and φ read from the
same buffer as the selected branch. Buffers [B, size, Hkv, D] grow by doubling; a ring stops at what
its readers look back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache as remember

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa.model.config import ModelConfig


@dataclass
class Stream:
    """A buffer with an entry for each token, and what goes into it."""

    kind: str  # "k" or "v"
    branch: str  # whose keys or values
    turned: bool  # whether its keys lie turned
    reach: int | None  # how far back it is read; None: to the first token


@dataclass
class Plan:
    """The buffers of a layer, and which of them each reader finds its keys or values in."""

    streams: dict[str, Stream] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()  # buffers with an entry for each compressed block
    found: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ModelConfig) -> Plan:
        """What a model of this shape reads when it decodes."""
        attention, plan = config.attention, cls()
        if attention.kind == "dense":
            plan._read("all", "all", None)
            return plan
        branches = attention.branch_names
        source = {name: branches[0] if attention.shared_kv else name for name in branches}
        if "sel" in branches:
            plan._read("sel", source["sel"], None)
        if "win" in branches:
            plan._read("win", source["win"], attention.spec.window)
        if "cmp" in branches or "sel" in branches:
            compressed = source["cmp" if "cmp" in branches else "sel"]
            turned = attention.compressor == "mean"
            plan._read("tail", compressed, attention.spec.block_len, turned=turned)
            plan.blocks = ("k_cmp", "v_cmp") if "cmp" in branches else ("k_cmp",)
            plan.found.update((name, name) for name in plan.blocks)
        for stream in plan.streams.values():  # keys and values that are read together are as many
            if stream.kind == "k" and stream.turned:
                stream.reach = plan.streams[f"v of {stream.branch}"].reach
        return plan

    def _read(self, reader: str, branch: str, reach: int | None, *, turned: bool = True) -> None:
        for kind in "kv":
            name = f"{kind} of {branch}" if turned or kind == "v" else f"{kind} of {branch}, raw"
            stream = self.streams.setdefault(name, Stream(kind, branch, turned, reach))
            if reach is None or stream.reach is None:
                stream.reach = None
            else:
                stream.reach = max(reach, stream.reach)
            self.found[f"{kind}_{reader}"] = name


class LayerCache:
    """The buffers of one layer."""

    def __init__(self, plan: Plan, buffers: dict[str, Tensor]) -> None:
        self.plan, self.buffers = plan, buffers

    def read(self, reader: str) -> Tensor | None:
        """What `reader` (k_sel, v_win …) finds its keys or values in; None where it has none."""
        name = self.plan.found.get(reader)
        return None if name is None else self.buffers[name]

    def fill(self, content: dict[str, Tensor], where: Places) -> None:
        """Put in the tokens, or blocks, of packed documents: [1, all of them, Hkv, D] each."""
        for name, packed in content.items():
            buffer = self.buffers[name]
            taken, row, place = where(buffer.shape[1], name in self.plan.blocks)
            buffer[row, place] = packed[0, taken]

    def append(self, content: dict[str, Tensor], position: Tensor) -> None:
        """Put in one token of each sequence, [B, Hkv, D], that stands at `position` [B]."""
        row = torch.arange(len(position), device=position.device)
        for name, new in content.items():
            buffer = self.buffers[name]
            buffer[row, position % buffer.shape[1]] = new

    def last(self, kind: str, lengths: Tensor, count: int) -> Tensor:
        """The last `count` entries of φ's keys or values, in order: [B, count, Hkv, D]."""
        buffer = self.buffers[self.plan.found[f"{kind}_tail"]]
        position = lengths[:, None] + torch.arange(-count, 0, device=lengths.device)
        row = torch.arange(len(lengths), device=lengths.device)[:, None]
        return buffer[row, position % buffer.shape[1]]

    def complete(self, content: dict[str, Tensor], block: Tensor, due: Tensor) -> None:
        """Put in block number `block` [B] of the sequences where it is `due`."""
        row = torch.arange(len(block), device=block.device)
        for name, new in content.items():
            buffer = self.buffers[name]
            place = block.clamp(0, buffer.shape[1] - 1)
            buffer[row, place] = torch.where(due[:, None, None], new, buffer[row, place])


Places = Callable[[int, bool], tuple[Tensor, Tensor, Tensor]]


class KVCache:
    """What each of B sequences, of its own length, has to remember for its next token.

    `lengths` int64 [B] lies beside the buffers, so that nothing waits for the host, which keeps
    its own copy to know when to grow.
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
        self.config, self.plan, self.capacity = config, Plan.of(config), capacity
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.host_lengths = [0] * batch
        shapes = {
            name: (batch, _size(config, self.plan, name, capacity), *_entry(config, name))
            for name in (*self.plan.streams, *self.plan.blocks)
        }
        self.layers = [
            LayerCache(
                self.plan,
                {
                    name: torch.zeros(shape, dtype=dtype, device=device)
                    for name, shape in shapes.items()
                },
            )
            for _ in range(config.layers)
        ]

    @property
    def batch(self) -> int:
        return len(self.host_lengths)

    @property
    def longest(self) -> int:
        return max(self.host_lengths)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.layers[0].buffers.values())).dtype

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    @property
    def completes_a_block(self) -> bool:
        """Whether a compressed block ends with the newest token of any sequence."""
        spec = self.config.attention.spec
        past = (length - spec.block_len for length in self.host_lengths)
        return any(tokens >= 0 and tokens % spec.block_stride == 0 for tokens in past)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, with the room that they have to grow into."""
        return sum(buffer.nbytes for layer in self.layers for buffer in layer.buffers.values())

    def reserve(self, positions: int) -> None:
        """Have room for sequences of so many tokens; what is too small becomes twice as large."""
        if positions <= self.capacity:
            return
        self.capacity = max(positions, 2 * self.capacity)
        for layer in self.layers:
            for name, buffer in layer.buffers.items():
                more = _size(self.config, self.plan, name, self.capacity) - buffer.shape[1]
                if more:
                    layer.buffers[name] = pad(buffer, (0, 0, 0, 0, 0, more))

    def start(self, lengths: Sequence[int], room: int = 0) -> Places:
        """Take in whole prompts; returns where each token and each block of them belongs."""
        self.reserve(max(lengths) + room)
        self.host_lengths = list(lengths)
        self.lengths = torch.tensor(self.host_lengths, device=self.device)
        spec = self.config.attention.spec
        counts = {False: lengths, True: [spec.compressed_len(length) for length in lengths]}

        @remember  # every layer asks the same
        def where(size: int, blocks: bool) -> tuple[Tensor, Tensor, Tensor]:
            return places(counts[blocks], size, self.device)

        return where

    def advance(self) -> None:
        """Each sequence has one token more."""
        self.reserve(self.longest + 1)
        self.lengths += 1
        self.host_lengths = [length + 1 for length in self.host_lengths]

    def select(self, rows: Tensor | Sequence[int]) -> KVCache:
        """Another cache with these rows of the batch, in this order; a row may come twice.

        A mask, bool [B], keeps those where it is true.
        """
        kept = torch.as_tensor(rows, device=self.device)
        if kept.dtype == torch.bool and kept.shape == (self.batch,):
            kept = kept.nonzero()[:, 0]
        if kept.dim() != 1 or not len(kept) or kept.is_floating_point() or kept.dtype == torch.bool:
            raise ValueError(
                f"rows is {kept.dtype} {tuple(kept.shape)}; it must name one or more of "
                f"{self.batch} sequences, or be a mask of them that keeps one"
            )
        chosen = copy(self)
        chosen.lengths = self.lengths[kept]
        chosen.host_lengths = [self.host_lengths[row] for row in kept.tolist()]
        chosen.layers = [
            LayerCache(layer.plan, {name: buffer[kept] for name, buffer in layer.buffers.items()})
            for layer in self.layers
        ]
        return chosen


def cache_bytes(config: ModelConfig, length: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """What one sequence of `length` tokens has to keep, without room to grow."""
    plan = Plan.of(config)
    numbers = 0
    for name in (*plan.streams, *plan.blocks):
        heads, size = _entry(config, name)
        numbers += _size(config, plan, name, length) * heads * size
    return config.layers * numbers * dtype.itemsize


def _size(config: ModelConfig, plan: Plan, name: str, capacity: int) -> int:
    """Entries of a buffer that serves sequences of `capacity` tokens."""
    if name in plan.blocks:
        return config.attention.spec.compressed_len(capacity)
    reach = plan.streams[name].reach
    return capacity if reach is None else min(reach, capacity)


def _entry(config: ModelConfig, name: str) -> tuple[int, int]:
    """Heads and size of one key, or value."""
    value_dim = config.value_dim or config.head_dim
    return config.kv_heads, config.head_dim if name[0] == "k" else value_dim


def places(
    lengths: Sequence[int], size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Of packed entries, those that a ring of `size` keeps, and the row and place of each."""
    length = torch.tensor(lengths)
    row = torch.arange(len(lengths)).repeat_interleave(length)
    start = length.cumsum(0) - length
    position = torch.arange(len(row)) - start[row]
    taken = torch.nonzero(position >= length[row] - size)[:, 0]
    return taken.to(device), row[taken].to(device), (position % max(size, 1))[taken].to(device)
