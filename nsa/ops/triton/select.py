"""Block selection in one Triton kernel: importance and top-n; only the selected indices are stored.

Selection block j gathers the compressed blocks that overlap it. There are at most COUNT of them,
and number c of block j is low(j) + c. So for each c one tile of keys, a row for each j of a tile,
gives that overlap's softmax for all j at once: heads and overlaps add up in registers, whatever
the sizes. Each tile of importance is merged into a running top-n.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.custom_op import register
from nsa.ops.inputs import SelectionInputs
from nsa.ops.triton.common import (
    LOG2E,
    document_arguments,
    document_tile,
    dot,
    kernel,
    keys_before,
    load_rows,
    probabilities,
    slots,
    span,
    visible,
)
from nsa.ops.triton.configs import choose_config
from nsa.ops.triton.launch import launch, next_power_of_2, padded_size

NONE = tl.constexpr(1 << 30)  # an index that no block has


@triton.jit
def first_overlap(j, LEN: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr):
    """The first compressed block to overlap selection block j: the least i with i·d + l > j·l'."""
    BACK: tl.constexpr = (LEN + STRIDE - 1) // STRIDE
    return (j * SELECT - LEN + BACK * STRIDE) // STRIDE - BACK + 1


@triton.jit
def overlap(i, j, LEN: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr):
    """Count the positions that compressed block i and selection block j share."""
    last = tl.minimum(i * STRIDE + LEN, (j + 1) * SELECT)
    return tl.maximum(last - tl.maximum(i * STRIDE, j * SELECT), 0).to(tl.float32)


@triton.jit
def _importance(
    q, k, lse, t, j, valid, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, KEY_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr, COUNT: tl.constexpr,
    QUERIES: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Σ over heads and overlapping visible blocks i of p[i] · overlap(i, j): [QUERIES, BLOCKS].

    Not divided by the stride: a common factor ranks nothing. In the order of i, so that blocks
    which the same ones overlap in the same measure come out equal to the last bit.
    """
    low = first_overlap(j, LEN, STRIDE, SELECT)
    seen_by = visible(t, LEN, STRIDE)
    high = tl.max(seen_by, 0)
    row = tl.arange(0, QUERIES)
    total = tl.zeros([QUERIES, BLOCKS], tl.float32)
    for c in range(COUNT):
        i = low + c
        inside = ((i >= 0) & (i < high)) if MASKED else None
        k_tile = load_rows(k, i.to(tl.int64), HEADS * KEY, KEY, KEY_P, inside)  # [BLOCKS, KEY_P]
        if SELECT % STRIDE == 0:  # then number c of every block overlaps it alike
            weight = overlap(first_overlap(0, LEN, STRIDE, SELECT) + c, 0, LEN, STRIDE, SELECT)
        else:
            weight = overlap(i, j, LEN, STRIDE, SELECT)[None, :]
        for h in range(GROUP):
            q_tile = load_rows(q + h * KEY, row, HEADS * GROUP * KEY, KEY, KEY_P, valid)
            row_lse = tl.load(lse + row * (HEADS * GROUP) + h, mask=valid, other=float("-inf"))
            s = dot(q_tile, tl.trans(k_tile))
            if MASKED:
                seen = (i >= 0)[None, :] & (i[None, :] < seen_by[:, None])
                s = tl.where(seen, s, float("-inf"))
            total += probabilities(s * scale, row_lse[:, None]) * weight
    return total


@triton.jit
def _keep_best(score, j, best, index):
    """Merge a tile of scores into the running best of each row; of equals the lower index stays.

    Tiles come in the order of j, so an equal score later never replaces one that is there.
    """
    least = tl.min(best, 1)
    top = tl.max(score, 1)
    while tl.max((top > least).to(tl.int32), 0) > 0:
        better = (top > least)[:, None]
        block = tl.min(tl.where(score == top[:, None], j[None, :], NONE), 1)
        worst = tl.max(tl.where(best == least[:, None], index, -1), 1)
        out = better & (best == least[:, None]) & (index == worst[:, None])
        best = tl.where(out, top[:, None], best)
        index = tl.where(out, block[:, None], index)
        score = tl.where(better & (j[None, :] == block[:, None]), -2.0, score)
        least = tl.min(best, 1)
        top = tl.max(score, 1)
    return best, index


@kernel
def select_kernel(
    q, k, lse, out, cu, q_len, seq_len, key_len, documents, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, KEY_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr, COUNT: tl.constexpr,
    TOP: tl.constexpr, TOP_P: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    QUERIES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The blocks of one tile of queries, which may be a document's last ones alone."""
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    slot = tl.num_programs(0) - 1 - tl.program_id(0)
    document, tile, start, length = document_tile(cu, documents, slot, q_len, 1, QUERIES)
    before = seq_len - q_len
    row = tl.arange(0, QUERIES)
    if tile * QUERIES < length:
        valid = tile * QUERIES + row < length
        t = before + tl.minimum(tile * QUERIES + row, length - 1)
        own = t // SELECT
        token = (batch * q_len + start + tile * QUERIES) * HEADS + head
        first_key = batch * key_len + keys_before(cu, document, LEN, STRIDE)
        q += token * GROUP * KEY
        lse += token * GROUP
        k += (first_key * HEADS + head) * KEY

        place = tl.arange(0, TOP_P)[None, :]
        last = tl.max(own, 0)
        # All candidates, which is right where there are no more than TOP.
        index = tl.where(place <= own[:, None], place, NONE)
        if last >= TOP:
            best = tl.where(place < TOP, -1.0, float("inf")) + tl.zeros([QUERIES, 1], tl.float32)
            index = tl.where(place < TOP, NONE + place, NONE) + tl.zeros([QUERIES, 1], tl.int32)
            # From `inner` on no compressed block begins before the document, and up to `every` all
            # queries see every compressed block that is read (one more than overlaps, at the most).
            inner = tl.cdiv(tl.cdiv(LEN - STRIDE, SELECT), BLOCKS) * BLOCKS
            every = tl.maximum(tl.min(visible(t, LEN, STRIDE), 0) - 1, 0) * STRIDE // SELECT
            every = tl.maximum(every // BLOCKS * BLOCKS, inner)
            for phase in tl.static_range(3):
                begin, stop = span(phase, 0, inner, every, last + 1)
                for first in range(begin, stop, BLOCKS):
                    j = first + tl.arange(0, BLOCKS)
                    score = _importance(
                        q, k, lse, t, j, valid, scale, HEADS, GROUP, KEY, KEY_P,
                        LEN, STRIDE, SELECT, COUNT, QUERIES, BLOCKS, phase != 1,
                    )  # fmt: skip
                    always = (j < INIT)[None, :] | (j[None, :] > (own - LOCAL)[:, None])
                    score = tl.where(always, float("inf"), score)
                    score = tl.where(j[None, :] <= own[:, None], score, -2.0)
                    best, index = _keep_best(score, j, best, index)
            index = tl.where(place < TOP, index, NONE)
            if TOP_P > 1:
                index = tl.sort(index, 1)
        tl.store(
            out + token * TOP + (row * (HEADS * TOP))[:, None] + place,
            tl.where(index < NONE, index, -1),
            mask=valid[:, None] & (place < TOP),
        )


def select_forward(x: SelectionInputs) -> Tensor:
    """The blocks that each query attends to: int32 [B, T, Hkv, n]."""
    (batch, queries, heads, size), groups, spec = x.q.shape, x.k_cmp.shape[2], x.spec
    out = x.empty_index()
    config = choose_config("select", (padded_size(size), 0), x.q, x.seq_len)
    blocks = max(16, next_power_of_2(spec.select_blocks_len(x.seq_len)))
    launch(
        select_kernel,
        (slots(queries, config.rows, x.cu_seqlens), groups, batch),
        {"q": x.q.contiguous(), "k": x.k_cmp.contiguous(), "lse": x.lse.contiguous(), "out": out}
        | document_arguments(x.seq_len, x.cu_seqlens)
        | {"q_len": queries, "key_len": x.k_cmp.shape[1], "scale": x.scale * LOG2E},
        {
            **{"HEADS": groups, "GROUP": heads // groups, "KEY": size, "KEY_P": padded_size(size)},
            **{"LEN": spec.block_len, "STRIDE": spec.block_stride, "SELECT": spec.select_len},
            **{"COUNT": spec.max_overlaps, "INIT": spec.init_blocks, "LOCAL": spec.local_blocks},
            **{"TOP": spec.select_top, "TOP_P": next_power_of_2(spec.select_top)},
            **{"QUERIES": config.rows, "BLOCKS": min(config.keys, blocks)},
        },
        config,
    )
    return out


triton_select = register(
    "nsa::triton_select", SelectionInputs, select_forward, fake=SelectionInputs.empty_index
)
