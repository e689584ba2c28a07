"""Triton kernels of attention over selected blocks: forward, and the gradient of queries.

A tile of neighbouring queries loops over the union of their blocks; a bit per query and block says
whether the query selected it. With few queries per tile this is gathering; with many, which
together select most blocks, it is dense attention that skips the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.common import (
    add_query_gradient,
    document_tile,
    dot,
    finish_softmax,
    gated_rows,
    group_rows,
    kernel,
    load_pair,
    load_rows,
    softmax_step,
    start_softmax,
    store_query_gradient,
    store_rows,
)


@triton.jit
def _query_tile(cu, documents, seq_len, C: tl.constexpr):
    """A program's tile of queries, those with the longest lists first.

    Returns its number in the grid, its first position and its document's length; the document's
    first position over all batches; the tile's first row in memory; and for each row: its query in
    the tile, its offset from the first row, and whether it exists.
    """
    grid_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    _document, tile, start, length = document_tile(cu, documents, grid_tile, seq_len, 1, C.QUERIES)
    t0 = tile * C.QUERIES
    local, at = group_rows(0, C, True)
    valid = (local < C.QUERIES) & (t0 + local < length)
    token = tl.program_id(2).to(tl.int64) * seq_len + start
    row = ((token + t0) * C.HEADS + head) * C.GROUP
    return grid_tile, t0, length, token, row, local, at, valid


@triton.jit
def _block_list(blocks, counts, grid_tile, t0, list_len, C: tl.constexpr):
    """Where a tile's list of blocks begins, and its steps of at most KEYS keys.

    Of the `past` steps, which come first, every query is later than all keys.
    """
    PARTS: tl.constexpr = (C.SELECT + C.KEYS - 1) // C.KEYS
    list_id = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + grid_tile
    list_id = list_id * tl.num_programs(1) + tl.program_id(1)
    count = tl.load(counts + list_id)
    # Lists ascend, and the at most 32 queries of a tile have no more blocks of their own.
    i = count - 1 - tl.arange(0, 32)
    block = tl.load(blocks + list_id * list_len + i, mask=i >= 0, other=-1)
    past = count - tl.sum((block >= t0 // C.SELECT).to(tl.int32), 0)
    return list_id * list_len, past * PARTS, count * PARTS


@triton.jit
def _scores(
    q, k, v, blocks, members, step, t, local, token, length, C: tl.constexpr, PAST: tl.constexpr
):  # fmt: skip
    """Keys and values [KEYS, ..] of one step of a tile's list, their scores [ROWS, KEYS], and rows.

    `rows` [ROWS] says which rows selected the block. In a step of the past scores are not masked.
    Else one bound per row masks later positions, or all if the row did not select the block: a
    single comparison per score.
    """
    PARTS: tl.constexpr = (C.SELECT + C.KEYS - 1) // C.KEYS
    PARTIAL: tl.constexpr = C.SELECT % C.KEYS != 0  # the last step's keys may be the next block's
    first = tl.load(blocks + step // PARTS) * C.SELECT + step % PARTS * C.KEYS
    bits = tl.load(members + step // PARTS)
    rows = ((bits >> local) & 1) == 1
    i = tl.arange(0, C.KEYS)
    left = C.SELECT - step % PARTS * C.KEYS
    own = i < left
    at = (token + first) * C.HEADS + tl.program_id(1)
    if PAST:
        inside = own if PARTIAL else None
    else:
        inside = i < length - first
        seen = tl.where(rows, t - first, -1)
        if PARTIAL:
            inside = inside & own
            seen = tl.minimum(seen, left - 1)
    k_tile, v_tile = load_pair(k, v, at, i, C.HEADS, C, inside)
    s = dot(q, tl.trans(k_tile))
    if not PAST:
        s = tl.where(i[None, :] <= seen[:, None], s, float("-inf"))
    elif PARTIAL:
        s = tl.where(own[None, :], s, float("-inf"))
    return k_tile, v_tile, s, rows


@kernel
def selected_forward_kernel(
    q, k, v, o, lse, o_cmp, o_win, gates, gated_sum, cu, blocks, members, counts,
    seq_len, documents, list_len, scale, C: tl.constexpr,
):  # fmt: skip
    """o and lse of one tile of queries; with `gates` also the gated sum of all branches."""
    grid_tile, t0, length, token, row, local, at, valid = _query_tile(cu, documents, seq_len, C)
    if t0 < length:
        list_at, past, steps = _block_list(blocks, counts, grid_tile, t0, list_len, C)
        q_tile = load_rows(q + row * C.KEY, at, C.KEY, C.KEY, C.KEY_P, valid)  # [ROWS, KEY_P]
        m, total, acc = start_softmax(C.ROWS, C.VALUE_P)
        for phase in tl.static_range(2):
            for step in range(past * phase, past if phase == 0 else steps):
                _, v_tile, s, rows = _scores(
                    q_tile, k, v, blocks + list_at, members + list_at, step, t0 + local, local,
                    token, length, C, phase == 0,
                )  # fmt: skip
                if phase == 0:
                    m, total, acc = softmax_step(s, v_tile, m, total, acc, scale, rows)
                else:
                    m, total, acc = softmax_step(s, v_tile, m, total, acc, scale)
        out, logsum = finish_softmax(m, total, acc)
        store_rows(o + row * C.VALUE, at, C.VALUE, out, C.VALUE, C.VALUE_P, valid)
        tl.store(lse + row + at, logsum, mask=valid)
        if gates is not None:
            gate = gates + (row + at) * 3
            out *= tl.load(gate + 1, mask=valid, other=0.0).to(tl.float32)[:, None]
            out += gated_rows(o_cmp + row * C.VALUE, at, gate, valid, C.VALUE, C.VALUE_P)
            out += gated_rows(o_win + row * C.VALUE, at, gate + 2, valid, C.VALUE, C.VALUE_P)
            store_rows(gated_sum + row * C.VALUE, at, C.VALUE, out, C.VALUE, C.VALUE_P, valid)


@kernel
def selected_queries_kernel(
    q, k, v, do, lse2, delta, dq, cu, blocks, members, counts,
    seq_len, documents, list_len, scale, scale_out, C: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries."""
    ROWS: tl.constexpr = C.ROWS
    KEY_P: tl.constexpr = C.KEY_P
    grid_tile, t0, length, token, row, local, at, valid = _query_tile(cu, documents, seq_len, C)
    if t0 < length:
        list_at, past, steps = _block_list(blocks, counts, grid_tile, t0, list_len, C)
        q_tile, do_tile = load_pair(q, do, row, at, 1, C, valid)  # [ROWS, ..]
        row_lse = tl.load(lse2 + row + at, mask=valid, other=float("inf"))
        row_delta = tl.load(delta + row + at, mask=valid, other=0.0)
        acc = tl.zeros([ROWS, KEY_P], tl.float32)
        for phase in tl.static_range(2):
            for step in range(past * phase, past if phase == 0 else steps):
                k_tile, v_tile, s, rows = _scores(
                    q_tile, k, v, blocks + list_at, members + list_at, step, t0 + local, local,
                    token, length, C, phase == 0,
                )  # fmt: skip
                lse = row_lse
                if phase == 0:
                    lse = tl.where(rows, row_lse, float("inf"))  # p = 0
                acc = add_query_gradient(s, k_tile, v_tile, do_tile, lse, row_delta, acc, scale)
        store_query_gradient(dq + row * C.KEY, at, acc, scale_out, valid, C, ADD)
