"""Triton kernels of attention over selected blocks: forward, and the gradient of queries.

A tile of neighbouring queries walks the union of their blocks, and a bit for each query says
whether a block is its own. With one query a tile this is plain gathering; with many, where most
blocks are selected by some query anyway, it is dense attention that skips the rest.
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
    load_rows,
    softmax_step,
    store_query_gradient,
    store_rows,
)


@triton.jit
def _block_list(counts, slot, list_len):
    """Where a tile's list of blocks begins, and its length."""
    place = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + slot
    place = place * tl.num_programs(1) + tl.program_id(1)
    return place * list_len, tl.load(counts + place)


@triton.jit
def _scores(
    q, k, v, blocks, members, step, t, local, length,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr, SELECT: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Keys and values [KEYS, ..] of one step of a tile's list, and their scores [ROWS, KEYS].

    A bound for each row says both whether the block is its own and what of it is in the past, so
    a mask costs one comparison a score.
    """
    PARTS: tl.constexpr = (SELECT + KEYS - 1) // KEYS
    first = tl.load(blocks + step // PARTS) * SELECT + step % PARTS * KEYS
    bits = tl.load(members + step // PARTS)
    i = tl.arange(0, KEYS)
    inside = i < length - first
    seen = tl.where(((bits >> local) & 1) == 1, t - first, -1)
    if SELECT % KEYS != 0:  # the rest of the last part belongs to the next block
        left = SELECT - step % PARTS * KEYS
        inside = inside & (i < left)
        seen = tl.minimum(seen, left - 1)
    at = tl.cast(first, tl.int64)
    k_tile = load_rows(k + at * (HEADS * KEY), i, HEADS * KEY, KEY, KEY_P, inside)
    v_tile = load_rows(v + at * (HEADS * VALUE), i, HEADS * VALUE, VALUE, VALUE_P, inside)
    s = dot(q, tl.trans(k_tile))
    return k_tile, v_tile, tl.where(i[None, :] <= seen[:, None], s, float("-inf"))


@kernel
def selected_forward_kernel(
    q, k, v, o, lse, o_cmp, o_win, gates, mixed, cu, blocks, members, counts,
    seq_len, documents, list_len, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr, SELECT: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """o and lse of one tile of queries; with `gates` also the gated sum of branches, `mixed`."""
    slot = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest lists first
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    _document, tile, start, length = document_tile(cu, documents, slot, seq_len, 1, QUERIES)
    if tile * QUERIES < length:
        t0 = tile * QUERIES
        local, at = group_rows(0, HEADS, GROUP, ROWS, True)
        t = t0 + local
        valid = (local < QUERIES) & (t < length)
        token = batch * seq_len + start
        row = ((token + t0) * HEADS + head) * GROUP
        k += (token * HEADS + head) * KEY
        v += (token * HEADS + head) * VALUE
        place, count = _block_list(counts, slot, list_len)
        q_tile = load_rows(q + row * KEY, at, KEY, KEY, KEY_P, valid)  # [ROWS, KEY_P]
        m = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, VALUE_P], tl.float32)
        for step in range(0, count * ((SELECT + KEYS - 1) // KEYS)):
            _, v_tile, s = _scores(
                q_tile, k, v, blocks + place, members + place, step, t, local, length,
                HEADS, KEY, VALUE, KEY_P, VALUE_P, SELECT, KEYS,
            )  # fmt: skip
            m, total, acc = softmax_step(s, v_tile, m, total, acc, scale)
        out, logsum = finish_softmax(m, total, acc, scale)
        store_rows(o + row * VALUE, at, VALUE, out, VALUE, VALUE_P, valid)
        tl.store(lse + row + at, logsum, mask=valid)
        if gates is not None:
            gate = gates + (row + at) * 3
            out *= tl.load(gate + 1, mask=valid, other=0.0).to(tl.float32)[:, None]
            out += gated_rows(o_cmp + row * VALUE, at, gate, valid, VALUE, VALUE_P)
            out += gated_rows(o_win + row * VALUE, at, gate + 2, valid, VALUE, VALUE_P)
            store_rows(mixed + row * VALUE, at, VALUE, out, VALUE, VALUE_P, valid)


@kernel
def selected_queries_kernel(
    q, k, v, do, lse2, delta, dq, cu, blocks, members, counts,
    seq_len, documents, list_len, scale, scale_out,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr, SELECT: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries."""
    slot = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    _document, tile, start, length = document_tile(cu, documents, slot, seq_len, 1, QUERIES)
    if tile * QUERIES < length:
        t0 = tile * QUERIES
        local, at = group_rows(0, HEADS, GROUP, ROWS, True)
        t = t0 + local
        valid = (local < QUERIES) & (t < length)
        token = batch * seq_len + start
        row = ((token + t0) * HEADS + head) * GROUP
        k += (token * HEADS + head) * KEY
        v += (token * HEADS + head) * VALUE
        place, count = _block_list(counts, slot, list_len)
        q_tile = load_rows(q + row * KEY, at, KEY, KEY, KEY_P, valid)  # [ROWS, KEY_P]
        do_tile = load_rows(do + row * VALUE, at, VALUE, VALUE, VALUE_P, valid)  # [ROWS, VALUE_P]
        row_lse = tl.load(lse2 + row + at, mask=valid, other=float("inf"))
        row_delta = tl.load(delta + row + at, mask=valid, other=0.0)
        acc = tl.zeros([ROWS, KEY_P], tl.float32)
        for step in range(0, count * ((SELECT + KEYS - 1) // KEYS)):
            k_tile, v_tile, s = _scores(
                q_tile, k, v, blocks + place, members + place, step, t, local, length,
                HEADS, KEY, VALUE, KEY_P, VALUE_P, SELECT, KEYS,
            )  # fmt: skip
            acc = add_query_gradient(s, k_tile, v_tile, do_tile, row_lse, row_delta, acc, scale)
        store_query_gradient(dq + row * KEY, at, acc, scale_out, KEY, KEY_P, valid, ADD)
