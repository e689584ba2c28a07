"""Decoding: attention of one new token per sequence over the buffers of a KV cache.

A token costs O(T/d + n·l' + w), without host synchronisation or loops over sequences or blocks.
Sizes in names: B sequences, K KV heads, G query heads per KV head, N keys, n selected blocks.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from nsa.ops import triton
from nsa.ops.backend import dispatch
from nsa.ops.blockwise import log_sum_overlaps, overlap_table, sum_overlaps, top_blocks
from nsa.ops.inputs import DecodeInputs
from nsa.spec import NSASpec


def decode_attention(x: DecodeInputs, backend: str = "auto") -> Tensor:
    """Return `nsa_attention` of the last token of each sequence alone, [B, Hq, Dv].

    The backends "blockwise" and "reference" both run the PyTorch code in this file.
    """
    q, k_cmp, lengths, spec, branches = x.q, x.k_cmp, x.lengths, x.spec, x.branches.split("+")
    pairs = {name: x.pair(name) for name in branches}
    values = (v for _, v in pairs.values())
    if dispatch(backend, "decode_attention", q[:, None], *values) is triton:
        from nsa.ops.triton.decode import triton_decode

        return triton_decode(x)
    dtype = torch.promote_types(q.dtype, torch.float32)
    kv_heads = pairs[branches[0]][0].shape[2]
    q_BKGD = (q.to(dtype) * x.scale).unflatten(1, (kv_heads, -1))
    outputs: dict[str, Tensor] = {}
    if k_cmp is not None:
        first = torch.arange(k_cmp.shape[1], device=lengths.device) * spec.block_stride
        seen = (first + spec.block_len <= lengths[:, None])[:, None]  # complete blocks [B, 1, N]
        if x.q_cmp is None:
            p = _softmax(q_BKGD, k_cmp.transpose(1, 2), seen)  # [B, K, G, N]
            ranking = p.sum(2)  # [B, K, N]
        else:
            q_BK1D = (x.q_cmp.to(dtype) * x.scale)[:, :, None]
            score = q_BK1D @ k_cmp.to(dtype).permute(0, 2, 3, 1)  # [B, K, 1, N]
            ranking = score[:, :, 0].masked_fill(~seen, -torch.inf)
        if "cmp" in pairs:
            outputs["cmp"] = _weighted(p, pairs["cmp"][1].transpose(1, 2), seen)
        if "sel" in pairs:
            capacity = pairs["sel"][0].shape[1]
            index = _select(ranking, lengths, spec, capacity, logarithmic=x.q_cmp is not None)
            outputs["sel"] = _attend(q_BKGD, *_selected_keys(*pairs["sel"], index, lengths, spec))
    if "win" in pairs:
        outputs["win"] = _attend(q_BKGD, *_window_keys(*pairs["win"], lengths, spec.window))
    if x.gates is None:
        return outputs[branches[0]].flatten(1, 2).to(q.dtype)
    mixed = [
        gate[..., None] * outputs[name].flatten(1, 2).to(q.dtype)
        for name, gate in zip(branches, x.gates.unbind(-1), strict=True)
    ]
    return reduce(torch.add, mixed)  # in q's dtype, with the same rounding as nsa_attention


def _select(
    ranking_BKN: Tensor, lengths: Tensor, spec: NSASpec, capacity: int, logarithmic: bool
) -> Tensor:
    """Return each sequence's selected blocks, ascending, padded with -1: [B, K, n or fewer].

    `ranking_BKN` holds probabilities of compressed keys, or their scores if `logarithmic`.
    """
    own = torch.div(lengths - 1, spec.select_len, rounding_mode="floor")[:, None, None]
    if spec.select_blocks_len(capacity) <= spec.select_top:  # every block is selected
        block = torch.arange(spec.select_blocks_len(capacity), device=own.device)
        return torch.where(block <= own, block, -1).expand(-1, ranking_BKN.shape[1], -1)
    add = log_sum_overlaps if logarithmic else sum_overlaps
    table = overlap_table(capacity, spec, ranking_BKN.dtype, ranking_BKN.device)
    return top_blocks(add(ranking_BKN, *table), own, spec)


def _selected_keys(
    k: Tensor, v: Tensor, index_BKn: Tensor, lengths: Tensor, spec: NSASpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values of the selected blocks [B, K, n·l', D], and which are visible."""
    inside = torch.arange(spec.select_len, device=k.device)
    position = (index_BKn[..., None] * spec.select_len + inside).flatten(-2)
    seen = (position >= 0) & (position < lengths[:, None, None])
    batch = torch.arange(len(k), device=k.device)[:, None, None]
    head = torch.arange(k.shape[2], device=k.device)[:, None]
    token = batch * k.shape[1] + position.clamp(0, k.shape[1] - 1)
    # index_select on a matrix: indexing with three tensors takes four times as long on a CPU.
    row = (token * k.shape[2] + head).flatten()
    k, v = (x.flatten(0, 2).index_select(0, row).view(*token.shape, -1) for x in (k, v))
    return k, v, seen


def _window_keys(
    k: Tensor, v: Tensor, lengths: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values of the window [B, K, N, D], and which are visible."""
    last, size = lengths[:, None] - 1, k.shape[1]
    slot = torch.arange(min(size, window), device=k.device)
    if size <= window:  # all of the ring, in storage order
        age = (last - slot) % size
    else:  # the window's part of the ring, newest first
        age, batch = slot, torch.arange(len(k), device=k.device)[:, None]
        k, v = (x[batch, (last - age) % size] for x in (k, v))
    return k.transpose(1, 2), v.transpose(1, 2), (age <= last)[:, None]


def _attend(q_BKGD: Tensor, k_BKND: Tensor, v_BKND: Tensor, seen: Tensor) -> Tensor:
    return _weighted(_softmax(q_BKGD, k_BKND, seen), v_BKND, seen)


def _softmax(q_BKGD: Tensor, k_BKND: Tensor, seen: Tensor) -> Tensor:
    """Return probabilities [B, K, G, N], 0 where `seen` [B, K or 1, N] is false."""
    seen = seen[:, :, None]
    score = (q_BKGD @ k_BKND.to(q_BKGD.dtype).mT).masked_fill(~seen, -torch.inf)
    return score.softmax(-1).masked_fill(~seen, 0)


def _weighted(p_BKGN: Tensor, v_BKND: Tensor, seen: Tensor) -> Tensor:
    # Hidden values have weight 0, but 0 * NaN is NaN.
    return p_BKGN @ v_BKND.to(p_BKGN.dtype).masked_fill(~seen[..., None], 0)
