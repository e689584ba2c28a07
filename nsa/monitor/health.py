"""The health of NSA layers, measured only when somebody asks: gates, and what selection chooses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from nsa.monitor.observer import BRANCHES, DISTANCES, GATE_BINS, Health, LayerHealth, warn

MOST_QUERIES = 4_096  # of a layer, about; of more, every second, third … is taken
T = TypeVar("T")


class Pattern(Protocol):
    """What has to be known of the sparse pattern."""

    @property
    def select_len(self) -> int: ...

    @property
    def select_top(self) -> int: ...

    @property
    def init_blocks(self) -> int: ...

    @property
    def local_blocks(self) -> int: ...


@dataclass(frozen=True)
class _Heard:
    """What one layer said: gates [B, S, Hq, 3] and blocks [B, S, Hkv, n] of the sampled queries."""

    gates: Tensor
    blocks: Tensor
    before: Tensor  # [B, S - 1, Hkv, n]: of the token before each sampled query but the first
    stride: int
    seq_len: int
    cu_seqlens: Tensor | None


class HealthRecorder:
    """Listens to layers that tell a `observer` their gates, chosen blocks and cu_seqlens.

    Off, a layer pays one look at an attribute. Armed, each layer's first forward pass is copied,
    some 4,096 queries of it at most, so recomputation and further micro-batches change nothing;
    `read` makes the figures of all layers together, on the device. Compiled models are not heard.
    """

    def __init__(self, layers: Mapping[str, Any], spec: Pattern | None) -> None:
        self._layers = dict(layers)
        self._spec = spec
        self._heard: dict[str, _Heard] = {}

    def arm(self) -> None:
        """Listen from the next forward pass on, having forgotten what was heard before."""
        self._heard.clear()
        for name, layer in self._layers.items():
            layer.observer = partial(self._hear, name)

    def read(self) -> Health | None:
        """What was heard since `arm`, in one transfer; stops listening.

        None where nothing was heard: before the first `arm`, or where no layer is an NSA layer.
        """
        self._leave()
        heard = [self._heard[name] for name in self._layers if name in self._heard]
        self._heard.clear()
        spec = self._spec
        if not heard or spec is None:
            return None
        return self._tried(lambda: Health([_layer(row) for row in measure(heard, spec).tolist()]))

    def _leave(self) -> None:
        for layer in self._layers.values():
            layer.observer = None

    def _hear(self, name: str, gates: Tensor, blocks: Tensor, cu_seqlens: Tensor | None) -> None:
        if torch.compiler.is_compiling() or name in self._heard:
            return
        heard = self._tried(lambda: _sample(gates, blocks, cu_seqlens))
        if heard is not None:
            self._heard[name] = heard

    def _tried(self, work: Callable[[], T]) -> T | None:
        """What `work` returns; if it fails, such as for want of memory, the run goes on without."""
        try:
            # Selective checkpointing counts operations to find what it saved: it must not see ours.
            with _disable_current_modes(), torch.no_grad():
                return work()
        except Exception as error:
            warn(f"the health of layers is off for the rest of the run: {error!r}")
            self._leave()
            self._layers = {}
            return None


def _sample(gates: Tensor, blocks: Tensor, cu_seqlens: Tensor | None) -> _Heard:
    """Copies of every stride-th query, so that no activation is kept alive."""
    batch, seq_len = gates.shape[:2]
    stride = -(-batch * seq_len // MOST_QUERIES)
    return _Heard(
        gates[:, ::stride].detach().clone(),
        blocks[:, ::stride].clone(),
        blocks[:, stride - 1 : -1 : stride].clone(),
        stride,
        seq_len,
        cu_seqlens,
    )


def measure(heard: list[_Heard], spec: Pattern) -> Tensor:
    """A row of figures for each layer, in the order in which `_layer` takes them, on the device."""
    gates = torch.stack([one.gates for one in heard])
    blocks = torch.stack([one.blocks for one in heard])
    before = torch.stack([one.before for one in heard])
    return torch.cat([_of_gates(gates.float()), _of_blocks(blocks, before, heard[0], spec)], 1)


def _of_gates(gates: Tensor) -> Tensor:
    """Mean, spread and bins of each branch, from [L, B, S, Hq, 3]."""
    over = (1, 2, 3)
    edges = [index / GATE_BINS for index in range(1, GATE_BINS)]
    bins = _shares([(gates < edge).sum(over) for edge in edges], gates[0, ..., 0].numel())
    spread = gates.std(over, correction=0)
    return torch.cat([gates.mean(over), spread, bins.flatten(1)], 1)


def _of_blocks(blocks: Tensor, before: Tensor, heard: _Heard, spec: Pattern) -> Tensor:
    """What is said of the chosen blocks [L, B, S, Hkv, n]; free picks are explained at `free`."""
    at = torch.arange(0, heard.seq_len, heard.stride, device=blocks.device, dtype=torch.int32)
    start = torch.zeros_like(at)
    if heard.cu_seqlens is not None:
        offsets = heard.cu_seqlens.to(at)
        start = offsets[torch.searchsorted(offsets, at, right=True) - 1]
    own = ((at - start) // spec.select_len)[:, None, None]  # each query's own block
    chosen = blocks >= 0
    forced = chosen & ((blocks < spec.init_blocks) | (blocks > own - spec.local_blocks))
    choosing = own >= spec.select_top
    free = chosen & ~forced & choosing  # chosen by importance, from more than could be taken
    picks = free.sum((1, 2, 3, 4))
    distance = own - blocks
    nearer = [(free & (distance < edge)).sum((1, 2, 3, 4)) for edge in DISTANCES[1:]]
    return torch.cat(
        [
            choosing.float().mean().expand(len(blocks), 1),
            (forced.sum((1, 2, 3, 4)) / chosen.sum((1, 2, 3, 4)))[:, None],
            _entropy(blocks, free, own, heard.seq_len, spec)[:, None],
            _overlap(blocks[:, :, 1:], before, free[:, :, 1:])[:, None],
            ((distance * free).sum((1, 2, 3, 4)) / picks)[:, None],
            _shares(nearer, picks),
        ],
        1,
    )


def _entropy(blocks: Tensor, free: Tensor, own: Tensor, seq_len: int, spec: Pattern) -> Tensor:
    """How evenly free picks fall on the blocks that the last query could choose from; [L].

    The least that a head's picks can have is the logarithm of a query's free picks.
    """
    layers, heads = len(blocks), blocks.shape[3]
    columns = -(-seq_len // spec.select_len)
    rows = torch.arange(layers * heads, device=blocks.device).view(layers, 1, 1, heads, 1)
    cells = (rows * columns + blocks.clamp(min=0)).flatten()
    counts = torch.zeros(layers * heads * columns, device=blocks.device, dtype=torch.int64)
    counts = counts.scatter_add_(0, cells, free.flatten().long()).view(layers, heads, columns)
    shares = counts / counts.sum(-1, keepdim=True)
    entropy = -torch.special.xlogy(shares, shares).sum(-1).mean(-1)
    always = spec.init_blocks + spec.local_blocks
    least = math.log(max(1, spec.select_top - always))
    most = (own.max() + 1 - always).float().log()
    return (entropy - least) / (most - least)


def _overlap(blocks: Tensor, before: Tensor, counted: Tensor) -> Tensor:
    """The share of the counted blocks that are among those of the token before; [L].

    A query that can choose is not its document's first, and the token before it has no padding.
    """
    place = torch.searchsorted(before, blocks.contiguous()).clamp(max=before.shape[-1] - 1)
    shared = (before.gather(-1, place) == blocks) & counted
    return shared.sum((1, 2, 3, 4)) / counted.sum((1, 2, 3, 4))


def _shares(below: list[Tensor], total: Tensor | int) -> Tensor:
    """The share of `total` in each bin along a new last axis, from counts below its edges."""
    counts = torch.stack(below, -1)
    none = torch.zeros_like(counts[..., :1])
    whole = none + (total if isinstance(total, int) else total[..., None])
    return counts.diff(dim=-1, prepend=none, append=whole) / whole


def _layer(row: list[float]) -> LayerHealth:
    """A row of `measure`, named; 0/0 becomes None."""
    sizes = [len(BRANCHES)] * 2 + [GATE_BINS] * len(BRANCHES) + [1] * 5 + [len(DISTANCES)]
    ends = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    mean, std, *rest = (row[start:end] for start, end in pairwise(ends))
    bins, picks, distances = rest[:3], [one[0] for one in rest[3:-1]], rest[-1]
    choosing, forced, *chosen = picks
    entropy, overlap, distance = (None if math.isnan(one) else one for one in chosen)
    return LayerHealth(
        gate_mean=dict(zip(BRANCHES, mean, strict=True)),
        gate_std=dict(zip(BRANCHES, std, strict=True)),
        gate_saturated={
            branch: shares[0] + shares[-1] for branch, shares in zip(BRANCHES, bins, strict=True)
        },
        gate_bins=dict(zip(BRANCHES, bins, strict=True)),
        choosing=choosing,
        forced=forced,
        entropy=entropy,
        overlap=overlap,
        distance=distance,
        distances=[] if distance is None else distances,
    )
