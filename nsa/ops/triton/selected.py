"""Attention over chosen blocks, forward and the gradient of queries.

A tile of neighbouring queries walks the union of their blocks, and a bit for each query says
whether a block is its own. With one query a tile this is plain gathering; with many, where most
blocks are chosen by some query anyway, it is dense attention that skips the rest. Rows are laid
out as in band.py, so a group of any size shares each tile of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.common import (
    finish_softmax,
    kernel,
    load_rows,
    locate,
    softmax_step,
    store_rows,
)


@triton.jit
def place_tile(cu, documents, slot, seq_len, TILE: tl.constexpr, PACKED: tl.constexpr):
    """A slot's tile of queries, and its document's first position and length."""
    if PACKED:
        _, start, end, tile = locate(cu, documents, slot, 1, TILE)
        return tile, start, end - start
    return slot, 0, seq_len


@kernel
def union_kernel(
    chosen, blocks, members, counts, cu,
    chosen_b, chosen_t, chosen_h, list_b, list_t, list_h, counts_b, counts_t, counts_h,
    seq_len, documents,
    TOP: tl.constexpr, TOP_P: tl.constexpr, SELECT: tl.constexpr, PACKED: tl.constexpr,
    QUERIES: tl.constexpr, QUERIES_P: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The union of the blocks of a tile's queries, ascending, and who is in each as bits."""
    slot = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    tile, start, length = place_tile(cu, documents, slot, seq_len, QUERIES, PACKED)
    row = tl.arange(0, QUERIES_P)
    valid = (row < QUERIES) & (tile * QUERIES + row < length)
    top = tl.arange(0, TOP_P)
    here = tl.cast(start + tile * QUERIES, tl.int64)
    chosen += batch * chosen_b + here * chosen_t + head * chosen_h
    place = batch * list_b + slot.to(tl.int64) * list_t + head * list_h
    count = 0
    if tile * QUERIES < length:
        index = tl.load(
            chosen + (row * chosen_t)[:, None] + top[None, :],
            mask=valid[:, None] & (top < TOP)[None, :],
            other=-1,
        )
        last = tl.minimum(tile * QUERIES + QUERIES, length) - 1
        for first in range(0, last // SELECT + 1, BLOCKS):
            j = first + tl.arange(0, BLOCKS)
            mine = tl.max((index[:, :, None] == j[None, None, :]).to(tl.int32), 1)
            # Blocks past the tile's last query could outgrow the list's room, and nobody sees them.
            bits = tl.where(j * SELECT <= last, tl.sum(mine << row[:, None], 0), 0)
            some = (bits != 0).to(tl.int32)
            at = place + count + tl.cumsum(some, 0) - 1
            tl.store(blocks + at, j, mask=bits != 0)
            tl.store(members + at, bits, mask=bits != 0)
            count += tl.sum(some, 0)
    tl.store(counts + batch * counts_b + slot.to(tl.int64) * counts_t + head * counts_h, count)


@triton.jit
def _chosen_tile(
    q, k, v, blocks, members, step, k_t, v_t, t, local, length,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    SELECT: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys and values of one step of a tile's list, and q's products with them: -inf where unseen.

    Whose a block is and what of it is in the past are one bound a row: a comparison for each score.
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
    k_tile = load_rows(k + tl.cast(first, tl.int64) * k_t, i, k_t, KEY, KEY_P, inside)
    v_tile = load_rows(v + tl.cast(first, tl.int64) * v_t, i, v_t, VALUE, VALUE_P, inside)
    s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
    return k_tile, v_tile, tl.where(i[None, :] <= seen[:, None], s, float("-inf"))


@kernel
def selected_forward_kernel(
    q, k, v, o, lse, cu, blocks, members, counts,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, lse_b, lse_t, lse_h,
    list_b, list_t, list_h, counts_b, counts_t, counts_h,
    seq_len, documents, scale,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr, SELECT: tl.constexpr, PACKED: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    slot = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest lists first
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    tile, start, length = place_tile(cu, documents, slot, seq_len, QUERIES, PACKED)
    if tile * QUERIES < length:
        i = tl.arange(0, ROWS)
        local = i // GROUP
        h = i % GROUP
        t = tile * QUERIES + local
        valid = (local < QUERIES) & (t < length)
        here = tl.cast(start + tile * QUERIES, tl.int64)
        q += batch * q_b + here * q_t + head * GROUP * q_h
        o += batch * o_b + here * o_t + head * GROUP * o_h
        lse += batch * lse_b + here * lse_t + head * GROUP * lse_h
        k += batch * k_b + tl.cast(start, tl.int64) * k_t + head * k_h
        v += batch * v_b + tl.cast(start, tl.int64) * v_t + head * v_h
        place = batch * list_b + slot.to(tl.int64) * list_t + head * list_h
        count = tl.load(counts + batch * counts_b + slot.to(tl.int64) * counts_t + head * counts_h)
        q_tile = load_rows(q, local * q_t + h * q_h, 1, KEY, KEY_P, valid)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, VALUE_P], tl.float32)
        for step in range(0, count * ((SELECT + KEYS - 1) // KEYS)):
            _, v_tile, s = _chosen_tile(
                q_tile, k, v, blocks + place, members + place, step, k_t, v_t, t, local, length,
                KEY, VALUE, KEY_P, VALUE_P, SELECT, KEYS, PRECISION,
            )  # fmt: skip
            m, total, acc = softmax_step(s, v_tile, m, total, acc, scale, PRECISION)
        out, logsum = finish_softmax(m, total, acc, scale)
        store_rows(o, local * o_t + h * o_h, 1, out, VALUE, VALUE_P, valid)
        tl.store(lse + local * lse_t + h * lse_h, logsum, mask=valid)


@kernel
def selected_queries_kernel(
    q, k, v, do, lse2, delta, dq, cu, blocks, members, counts,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, dq_b, dq_t, dq_h,
    row_b, row_t, row_h, list_b, list_t, list_h, counts_b, counts_t, counts_h,
    seq_len, documents, scale, scale_out,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr, SELECT: tl.constexpr, PACKED: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    slot = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    tile, start, length = place_tile(cu, documents, slot, seq_len, QUERIES, PACKED)
    if tile * QUERIES < length:
        i = tl.arange(0, ROWS)
        local = i // GROUP
        h = i % GROUP
        t = tile * QUERIES + local
        valid = (local < QUERIES) & (t < length)
        here = tl.cast(start + tile * QUERIES, tl.int64)
        q += batch * q_b + here * q_t + head * GROUP * q_h
        do += batch * do_b + here * do_t + head * GROUP * do_h
        dq += batch * dq_b + here * dq_t + head * GROUP * dq_h
        k += batch * k_b + tl.cast(start, tl.int64) * k_t + head * k_h
        v += batch * v_b + tl.cast(start, tl.int64) * v_t + head * v_h
        row_at = batch * row_b + here * row_t + head * GROUP * row_h + local * row_t + h * row_h
        place = batch * list_b + slot.to(tl.int64) * list_t + head * list_h
        count = tl.load(counts + batch * counts_b + slot.to(tl.int64) * counts_t + head * counts_h)
        q_tile = load_rows(q, local * q_t + h * q_h, 1, KEY, KEY_P, valid)
        do_tile = load_rows(do, local * do_t + h * do_h, 1, VALUE, VALUE_P, valid)
        row_lse = tl.load(lse2 + row_at, mask=valid, other=float("inf"))
        row_delta = tl.load(delta + row_at, mask=valid, other=0.0)
        acc = tl.zeros([ROWS, KEY_P], tl.float32)
        for step in range(0, count * ((SELECT + KEYS - 1) // KEYS)):
            k_tile, v_tile, s = _chosen_tile(
                q_tile, k, v, blocks + place, members + place, step, k_t, v_t, t, local, length,
                KEY, VALUE, KEY_P, VALUE_P, SELECT, KEYS, PRECISION,
            )  # fmt: skip
            p = tl.exp2(s * scale - row_lse[:, None])
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
            ds = p * (dp - row_delta[:, None])
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
        d = tl.arange(0, KEY_P)
        at = (local * dq_t + h * dq_h)[:, None] + d[None, :]
        inside = valid[:, None] & (d < KEY)[None, :]
        acc *= scale_out
        if ADD:
            acc += tl.load(dq + at, mask=inside, other=0.0)
        tl.store(dq + at, acc.to(dq.dtype.element_ty), mask=inside)
