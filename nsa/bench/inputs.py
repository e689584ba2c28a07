"""Tensors to attend over, and selections of known content: what is chosen decides the speed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nsa.bench.shapes import Shape
from nsa.ops import NSASpec
from nsa.ops.blockwise import top_blocks

_QUERIES_AT_ONCE = 4096  # so that making a selection needs little memory at any length


@dataclass(frozen=True)
class Inputs:
    """What nsa_attention takes, compressed keys mean-pooled from the selected branch's."""

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor

    @classmethod
    def of(
        cls,
        shape: Shape,
        batch: int,
        seq_len: int,
        spec: NSASpec,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Inputs:
        def random(heads: int, size: int) -> Tensor:
            return torch.randn(batch, seq_len, heads, size, device=device, dtype=dtype)

        q = random(shape.heads, shape.key)
        k_sel, k_win = (random(shape.kv_heads, shape.key) for _ in range(2))
        v_sel, v_win = (random(shape.kv_heads, shape.value) for _ in range(2))
        gates = torch.rand(batch, seq_len, shape.heads, 3, device=device, dtype=dtype)
        pooled = mean_pool(k_sel, spec), mean_pool(v_sel, spec)
        return cls(q, *pooled, k_sel, v_sel, k_win, v_win, gates)

    def local(self, spec: NSASpec) -> Inputs:
        """With queries so alike inside a block that they choose mostly the same blocks."""
        seq_len = self.q.shape[1]
        shared = torch.randn_like(self.q[:, : spec.select_blocks_len(seq_len)])
        q = shared.repeat_interleave(spec.select_len, 1)[:, :seq_len]
        return replace(self, q=q + 0.1 * torch.randn_like(self.q))

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of nsa_attention's arguments."""
        kv = (self.k_cmp, self.v_cmp, self.k_sel, self.v_sel, self.k_win, self.v_win)
        return self.q, *kv, self.gates


def mean_pool(x_BTKD: Tensor, spec: NSASpec) -> Tensor:
    """The mean of each compressed block: [B, N, K, D]."""
    count = spec.compressed_len(x_BTKD.shape[1])
    if count == 0 or spec.block_len == spec.block_stride:
        return x_BTKD[:, : count * spec.block_len].unflatten(1, (count, spec.block_len)).mean(2)
    return x_BTKD.unfold(1, spec.block_len, spec.block_stride).mean(-1)


def selection(
    content: str, batch: int, seq_len: int, kv_heads: int, spec: NSASpec, device: torch.device
) -> Tensor:
    """A valid block_index [B, T, K, n]: always the blocks that the spec forces, and besides them

    random   distinct blocks of the past, drawn anew for each query
    local    the same draw for the queries of one block, but for a little noise: neighbours share
    """
    blocks = spec.select_blocks_len(seq_len)
    block = torch.arange(blocks, device=device)
    own_all = torch.arange(seq_len, device=device) // spec.select_len
    index = torch.full((kv_heads, seq_len, spec.select_top), -1, device=device)
    if blocks <= spec.select_top:
        index[..., :blocks] = torch.where(block <= own_all[:, None], block, -1)
    else:
        shared = torch.rand(kv_heads, blocks, blocks, device=device)
        for start in range(0, seq_len, _QUERIES_AT_ONCE):
            own = own_all[start : start + _QUERIES_AT_ONCE]
            importance = torch.rand(kv_heads, len(own), blocks, device=device)
            if content == "local":
                importance = shared[:, own] + importance / blocks
            index[:, start : start + len(own)] = top_blocks(importance, own[:, None], spec)
    one = index.transpose(0, 1).to(torch.int32)
    return one.expand(batch, *one.shape).contiguous()


def neighbour_overlap(block_index: Tensor) -> float:
    """The share of a query's blocks that the query before it chose too, on average."""
    shared = wanted = 0
    for start in range(1, block_index.shape[1], _QUERIES_AT_ONCE):
        now = block_index[:1, start : start + _QUERIES_AT_ONCE]
        before = block_index[:1, start - 1 : start - 1 + now.shape[1]]
        chosen = now >= 0
        same = (now[..., :, None] == before[..., None, :]).any(-1) & chosen
        shared, wanted = shared + int(same.sum()), wanted + int(chosen.sum())
    return shared / max(1, wanted)
