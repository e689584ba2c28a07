"""Block selection in one Triton kernel: importance and top-n; only the selected indices are stored.

Selection block j overlaps at most COUNT compressed blocks: first_overlap(j) + c for c < COUNT. For
each c, the kernel loads a tile of keys whose row j is the c-th compressed block that overlaps j. So
the products with this tile have a column per j, and are added in registers over heads and c. Each
tile of importance is merged into a running top-n.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.custom_op import register
from nsa.ops.inputs import SelectionInputs
from nsa.ops.triton.common import (
    LOG2E,
    binary_lse,
    constants_of,
    document_offsets,
    document_tile,
    dot,
    kernel,
    keys_before,
    load_rows,
    max_tiles,
    span,
    visible,
)
from nsa.ops.triton.configs import choose_config
from nsa.ops.triton.launch import launch, next_power_of_2, padded_size

NONE = tl.constexpr(1 << 30)  # an index that no block has
LEAST = tl.constexpr(-1e30)  # the lowest score of a candidate
EMPTY = tl.constexpr(-2e30)  # the score of an empty place in the top-n
TAKEN = tl.constexpr(-3e30)  # the score of a block that is no candidate, or is already taken


@triton.jit
def first_overlap(j, C: tl.constexpr):
    """Return the first compressed block that overlaps j: the least i with i·d + l > j·l'."""
    # Triton divides towards 0: adding BACK · STRIDE makes the dividend positive.
    BACK: tl.constexpr = (C.LEN + C.STRIDE - 1) // C.STRIDE
    return (j * C.SELECT - C.LEN + BACK * C.STRIDE) // C.STRIDE - BACK + 1


@triton.jit
def overlap(i, j, C: tl.constexpr):
    """Count the positions that compressed block i and selection block j share."""
    last = tl.minimum(i * C.STRIDE + C.LEN, (j + 1) * C.SELECT)
    return tl.maximum(last - tl.maximum(i * C.STRIDE, j * C.SELECT), 0).to(tl.float32)


@triton.jit
def _importance(q, k, lse, t, j, valid, scale, C: tl.constexpr, MASKED: tl.constexpr):
    """Return Σ p[i] · overlap(i, j) over heads and visible blocks i: [QUERIES, BLOCKS].

    The sum is not divided by the stride: a common factor does not change the ranking. It is added
    in the order of i, so that two blocks with the same terms get the same bits.
    """
    QUERIES: tl.constexpr = C.QUERIES
    BLOCKS: tl.constexpr = C.BLOCKS
    ROW: tl.constexpr = C.HEADS * C.GROUP
    low = first_overlap(j, C)
    seen_by = visible(t, C)
    high = tl.max(seen_by, 0)
    row = tl.arange(0, QUERIES)
    total = tl.zeros([QUERIES, BLOCKS], tl.float32)
    for c in range(C.COUNT):
        i = low + c
        inside = ((i >= 0) & (i < high)) if MASKED else None
        # [BLOCKS, KEY_P]
        k_tile = load_rows(k, i.to(tl.int64), C.HEADS * C.KEY, C.KEY, C.KEY_P, inside)
        if C.SELECT % C.STRIDE == 0:  # then the c-th overlap is the same for every j
            weight = overlap(first_overlap(0, C) + c, 0, C)
        else:
            weight = overlap(i, j, C)[None, :]
        for h in range(C.GROUP):
            q_tile = load_rows(q + h * C.KEY, row, ROW * C.KEY, C.KEY, C.KEY_P, valid)
            row_lse = tl.load(lse + row * ROW + h, mask=valid, other=float("-inf"))
            s = dot(q_tile, tl.trans(k_tile))
            if MASKED:
                seen = (i >= 0)[None, :] & (i[None, :] < seen_by[:, None])
                s = tl.where(seen, s, float("-inf"))
            total += tl.exp2(s * scale - binary_lse(row_lse)[:, None]) * weight
    return total


@triton.jit
def _log_importance(q, k, t, j, valid, scale, C: tl.constexpr, MASKED: tl.constexpr):
    """Return log2 Σ 2^score[i] · overlap(i, j) over visible blocks i: [QUERIES, BLOCKS].

    There is one query head per KV head, so an lse would not change the order of the blocks. The sum
    is added in the order of i.
    """
    QUERIES: tl.constexpr = C.QUERIES
    BLOCKS: tl.constexpr = C.BLOCKS
    low = first_overlap(j, C)
    seen_by = visible(t, C)
    high = tl.max(seen_by, 0)
    row = tl.arange(0, QUERIES)
    q_tile = load_rows(q, row, C.HEADS * C.KEY, C.KEY, C.KEY_P, valid)  # [QUERIES, KEY_P]
    m = tl.full([QUERIES, BLOCKS], LEAST, tl.float32)
    total = tl.zeros([QUERIES, BLOCKS], tl.float32)
    for c in range(C.COUNT):
        i = low + c
        inside = ((i >= 0) & (i < high)) if MASKED else None
        # [BLOCKS, KEY_P]
        k_tile = load_rows(k, i.to(tl.int64), C.HEADS * C.KEY, C.KEY, C.KEY_P, inside)
        weight = overlap(i, j, C)
        s = dot(q_tile, tl.trans(k_tile)) * scale
        sees = (weight > 0.0)[None, :]
        if MASKED:
            sees = sees & (i >= 0)[None, :] & (i[None, :] < seen_by[:, None])
        s = tl.where(sees, s, LEAST)
        if C.COUNT == 1:  # every block has the same overlap, which does not change the order
            m = s
        else:
            m_new = tl.maximum(m, s)
            part = tl.where(sees, tl.exp2(s - m_new) * weight[None, :], 0.0)
            total = total * tl.exp2(m - m_new) + part
            m = m_new
    if C.COUNT > 1:
        m = tl.where(total > 0.0, m + tl.log2(tl.where(total > 0.0, total, 1.0)), LEAST)
    return tl.maximum(m, LEAST)


@triton.jit
def _keep_best(score, j, best, index):
    """Merge a tile of scores into the running top-n of each row: (scores, indices), unsorted.

    Tiles come in ascending j, and a score replaces only lower ones, so ties go to the lower index.
    """
    least = tl.min(best, 1)
    top = tl.max(score, 1)
    while tl.max((top > least).to(tl.int32), 0) > 0:
        better = (top > least)[:, None]
        block = tl.min(tl.where(score == top[:, None], j[None, :], NONE), 1)
        worst = tl.max(tl.where(best == least[:, None], index, -1), 1)
        replaced = better & (best == least[:, None]) & (index == worst[:, None])
        best = tl.where(replaced, top[:, None], best)
        index = tl.where(replaced, block[:, None], index)
        score = tl.where(better & (j[None, :] == block[:, None]), TAKEN, score)
        least = tl.min(best, 1)
        top = tl.max(score, 1)
    return best, index


@kernel
def select_kernel(
    q, k, lse, out, cu, q_len, seq_len, key_len, documents, scale,
    C: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """Select the blocks of one tile of queries; `q` may hold only a document's last positions."""
    QUERIES: tl.constexpr = C.QUERIES
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    grid_tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles, with most blocks, first
    document, tile, start, length = document_tile(cu, documents, grid_tile, q_len, 1, QUERIES)
    before = seq_len - q_len
    row = tl.arange(0, QUERIES)
    if tile * QUERIES < length:
        valid = tile * QUERIES + row < length
        t = before + tl.minimum(tile * QUERIES + row, length - 1)
        own = t // C.SELECT
        token = (batch * q_len + start + tile * QUERIES) * C.HEADS + head
        first_key = batch * key_len + keys_before(cu, document, C)
        q += token * C.GROUP * C.KEY
        if lse is not None:
            lse += token * C.GROUP
        k += (first_key * C.HEADS + head) * C.KEY
        entry = tl.arange(0, TOP_P)[None, :]
        last = tl.max(own, 0)
        # Select all candidates, where there are no more than TOP.
        index = tl.where(entry <= own[:, None], entry, NONE)
        if last >= C.TOP:
            best = tl.where(entry < C.TOP, EMPTY, float("inf")) + tl.zeros([QUERIES, 1], tl.float32)
            # Different indices, as `_keep_best` replaces the empty place with the highest one.
            index = tl.where(entry < C.TOP, NONE + entry, NONE) + tl.zeros([QUERIES, 1], tl.int32)
            # Blocks from `low` to `high` need no mask: all COUNT compressed blocks read for them,
            # overlapping or not, begin in the document, and all queries see them.
            low = tl.cdiv(tl.cdiv(C.LEN - C.STRIDE, C.SELECT), C.BLOCKS) * C.BLOCKS
            high = tl.maximum(tl.min(visible(t, C), 0) - 1, 0) * C.STRIDE // C.SELECT
            high = tl.maximum(high // C.BLOCKS * C.BLOCKS, low)
            for phase in tl.static_range(3):
                begin, stop = span(phase, 0, low, high, last + 1)
                for first in range(begin, stop, C.BLOCKS):
                    j = first + tl.arange(0, C.BLOCKS)
                    if lse is None:
                        score = _log_importance(q, k, t, j, valid, scale, C, phase != 1)
                    else:
                        score = _importance(q, k, lse, t, j, valid, scale, C, phase != 1)
                    always = (j < C.INIT)[None, :] | (j[None, :] > (own - C.LOCAL)[:, None])
                    score = tl.where(always, float("inf"), score)
                    score = tl.where(j[None, :] <= own[:, None], score, TAKEN)
                    best, index = _keep_best(score, j, best, index)
            index = tl.where(entry < C.TOP, index, NONE)
            if TOP_P > 1:
                index = tl.sort(index, 1)
        tl.store(
            out + token * C.TOP + (row * (C.HEADS * C.TOP))[:, None] + entry,
            tl.where(index < NONE, index, -1),
            mask=valid[:, None] & (entry < C.TOP),
        )


def select_forward(x: SelectionInputs) -> Tensor:
    """Return the blocks that each query selects, int32 [B, T, Hkv, n]."""
    (batch, queries, _, size), groups, spec = x.q.shape, x.k_cmp.shape[2], x.spec
    out = x.empty_index()
    summed = x.lse is None and spec.max_overlaps > 1  # a running maximum and sum take registers
    config = choose_config("select_summed" if summed else "select", (padded_size(size), 0), x.q)
    blocks = min(config.keys, max(16, next_power_of_2(spec.select_blocks_len(x.seq_len))))
    cu, documents = document_offsets(x.cu_seqlens)
    launch(
        select_kernel, (max_tiles(queries, config.rows, x.cu_seqlens), groups, batch), config,
        q=x.q.contiguous(), k=x.k_cmp.contiguous(),
        lse=None if x.lse is None else x.lse.contiguous(), out=out, cu=cu,
        q_len=queries, seq_len=x.seq_len, key_len=x.k_cmp.shape[1], documents=documents,
        scale=x.scale * LOG2E,
        C=constants_of(x.q, x.k_cmp, spec=spec, QUERIES=config.rows, BLOCKS=blocks),
        TOP_P=next_power_of_2(spec.select_top),
    )  # fmt: skip
    return out


triton_select = register(
    "nsa::triton_select", SelectionInputs, select_forward, fake=SelectionInputs.empty_index
)
