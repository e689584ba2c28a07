"""Health of NSA layers at logged steps: gate statistics, and which blocks are selected."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from nsa.monitor.observer import LAYER_STATISTICS, SELECTOR_STATISTICS, LayerStatistics, warn
from nsa.spec import NSASpec

MAX_QUERIES = 4_096  # sampled per layer, approximately
T = TypeVar("T")


@dataclass(frozen=True)
class _Sample:
    """Gates and selected blocks of every stride-th query of one layer."""

    gates: Tensor | None  # [B, S, Hq, 3]; None: the layer has none
    blocks: Tensor  # [B, S, Hkv, n]
    previous: Tensor  # [B, S - 1, Hkv, n], blocks of the token before each query but the first
    stride: int
    seq_len: int
    cu_seqlens: Tensor | None
    selector_statistics: Tensor | None  # SELECTOR_STATISTICS; None: without the selector loss


class HealthRecorder:
    """Samples the first forward pass of each layer after `arm`; `read` computes the statistics.

    Layers call their `observer` with gates, selected blocks, cu_seqlens and selector loss; without
    an observer that costs one attribute lookup. Recomputed and later forward passes are ignored,
    and so is a compiled model.
    """

    def __init__(self, layers: Mapping[str, Any], spec: NSASpec) -> None:
        self._layers = dict(layers)
        self._spec = spec
        self._samples: dict[str, _Sample] = {}

    def arm(self) -> None:
        """Sample the next forward pass."""
        self._samples.clear()
        for name, layer in self._layers.items():
            layer.observer = partial(self._observe, name)

    def read(self) -> list[LayerStatistics]:
        """Return the statistics of the sampled layers, in one transfer."""
        self._disarm()
        samples = [self._samples[name] for name in self._layers if name in self._samples]
        self._samples.clear()
        if not samples:
            return []
        return self._try(lambda: _statistics(samples, self._spec)) or []

    def _disarm(self) -> None:
        for layer in self._layers.values():
            layer.observer = None

    def _observe(
        self,
        name: str,
        gates: Tensor | None,
        blocks: Tensor,
        cu_seqlens: Tensor | None,
        selector_loss: Tensor | None,
    ) -> None:
        if torch.compiler.is_compiling() or name in self._samples:
            return

        def take_sample() -> None:
            batch, seq_len = blocks.shape[:2]
            stride = math.ceil(batch * seq_len / MAX_QUERIES)
            selector_statistics = None
            if selector_loss is not None:
                queries, target = self._layers[name].selector_target
                recall = _recall(queries, target, blocks, cu_seqlens, self._spec)
                selector_statistics = torch.cat([selector_loss[None], recall])
            self._samples[name] = _Sample(  # copies, which keep no activation alive
                None if gates is None else gates[:, ::stride].detach().clone(),
                blocks[:, ::stride].clone(),
                blocks[:, stride - 1 : -1 : stride].clone(),
                stride,
                seq_len,
                cu_seqlens,
                selector_statistics,
            )

        self._try(take_sample)

    def _try(self, work: Callable[[], T]) -> T | None:
        """Call `work`; if it fails (for example out of memory), switch the recorder off."""
        try:
            # Selective checkpointing counts operations, but must not count those of `work`.
            with _disable_current_modes(), torch.no_grad():
                return work()
        except Exception as error:
            warn(f"layer health is off for the rest of the run: {error!r}")
            self._disarm()
            self._layers = {}
            return None


def _recall(
    queries: Tensor, target: Tensor, blocks: Tensor, cu_seqlens: Tensor | None, spec: NSASpec
) -> Tensor:
    """Return [2]: the fraction of target attention in selected blocks, and in as many random ones.

    Only queries with more candidates than they select count; NaN if there are none.
    """
    count = target.shape[-1]
    own = (queries - _document_starts(queries, cu_seqlens)) // spec.select_len  # [S]
    number = torch.arange(count, device=queries.device)
    ranked = (number >= spec.init_blocks) & (number <= own[:, None] - spec.local_blocks)  # [S, M]
    index = blocks[:, queries].transpose(1, 2).long()  # [B, Hkv, S, n]
    # The padding of index, -1, goes into an additional last column.
    selected = torch.zeros(*target.shape[:-1], count + 1, dtype=torch.bool, device=target.device)
    selected = selected.scatter_(-1, index.where(index >= 0, count), True)[..., :count]
    target = target * (own >= spec.select_top)[:, None]
    # A random selection of k of r ranked blocks holds k / r of their target attention.
    chance = (selected & ranked).sum(-1) / ranked.sum(-1).clamp(min=1)
    in_selected = (target * selected).sum()
    in_random = (target.sum(-1) * chance).sum()
    return torch.stack((in_selected, in_random)) / target.sum()


def _document_starts(position: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the first position of each position's document."""
    if cu_seqlens is None:
        return torch.zeros_like(position)
    offsets = cu_seqlens.to(position)
    return offsets[torch.searchsorted(offsets, position, right=True) - 1]


def _statistics(samples: list[_Sample], spec: NSASpec) -> list[LayerStatistics]:
    """Compute the statistics of all layers on the device; copy them to the host together.

    A layer without gates has None as gate statistics. Statistics of free blocks, which importance
    selects, are None where there are no free blocks: the device computes NaN = 0/0.
    """
    names = [name for name in LAYER_STATISTICS if not name.startswith("gate_")]
    columns = _block_statistics(samples, spec)
    selector = [x.selector_statistics for x in samples if x.selector_statistics is not None]
    if selector:
        names += SELECTOR_STATISTICS
        columns += torch.stack(selector).unbind(1)
    if gates := [sample.gates for sample in samples if sample.gates is not None]:
        names += [name for name in LAYER_STATISTICS if name.startswith("gate_")]
        stacked = torch.stack(gates).float()  # [L, B, S, Hq, 3]
        columns += stacked.mean((1, 2, 3)).unbind(1)
        columns += stacked.std((1, 2, 3), correction=0).unbind(1)
    layers = []
    for row in torch.stack(columns, 1).tolist():
        values: LayerStatistics = dict.fromkeys(LAYER_STATISTICS)
        for name, value in zip(names, row, strict=True):
            values[name] = None if math.isnan(value) and "gate" not in name else value
        layers.append(values)
    return layers


def _block_statistics(samples: list[_Sample], spec: NSASpec) -> list[Tensor]:
    """Return "choosing", "entropy", "overlap" and "distance" of LAYER_STATISTICS, each [L]."""
    blocks = torch.stack([sample.blocks for sample in samples])  # [L, B, S, Hkv, n]
    previous = torch.stack([sample.previous for sample in samples])
    first = samples[0]
    position = torch.arange(0, first.seq_len, first.stride, device=blocks.device, dtype=torch.int32)
    start = _document_starts(position, first.cu_seqlens)
    own = ((position - start) // spec.select_len)[:, None, None]  # the block that a query is in
    selected = blocks >= 0
    always = selected & ((blocks < spec.init_blocks) | (blocks > own - spec.local_blocks))
    has_choice = own >= spec.select_top  # more candidates than can be selected
    free = selected & ~always & has_choice  # selected by importance
    dims = (1, 2, 3, 4)
    return [
        has_choice.float().mean().expand(len(blocks)),
        _entropy(blocks, free, own, first.seq_len, spec),
        _overlap(blocks[:, :, 1:], previous, free[:, :, 1:]),
        ((own - blocks) * free).sum(dims) / free.sum(dims),
    ]


def _entropy(blocks: Tensor, free: Tensor, own: Tensor, seq_len: int, spec: NSASpec) -> Tensor:
    """Return the entropy of the free blocks, scaled to 0 (always the same) … 1 (uniform); [L].

    It is lowest if all queries select the same n free blocks, each with p = 1 / n: log(n).
    """
    layers, heads = len(blocks), blocks.shape[3]
    columns = math.ceil(seq_len / spec.select_len)
    rows = torch.arange(layers * heads, device=blocks.device).view(layers, 1, 1, heads, 1)
    cells = (rows * columns + blocks.clamp(min=0)).flatten()
    counts = torch.zeros(layers * heads * columns, device=blocks.device, dtype=torch.int64)
    counts.scatter_add_(0, cells, free.flatten().long())
    counts = counts.view(layers, heads, columns)
    p = counts / counts.sum(-1, keepdim=True)
    entropy = -torch.special.xlogy(p, p).sum(-1).mean(-1)
    always = spec.init_blocks + spec.local_blocks  # not free
    lowest = math.log(max(1, spec.select_top - always))
    highest = (own.max() + 1 - always).float().log()
    return (entropy - lowest) / (highest - lowest)


def _overlap(blocks: Tensor, previous: Tensor, counted: Tensor) -> Tensor:
    """Return the fraction of the counted blocks that the previous token also selected; [L].

    The previous token is in the same document: the first query of a document has no free block.
    """
    index = torch.searchsorted(previous, blocks.contiguous()).clamp(max=previous.shape[-1] - 1)
    shared = (previous.gather(-1, index) == blocks) & counted
    return shared.sum((1, 2, 3, 4)) / counted.sum((1, 2, 3, 4))
