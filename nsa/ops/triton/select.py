"""Importance and top-n in one kernel: nothing but the chosen indices is written.

Selection block j gathers the compressed blocks that overlap it. There are at most COUNT of them,
and number c of block j is low(j) + c. So for each c one tile of keys, a row for each j of a tile,
gives that overlap's softmax for all j at once: heads and overlaps add up in registers, whatever
the sizes. A running top-n takes in each tile of importance.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.common import (
    LOG2E,
    kernel,
    keys_before,
    load_rows,
    locate,
    offsets_of,
    padded_size,
    precision,
    probabilities,
    slots,
    span,
    visible,
)
from nsa.ops.triton.configs import choose_config
from nsa.ops.triton.launch import launch, rows_contiguous, strides
from nsa.spec import NSASpec

NONE = tl.constexpr(1 << 30)  # an index that no block has


@triton.jit
def first_touching(j, LEN: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr):
    """The first compressed block to touch selection block j: the least i with i·d + l > j·l'."""
    BACK: tl.constexpr = (LEN + STRIDE - 1) // STRIDE
    return (j * SELECT - LEN + BACK * STRIDE) // STRIDE - BACK + 1


@triton.jit
def common_positions(i, j, LEN: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr):
    """How many positions compressed block i and selection block j share; 0 or less for none."""
    last = tl.minimum(i * STRIDE + LEN, (j + 1) * SELECT)
    return last - tl.maximum(i * STRIDE, j * SELECT)


@triton.jit
def _importance(
    q, k, lse, t, j, valid, q_t, q_h, k_t, lse_t, lse_h, scale,
    GROUP: tl.constexpr, KEY: tl.constexpr, KEY_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr, COUNT: tl.constexpr,
    QUERIES: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ over heads and overlapping visible blocks i of p[i] · overlap(i, j): [QUERIES, BLOCKS].

    Not divided by the stride: a common factor ranks nothing. In the order of i, so that blocks
    which the same ones overlap in the same measure come out equal to the last bit.
    """
    low = first_touching(j, LEN, STRIDE, SELECT)
    seen_by = visible(t, LEN, STRIDE)
    most = tl.max(seen_by, 0)
    row = tl.arange(0, QUERIES)
    total = tl.zeros([QUERIES, BLOCKS], tl.float32)
    for c in range(COUNT):
        i = low + c
        known = ((i >= 0) & (i < most)) if MASKED else None
        k_tile = load_rows(k, i.to(tl.int64), k_t, KEY, KEY_P, known)
        if SELECT % STRIDE == 0:  # then number c of every block overlaps it alike
            first = first_touching(0, LEN, STRIDE, SELECT) + c
            weight = tl.maximum(common_positions(first, 0, LEN, STRIDE, SELECT), 0).to(tl.float32)
        else:
            shared = common_positions(i, j, LEN, STRIDE, SELECT)
            weight = tl.maximum(shared, 0).to(tl.float32)[None, :]
        for h in range(GROUP):
            q_tile = load_rows(q + h * q_h, row, q_t, KEY, KEY_P, valid)
            row_lse = tl.load(lse + row * lse_t + h * lse_h, mask=valid, other=float("-inf"))
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            if MASKED:
                seen = (i >= 0)[None, :] & (i[None, :] < seen_by[:, None])
                s = tl.where(seen, s, float("-inf"))
            total += probabilities(s * scale, row_lse[:, None]) * weight
    return total


@triton.jit
def _keep_best(score, j, best, index):
    """Take a tile of scores into the running best of each row; among equals the lower index stays.

    Tiles come in the order of j, so an equal score later never replaces one that is there.
    """
    least = tl.min(best, 1)
    top = tl.max(score, 1)
    while tl.max((top > least).to(tl.int32), 0) > 0:
        better = (top > least)[:, None]
        found = tl.min(tl.where(score == top[:, None], j[None, :], NONE), 1)
        worst = tl.max(tl.where(best == least[:, None], index, -1), 1)
        out = better & (best == least[:, None]) & (index == worst[:, None])
        best = tl.where(out, top[:, None], best)
        index = tl.where(out, found[:, None], index)
        score = tl.where(better & (j[None, :] == found[:, None]), -2.0, score)
        least = tl.min(best, 1)
        top = tl.max(score, 1)
    return best, index


@kernel
def select_kernel(
    q, k, lse, out, cu,
    q_b, q_t, q_h, k_b, k_t, k_h, lse_b, lse_t, lse_h, out_b, out_t, out_h,
    q_len, seq_len, documents, scale,
    GROUP: tl.constexpr, KEY: tl.constexpr, KEY_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr, COUNT: tl.constexpr,
    TOP: tl.constexpr, TOP_P: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    PACKED: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    start = 0
    length = q_len
    first_key = 0
    before = seq_len - q_len  # q may hold the last positions alone
    if PACKED:
        document, start, end, tile = locate(cu, documents, tile, 1, QUERIES)
        length = end - start
        first_key = keys_before(cu, document, LEN, STRIDE)
        before = 0
    row = tl.arange(0, QUERIES)
    if tile * QUERIES < length:
        valid = tile * QUERIES + row < length
        t = before + tl.minimum(tile * QUERIES + row, length - 1)
        own = t // SELECT
        here = tl.cast(start + tile * QUERIES, tl.int64)
        q += batch * q_b + here * q_t + head * GROUP * q_h
        lse += batch * lse_b + here * lse_t + head * GROUP * lse_h
        k += batch * k_b + tl.cast(first_key, tl.int64) * k_t + head * k_h
        out += batch * out_b + here * out_t + head * out_h

        slot = tl.arange(0, TOP_P)[None, :]
        last = tl.max(own, 0)
        index = tl.where(slot <= own[:, None], slot, NONE)  # right where no more than TOP are there
        if last >= TOP:
            best = tl.where(slot < TOP, -1.0, float("inf")) + tl.zeros([QUERIES, 1], tl.float32)
            index = tl.where(slot < TOP, NONE + slot, NONE) + tl.zeros([QUERIES, 1], tl.int32)
            # From `known` on no block begins before the document, and up to `every` all queries see
            # every compressed block that is looked at (one more than touches, at the most).
            known = tl.cdiv(tl.cdiv(LEN - STRIDE, SELECT), BLOCKS) * BLOCKS
            every = tl.maximum(tl.min(visible(t, LEN, STRIDE), 0) - 1, 0) * STRIDE // SELECT
            every = tl.maximum(every // BLOCKS * BLOCKS, known)
            for phase in tl.static_range(3):
                begin, stop = span(phase, 0, known, every, last + 1)
                for first in range(begin, stop, BLOCKS):
                    j = first + tl.arange(0, BLOCKS)
                    score = _importance(
                        q, k, lse, t, j, valid, q_t, q_h, k_t, lse_t, lse_h, scale,
                        GROUP, KEY, KEY_P, LEN, STRIDE, SELECT, COUNT,
                        QUERIES, BLOCKS, phase != 1, PRECISION,
                    )  # fmt: skip
                    always = (j < INIT)[None, :] | (j[None, :] > (own - LOCAL)[:, None])
                    score = tl.where(always, float("inf"), score)
                    score = tl.where(j[None, :] <= own[:, None], score, -2.0)
                    best, index = _keep_best(score, j, best, index)
            index = tl.where(slot < TOP, index, NONE)
            if TOP_P > 1:
                index = tl.sort(index, 1)
        tl.store(
            out + (row * out_t)[:, None] + slot,
            tl.where(index < NONE, index, -1),
            mask=valid[:, None] & (slot < TOP),
        )


def select_forward(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    spec: NSASpec,
    seq_len: int,
    scale: float,
) -> Tensor:
    """The blocks that each query attends to: int32 [B, T, K, n]."""
    q, k_cmp, lse = map(rows_contiguous, (q, k_cmp, lse))
    batch, queries, heads, size = q.shape
    groups = k_cmp.shape[2]
    out = q.new_empty(batch, queries, groups, spec.select_top, dtype=torch.int32)
    config = choose_config("select", (padded_size(size), 0), q.dtype)
    cu, documents = offsets_of(cu_seqlens)
    launch(
        select_kernel,
        (slots(queries, config.rows, cu_seqlens), groups, batch),
        {"q": q, "k": k_cmp, "lse": lse, "out": out, "cu": cu}
        | strides(q=q, k=k_cmp, lse=lse, out=out)
        | {"q_len": queries, "seq_len": seq_len, "documents": documents, "scale": scale * LOG2E},
        {
            "GROUP": heads // groups,
            "KEY": size,
            "KEY_P": padded_size(size),
            "LEN": spec.block_len,
            "STRIDE": spec.block_stride,
            "SELECT": spec.select_len,
            "COUNT": spec.touching,
            "TOP": spec.select_top,
            "TOP_P": triton.next_power_of_2(spec.select_top),
            "INIT": spec.init_blocks,
            "LOCAL": spec.local_blocks,
            "PACKED": cu_seqlens is not None,
            "QUERIES": config.rows,
            "BLOCKS": min(
                config.keys, max(16, triton.next_power_of_2(spec.select_blocks_len(seq_len)))
            ),
            "PRECISION": precision(q.dtype),
        },
        config,
    )
    return out


@torch.library.custom_op("nsa::triton_select", mutates_args=())
def triton_select(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    pattern: list[int],
    seq_len: int,
    scale: float,
) -> Tensor:
    """The blocks that each query attends to: int32 [B, T, K, n]."""
    return select_forward(q, k_cmp, lse, cu_seqlens, NSASpec(*pattern), seq_len, scale)


@triton_select.register_fake
def _(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    pattern: list[int],
    seq_len: int,
    scale: float,
) -> Tensor:
    return q.new_empty(*q.shape[:2], k_cmp.shape[2], pattern[3], dtype=torch.int32)
