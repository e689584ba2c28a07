"""Triton kernels of attention over a band of keys: the compressed and the window branch.

A query at t sees key n iff n * STRIDE + LEN - 1 <= t and, with a window, n > t - WINDOW. The
compressed branch has the block's length and stride and no window (0); the window branch has 1 and
1. Rows are laid out as common.py says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.common import (
    add_key_gradients,
    add_query_gradient,
    binary_lse,
    document_tile,
    dot,
    finish_softmax,
    group_rows,
    kernel,
    keys_before,
    load_rows,
    softmax_step,
    span,
    store_query_gradient,
    store_rows,
    visible,
)


@triton.jit
def row_tile(cu, documents, seq_len, HEADS: tl.constexpr, GROUP: tl.constexpr,
             ROWS: tl.constexpr):  # fmt: skip
    """A program's tile of rows, those with the most keys first.

    Returns its document, the document's first position over all batches and its length; the tile's
    first row in the document and in memory; and of each row the offset in memory, the position and
    whether it exists.
    """
    head = tl.program_id(1).to(tl.int64)
    slot = tl.num_programs(0) - 1 - tl.program_id(0)
    document, tile, start, length = document_tile(cu, documents, slot, seq_len, GROUP, ROWS)
    first_row = tile * ROWS
    t0 = first_row // GROUP
    local, at = group_rows(first_row, HEADS, GROUP, ROWS, ROWS % GROUP == 0)
    valid = first_row + tl.arange(0, ROWS) < length * GROUP
    token = tl.program_id(2).to(tl.int64) * seq_len + start
    row = ((token + t0) * HEADS + head) * GROUP
    return document, token, length, first_row, row, at, t0 + local, valid


@triton.jit
def first_key_of(cu, document, token, batch, key_len, LEN: tl.constexpr, STRIDE: tl.constexpr):
    """A document's first key over all batches; `token`: its first position over all batches."""
    if LEN == 1 and STRIDE == 1:
        return token
    else:
        return batch * key_len + keys_before(cu, document, LEN, STRIDE)


@triton.jit
def _bounds(first_row, length, GROUP: tl.constexpr, LEN: tl.constexpr, STRIDE: tl.constexpr,
            WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """The keys that a tile sees: some rows from `low` on, all rows from a to b, some to `high`."""
    t_first = first_row // GROUP
    t_last = (tl.minimum(first_row + ROWS, length * GROUP) - 1) // GROUP
    high = visible(t_last, LEN, STRIDE)
    low = 0
    a = 0
    if WINDOW > 0:
        low = tl.maximum(t_first + 1 - WINDOW, 0) // KEYS * KEYS
        a = tl.cdiv(tl.maximum(t_last + 1 - WINDOW, 0), KEYS) * KEYS
    b = tl.maximum(visible(t_first, LEN, STRIDE) // KEYS * KEYS, a)
    return low, a, b, high


@triton.jit
def _scores(
    q, k, v, first, high, far_end, future,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Keys and values [KEYS, ..] from `first` on, and their scores [ROWS, KEYS], -inf where hidden.

    A query sees far_end < n < future. Only the first phase has keys beyond the far end; none of
    them are in the future, where the window is longer than a tile is wide.
    """
    FAR: tl.constexpr = PHASE == 0
    FUTURE: tl.constexpr = PHASE == 2 or (PHASE == 0 and WINDOW <= KEYS + ROWS // GROUP)
    i = tl.arange(0, KEYS)
    inside = (i < high - first) if FUTURE else None
    k_tile = load_rows(k, i, HEADS * KEY, KEY, KEY_P, inside)
    v_tile = load_rows(v, i, HEADS * VALUE, VALUE, VALUE_P, inside)
    s = dot(q, tl.trans(k_tile))
    if FAR:
        s = tl.where(i[None, :] > (far_end - first)[:, None], s, float("-inf"))
    if FUTURE:
        s = tl.where(i[None, :] < (future - first)[:, None], s, float("-inf"))
    return k_tile, v_tile, s


@triton.jit
def band_attention(
    q_tile, k, v, t, first_row, length, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """(o [ROWS, VALUE_P], lse [ROWS]) of a tile; k and v point to the document's first key."""
    far_end, future = t - WINDOW, visible(t, LEN, STRIDE)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_P], tl.float32)
    low, a, b, high = _bounds(first_row, length, GROUP, LEN, STRIDE, WINDOW, ROWS, KEYS)
    for phase in tl.static_range(3):
        if phase > 0 or WINDOW > 0:
            begin, end = span(phase, low, a, b, high)
            # Pointers advance, instead of an index into them: it would need 64 bits, and so would
            # every comparison with it.
            k_at = k + tl.cast(begin, tl.int64) * (HEADS * KEY)
            v_at = v + tl.cast(begin, tl.int64) * (HEADS * VALUE)
            for first in range(begin, end, KEYS):
                _, v_tile, s = _scores(
                    q_tile, k_at, v_at, first, high, far_end, future,
                    HEADS, GROUP, KEY, VALUE, KEY_P, VALUE_P, WINDOW, ROWS, KEYS, phase,
                )  # fmt: skip
                m, total, acc = softmax_step(s, v_tile, m, total, acc, scale)
                k_at += KEYS * HEADS * KEY
                v_at += KEYS * HEADS * VALUE
    return finish_softmax(m, total, acc, scale)


@kernel
def band_forward_kernel(
    q, k, v, o, lse, cu, seq_len, key_len, documents, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """o and lse of one tile of rows."""
    document, token, length, first_row, row, at, t, valid = row_tile(
        cu, documents, seq_len, HEADS, GROUP, ROWS
    )
    if first_row < length * GROUP:
        batch = tl.program_id(2).to(tl.int64)
        key = first_key_of(cu, document, token, batch, key_len, LEN, STRIDE) * HEADS
        k += (key + tl.program_id(1)) * KEY
        v += (key + tl.program_id(1)) * VALUE
        q_tile = load_rows(q + row * KEY, at, KEY, KEY, KEY_P, valid)  # [ROWS, KEY_P]
        out, logsum = band_attention(
            q_tile, k, v, t, first_row, length, scale,
            HEADS, GROUP, KEY, VALUE, KEY_P, VALUE_P, LEN, STRIDE, WINDOW, ROWS, KEYS,
        )  # fmt: skip
        store_rows(o + row * VALUE, at, VALUE, out, VALUE, VALUE_P, valid)
        tl.store(lse + row + at, logsum, mask=valid)


@triton.jit
def band_query_gradient(
    q_tile, k, v, do_tile, row_lse, row_delta, acc, t, first_row, length, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """acc [ROWS, KEY_P] plus dq of a tile; k and v point to the document's first key."""
    far_end, future = t - WINDOW, visible(t, LEN, STRIDE)
    low, a, b, high = _bounds(first_row, length, GROUP, LEN, STRIDE, WINDOW, ROWS, KEYS)
    for phase in tl.static_range(3):
        if phase > 0 or WINDOW > 0:
            begin, end = span(phase, low, a, b, high)
            k_at = k + tl.cast(begin, tl.int64) * (HEADS * KEY)
            v_at = v + tl.cast(begin, tl.int64) * (HEADS * VALUE)
            for first in range(begin, end, KEYS):
                k_tile, v_tile, s = _scores(
                    q_tile, k_at, v_at, first, high, far_end, future,
                    HEADS, GROUP, KEY, VALUE, KEY_P, VALUE_P, WINDOW, ROWS, KEYS, phase,
                )  # fmt: skip
                acc = add_query_gradient(s, k_tile, v_tile, do_tile, row_lse, row_delta, acc, scale)
                k_at += KEYS * HEADS * KEY
                v_at += KEYS * HEADS * VALUE
    return acc


@kernel
def band_queries_kernel(
    q, k, v, do, lse2, delta, dq, cu, seq_len, key_len, documents, scale, scale_out,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq of one tile of rows."""
    document, token, length, first_row, row, at, t, valid = row_tile(
        cu, documents, seq_len, HEADS, GROUP, ROWS
    )
    if first_row < length * GROUP:
        batch = tl.program_id(2).to(tl.int64)
        key = first_key_of(cu, document, token, batch, key_len, LEN, STRIDE) * HEADS
        k += (key + tl.program_id(1)) * KEY
        v += (key + tl.program_id(1)) * VALUE
        q_tile = load_rows(q + row * KEY, at, KEY, KEY, KEY_P, valid)  # [ROWS, KEY_P]
        do_tile = load_rows(do + row * VALUE, at, VALUE, VALUE, VALUE_P, valid)  # [ROWS, VALUE_P]
        row_lse = tl.load(lse2 + row + at, mask=valid, other=float("inf"))
        row_delta = tl.load(delta + row + at, mask=valid, other=0.0)
        acc = band_query_gradient(
            q_tile, k, v, do_tile, row_lse, row_delta, tl.zeros([ROWS, KEY_P], tl.float32),
            t, first_row, length, scale,
            HEADS, GROUP, KEY, VALUE, KEY_P, VALUE_P, LEN, STRIDE, WINDOW, ROWS, KEYS,
        )  # fmt: skip
        store_query_gradient(dq + row * KEY, at, acc, scale_out, KEY, KEY_P, valid, False)


@triton.jit
def _keys_step(
    k_tile, v_tile, dk, dv, q, do, lse2, delta, first_key, first_row, end_row, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Add one tile of rows to dk and dv."""
    # Rows of the last phase see all keys but those before their window, as rows of the first may
    # where the window is not longer than a tile is wide.
    FUTURE: tl.constexpr = PHASE == 0
    FAR: tl.constexpr = WINDOW > 0 and (
        PHASE == 2 or (PHASE == 0 and WINDOW <= KEYS + ROWS // GROUP)
    )
    valid = (first_row + tl.arange(0, ROWS) < end_row) if PHASE != 1 else None
    t0 = first_row // GROUP
    local, at = group_rows(first_row, HEADS, GROUP, ROWS, ROWS % GROUP == 0)
    row = tl.cast(t0, tl.int64) * (HEADS * GROUP)
    q_tile = load_rows(q + row * KEY, at, KEY, KEY, KEY_P, valid)  # [ROWS, KEY_P]
    do_tile = load_rows(do + row * VALUE, at, VALUE, VALUE, VALUE_P, valid)  # [ROWS, VALUE_P]
    if PHASE != 1:
        row_lse = tl.load(lse2 + row + at, mask=valid, other=float("inf"))
        row_delta = tl.load(delta + row + at, mask=valid, other=0.0)
    else:
        row_lse = tl.load(lse2 + row + at)
        row_delta = tl.load(delta + row + at)
    s = dot(k_tile, tl.trans(q_tile))  # [KEYS, ROWS]
    n = tl.arange(0, KEYS)[:, None]
    if FUTURE:
        s = tl.where(n < (visible(t0 + local, LEN, STRIDE) - first_key)[None, :], s, float("-inf"))
    if FAR:
        s = tl.where(n > (t0 + local - WINDOW - first_key)[None, :], s, float("-inf"))
    return add_key_gradients(s, v_tile, q_tile, do_tile, row_lse, row_delta, dk, dv, scale)


@triton.jit
def _single_tile_step(
    k_tile, v_tile, dk, dv, q, do, gates, lse, dgates, dq, first_row, end_row, scale, scale_out,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add one tile of rows, which see no other keys, to dk and dv, and these keys to the rows' dq.

    So Σ p·dp is complete. It is Σ do·o and the gate's gradient, without o.
    """
    valid = first_row + tl.arange(0, ROWS) < end_row
    t0 = first_row // GROUP
    local, at = group_rows(first_row, HEADS, GROUP, ROWS, ROWS % GROUP == 0)
    row = tl.cast(t0, tl.int64) * (HEADS * GROUP)
    q_tile = load_rows(q + row * KEY, at, KEY, KEY, KEY_P, valid)  # [ROWS, KEY_P]
    do_tile = load_rows(do + row * VALUE, at, VALUE, VALUE, VALUE_P, valid)  # [ROWS, VALUE_P]
    row_lse = binary_lse(tl.load(lse + row + at, mask=valid, other=float("-inf")))
    gate = tl.load(gates + (row + at) * 3, mask=valid, other=0.0).to(tl.float32)
    s = dot(k_tile, tl.trans(q_tile))  # [KEYS, ROWS]
    seen = tl.arange(0, KEYS)[:, None] < visible(t0 + local, LEN, STRIDE)[None, :]
    p = tl.exp2(tl.where(seen, s, float("-inf")) * scale - row_lse[None, :])
    dp = dot(v_tile, tl.trans(do_tile))
    total = tl.sum(p * dp, 0)
    tl.store(dgates + (row + at) * 3, total.to(dgates.dtype.element_ty), mask=valid)
    p *= gate[None, :]
    dv = dot(p.to(do_tile.dtype), do_tile, dv)
    ds = (p * (dp - total[None, :])).to(q_tile.dtype)
    dk = dot(ds, q_tile, dk)
    dq_tile = tl.trans(dot(tl.trans(k_tile), ds))  # [ROWS, KEY_P]
    store_query_gradient(dq + row * KEY, at, dq_tile, scale_out, KEY, KEY_P, valid, True)
    return dk, dv


@triton.jit
def band_key_gradients(
    q, k, v, do, lse2, delta, dk, dv, gates, dgates, dq, cu, slot, split, head, batch, batches,
    seq_len, key_len, documents, split_len, scale, scale_out,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, from one split of the queries.

    With dq, which must hold the other branches' gradients, one tile has all keys of a document:
    adds to dq and writes dgates. Then lse2 is the lse in base e without gates, and delta unused.
    """
    document, tile, start, length = document_tile(cu, documents, slot, seq_len, 1, KEYS * STRIDE)
    token = batch * seq_len + start
    count = visible(length - 1, LEN, STRIDE)
    first_key = tile * KEYS
    # A document without keys has dgates too.
    if (first_key < count) if dq is None else (tile == 0):
        last_key = tl.minimum(first_key + KEYS, count) - 1
        # The queries of this split that see a key of the tile, and those that see all of them.
        begin = split * split_len
        if dq is None:
            begin = tl.maximum(begin, first_key * STRIDE + LEN - 1)
        end = tl.minimum(length, (split + 1) * split_len)
        all_begin = last_key * STRIDE + LEN - 1
        all_end = end
        if WINDOW > 0:
            end = tl.minimum(end, last_key + WINDOW)
            all_end = tl.minimum(end, first_key + WINDOW)
        i = tl.arange(0, KEYS)
        inside = first_key + i < count
        key = first_key_of(cu, document, token, batch, key_len, LEN, STRIDE) + first_key
        row = (token * HEADS + head) * GROUP
        q += row * KEY
        do += row * VALUE
        lse2 += row
        k_tile = load_rows(k + (key * HEADS + head) * KEY, i, HEADS * KEY, KEY, KEY_P, inside)
        v_tile = load_rows(
            v + (key * HEADS + head) * VALUE, i, HEADS * VALUE, VALUE, VALUE_P, inside
        )
        dk_acc = tl.zeros([KEYS, KEY_P], tl.float32)
        dv_acc = tl.zeros([KEYS, VALUE_P], tl.float32)
        r0 = begin * GROUP
        r3 = end * GROUP
        r1 = r0 + tl.cdiv(tl.maximum(all_begin * GROUP - r0, 0), ROWS) * ROWS
        r2 = r1 + tl.maximum(all_end * GROUP - r1, 0) // ROWS * ROWS
        if dq is not None:
            gates += row * 3
            dgates += row * 3
            dq += row * KEY
            for first_row in range(r0, r3, ROWS):
                dk_acc, dv_acc = _single_tile_step(
                    k_tile, v_tile, dk_acc, dv_acc, q, do, gates, lse2, dgates, dq, first_row, r3,
                    scale, scale_out, HEADS, GROUP, KEY, VALUE, KEY_P, VALUE_P, LEN, STRIDE,
                    ROWS, KEYS,
                )  # fmt: skip
        else:
            delta += row
            for phase in tl.static_range(3):
                from_row, to_row = span(phase, r0, r1, r2, r3)
                for first_row in range(from_row, to_row, ROWS):
                    dk_acc, dv_acc = _keys_step(
                        k_tile, v_tile, dk_acc, dv_acc, q, do, lse2, delta, first_key, first_row,
                        r3, scale, HEADS, GROUP, KEY, VALUE, KEY_P, VALUE_P, LEN, STRIDE, WINDOW,
                        ROWS, KEYS, phase,
                    )  # fmt: skip
        key += tl.cast(split, tl.int64) * batches * key_len  # [splits, B, N, ..]
        out = key * HEADS + head
        store_rows(dk + out * KEY, i, HEADS * KEY, dk_acc * scale_out, KEY, KEY_P, inside)
        store_rows(dv + out * VALUE, i, HEADS * VALUE, dv_acc, VALUE, VALUE_P, inside)


@kernel
def band_keys_kernel(
    q, k, v, do, lse2, delta, dk, dv, cu,
    seq_len, key_len, documents, split_len, scale, scale_out,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, from one split of the queries."""
    head = (tl.program_id(2) % HEADS).to(tl.int64)
    batch = (tl.program_id(2) // HEADS).to(tl.int64)
    band_key_gradients(
        q, k, v, do, lse2, delta, dk, dv, None, None, None, cu, tl.program_id(0), tl.program_id(1),
        head, batch, tl.num_programs(2) // HEADS,
        seq_len, key_len, documents, split_len, scale, scale_out,
        HEADS, GROUP, KEY, VALUE, KEY_P, VALUE_P, LEN, STRIDE, WINDOW, ROWS, KEYS,
    )  # fmt: skip
