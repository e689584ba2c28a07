"""Random inputs for attention, and how many selected blocks neighbouring queries share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa.bench.options import Shape
from nsa.ops import NSASpec, compress_mean

CHUNK = 4096  # queries compared at once


class Inputs(NamedTuple):
    """nsa_attention's tensors, in order; compressed keys are mean-pooled selected-branch keys."""

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor

    @classmethod
    def random(
        cls,
        shape: Shape,
        batch: int,
        seq_len: int,
        spec: NSASpec,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Inputs:
        def normal(heads: int, size: int) -> Tensor:
            return torch.randn(batch, seq_len, heads, size, device=device, dtype=dtype)

        q = normal(shape.heads, shape.key)
        k_sel, k_win = (normal(shape.kv_heads, shape.key) for _ in range(2))
        v_sel, v_win = (normal(shape.kv_heads, shape.value) for _ in range(2))
        gates = torch.rand(batch, seq_len, shape.heads, 3, device=device, dtype=dtype)
        pooled = compress_mean(k_sel, spec), compress_mean(v_sel, spec)
        return cls(q, *pooled, k_sel, v_sel, k_win, v_win, gates)

    def local(self, spec: NSASpec) -> Inputs:
        """The same with queries of one block so similar that they select mostly the same blocks."""
        seq_len = self.q.shape[1]
        shared = torch.randn_like(self.q[:, : spec.select_blocks_len(seq_len)])
        q = shared.repeat_interleave(spec.select_len, 1)[:, :seq_len]
        return self._replace(q=q + 0.1 * torch.randn_like(self.q))


def neighbour_overlap(block_index: Tensor) -> float:
    """The mean fraction of a query's blocks that the previous query selected too."""
    shared = total = 0
    for start in range(1, block_index.shape[1], CHUNK):
        now = block_index[:1, start : start + CHUNK]
        before = block_index[:1, start - 1 : start - 1 + now.shape[1]]
        selected = now >= 0
        same = (now[..., :, None] == before[..., None, :]).any(-1) & selected
        shared, total = shared + int(same.sum()), total + int(selected.sum())
    return shared / max(1, total)
