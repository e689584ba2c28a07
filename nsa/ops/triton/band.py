"""Attention over a band of keys, which both the compressed and the window branch are.

A query at t sees key n iff n * STRIDE + LEN - 1 <= t and, with a window, n > t - WINDOW. The
compressed branch has the block's length and stride and no window; the window branch has 1 and 1.

Rows are queries times the heads of a group, laid end to end: row r is query r // GROUP, head
r % GROUP. So every group size fills a tile, and the group shares each tile of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.common import (
    finish_softmax,
    kernel,
    keys_before,
    load_rows,
    locate,
    softmax_step,
    span,
    store_rows,
    visible,
)


@triton.jit
def _place(cu, documents, slot, seq_len, MUL: tl.constexpr, TILE: tl.constexpr,
           LEN: tl.constexpr, STRIDE: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """A slot's tile, and its document's first position, length and first key."""
    if PACKED:
        document, start, end, tile = locate(cu, documents, slot, MUL, TILE)
        first_key = start if LEN == 1 and STRIDE == 1 else keys_before(cu, document, LEN, STRIDE)
        return tile, start, end - start, first_key
    return slot, 0, seq_len, 0


@triton.jit
def _row_bounds(first_row, length, GROUP: tl.constexpr, LEN: tl.constexpr, STRIDE: tl.constexpr,
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
def _key_tile(
    q, k, v, k_t, v_t, first, high, far_end, future,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PHASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys and values from `first` on, and q's products with them: -inf where a query sees no key.

    A query sees far_end < n < future. Only the first phase has keys beyond the far end; none of
    them are in the future, where the window is longer than a tile is wide.
    """
    FAR: tl.constexpr = PHASE == 0
    FUTURE: tl.constexpr = PHASE == 2 or (PHASE == 0 and WINDOW <= KEYS + ROWS // GROUP)
    i = tl.arange(0, KEYS)
    inside = (i < high - first) if FUTURE else None
    k_tile = load_rows(k, i, k_t, KEY, KEY_P, inside)
    v_tile = load_rows(v, i, v_t, VALUE, VALUE_P, inside)
    s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
    if FAR:
        s = tl.where(i[None, :] > (far_end - first)[:, None], s, float("-inf"))
    if FUTURE:
        s = tl.where(i[None, :] < (future - first)[:, None], s, float("-inf"))
    return k_tile, v_tile, s


@kernel
def band_forward_kernel(
    q, k, v, o, lse, cu,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, lse_b, lse_t, lse_h,
    seq_len, documents, scale,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    slot = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows of keys first
    tile, start, length, first_key = _place(
        cu, documents, slot, seq_len, GROUP, ROWS, LEN, STRIDE, PACKED
    )
    first_row = tile * ROWS
    if first_row < length * GROUP:
        i = tl.arange(0, ROWS)
        valid = first_row + i < length * GROUP
        t = (first_row + i) // GROUP
        h = (first_row + i) % GROUP
        t0 = first_row // GROUP
        top = tl.cast(start + t0, tl.int64)
        q += batch * q_b + top * q_t + head * GROUP * q_h
        o += batch * o_b + top * o_t + head * GROUP * o_h
        lse += batch * lse_b + top * lse_t + head * GROUP * lse_h
        k += batch * k_b + tl.cast(first_key, tl.int64) * k_t + head * k_h
        v += batch * v_b + tl.cast(first_key, tl.int64) * v_t + head * v_h
        q_tile = load_rows(q, (t - t0) * q_t + h * q_h, 1, KEY, KEY_P, valid)
        far_end, future = t - WINDOW, visible(t, LEN, STRIDE)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, VALUE_P], tl.float32)
        low, a, b, high = _row_bounds(first_row, length, GROUP, LEN, STRIDE, WINDOW, ROWS, KEYS)
        for phase in tl.static_range(3):
            if phase > 0 or WINDOW > 0:
                begin, end = span(phase, low, a, b, high)
                # Pointers go along. An index that leads to addresses has 64 bits, and so would have
                # every comparison with it.
                k_at = k + tl.cast(begin, tl.int64) * k_t
                v_at = v + tl.cast(begin, tl.int64) * v_t
                for first in range(begin, end, KEYS):
                    _, v_tile, s = _key_tile(
                        q_tile, k_at, v_at, k_t, v_t, first, high, far_end, future,
                        KEY, VALUE, KEY_P, VALUE_P, WINDOW, GROUP, ROWS, KEYS, phase, PRECISION,
                    )  # fmt: skip
                    m, total, acc = softmax_step(s, v_tile, m, total, acc, scale, PRECISION)
                    k_at += KEYS * k_t
                    v_at += KEYS * v_t
        out, logsum = finish_softmax(m, total, acc, scale)
        store_rows(o, (t - t0) * o_t + h * o_h, 1, out, VALUE, VALUE_P, valid)
        tl.store(lse + (t - t0) * lse_t + h * lse_h, logsum, mask=valid)


@kernel
def band_queries_kernel(
    q, k, v, do, lse2, delta, dq, cu,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, dq_b, dq_t, dq_h,
    row_b, row_t, row_h, seq_len, documents, scale, scale_out,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    slot = tl.num_programs(0) - 1 - tl.program_id(0)
    tile, start, length, first_key = _place(
        cu, documents, slot, seq_len, GROUP, ROWS, LEN, STRIDE, PACKED
    )
    first_row = tile * ROWS
    if first_row < length * GROUP:
        i = tl.arange(0, ROWS)
        valid = first_row + i < length * GROUP
        t = (first_row + i) // GROUP
        h = (first_row + i) % GROUP
        t0 = first_row // GROUP
        top = tl.cast(start + t0, tl.int64)
        q += batch * q_b + top * q_t + head * GROUP * q_h
        do += batch * do_b + top * do_t + head * GROUP * do_h
        dq += batch * dq_b + top * dq_t + head * GROUP * dq_h
        row_at = batch * row_b + top * row_t + head * GROUP * row_h + (t - t0) * row_t + h * row_h
        k += batch * k_b + tl.cast(first_key, tl.int64) * k_t + head * k_h
        v += batch * v_b + tl.cast(first_key, tl.int64) * v_t + head * v_h
        q_tile = load_rows(q, (t - t0) * q_t + h * q_h, 1, KEY, KEY_P, valid)
        do_tile = load_rows(do, (t - t0) * do_t + h * do_h, 1, VALUE, VALUE_P, valid)
        row_lse = tl.load(lse2 + row_at, mask=valid, other=float("inf"))
        row_delta = tl.load(delta + row_at, mask=valid, other=0.0)
        far_end, future = t - WINDOW, visible(t, LEN, STRIDE)
        acc = tl.zeros([ROWS, KEY_P], tl.float32)
        low, a, b, high = _row_bounds(first_row, length, GROUP, LEN, STRIDE, WINDOW, ROWS, KEYS)
        for phase in tl.static_range(3):
            if phase > 0 or WINDOW > 0:
                begin, end = span(phase, low, a, b, high)
                k_at = k + tl.cast(begin, tl.int64) * k_t
                v_at = v + tl.cast(begin, tl.int64) * v_t
                for first in range(begin, end, KEYS):
                    k_tile, v_tile, s = _key_tile(
                        q_tile, k_at, v_at, k_t, v_t, first, high, far_end, future,
                        KEY, VALUE, KEY_P, VALUE_P, WINDOW, GROUP, ROWS, KEYS, phase, PRECISION,
                    )  # fmt: skip
                    p = tl.exp2(s * scale - row_lse[:, None])
                    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
                    ds = p * (dp - row_delta[:, None])
                    acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
                    k_at += KEYS * k_t
                    v_at += KEYS * v_t
        d = tl.arange(0, KEY_P)
        at = ((t - t0) * dq_t + h * dq_h)[:, None] + d[None, :]
        inside = valid[:, None] & (d < KEY)[None, :]
        acc *= scale_out
        if ADD:
            acc += tl.load(dq + at, mask=inside, other=0.0)
        tl.store(dq + at, acc.to(dq.dtype.element_ty), mask=inside)


@triton.jit
def _keys_step(
    k_tile, v_tile, dk, dv, q, do, lse2, delta, q_t, q_h, do_t, do_h, row_t, row_h,
    first_key, first_row, end_row, scale,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PHASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Rows of the last phase see all keys but those that their window has left behind; those of the
    # first may do so too, where the window is not longer than a tile is wide.
    FUTURE: tl.constexpr = PHASE == 0
    FAR: tl.constexpr = WINDOW > 0 and (
        PHASE == 2 or (PHASE == 0 and WINDOW <= KEYS + ROWS // GROUP)
    )
    i = tl.arange(0, ROWS)
    valid = (first_row + i < end_row) if PHASE != 1 else None
    t0 = first_row // GROUP
    if ROWS % GROUP == 0:  # then a tile begins with a query's first head
        local, h = i // GROUP, i % GROUP
    else:
        local, h = (first_row + i) // GROUP - t0, (first_row + i) % GROUP
    top = tl.cast(t0, tl.int64)
    q_tile = load_rows(q + top * q_t, local * q_t + h * q_h, 1, KEY, KEY_P, valid)
    do_tile = load_rows(do + top * do_t, local * do_t + h * do_h, 1, VALUE, VALUE_P, valid)
    row_at = top * row_t + local * row_t + h * row_h
    if PHASE != 1:
        row_lse = tl.load(lse2 + row_at, mask=valid, other=float("inf"))
        row_delta = tl.load(delta + row_at, mask=valid, other=0.0)
    else:
        row_lse = tl.load(lse2 + row_at)
        row_delta = tl.load(delta + row_at)
    s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
    n = tl.arange(0, KEYS)[:, None]
    if FUTURE:
        s = tl.where(n < (visible(t0 + local, LEN, STRIDE) - first_key)[None, :], s, float("-inf"))
    if FAR:
        s = tl.where(n > (t0 + local - WINDOW - first_key)[None, :], s, float("-inf"))
    p = tl.exp2(s * scale - row_lse[None, :])
    dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
    dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
    ds = p * (dp - row_delta[None, :])
    dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@kernel
def band_keys_kernel(
    q, k, v, do, lse2, delta, dk, dv, cu,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
    dk_s, dk_b, dk_t, dk_h, dv_s, dv_b, dv_t, dv_h, row_b, row_t, row_h,
    seq_len, documents, split_len, scale, scale_out,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr, HEADS: tl.constexpr,
    LEN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    head = (tl.program_id(2) % HEADS).to(tl.int64)
    batch = (tl.program_id(2) // HEADS).to(tl.int64)
    tile, start, length, doc_key = _place(
        cu, documents, tl.program_id(0), seq_len, 1, KEYS * STRIDE, LEN, STRIDE, PACKED
    )
    count = visible(length - 1, LEN, STRIDE)
    first_key = tile * KEYS
    if first_key < count:
        last_key = tl.minimum(first_key + KEYS, count) - 1
        # The queries of this split that see a key of the tile, and those that see all of them.
        begin = tl.maximum(first_key * STRIDE + LEN - 1, split * split_len)
        end = tl.minimum(length, (split + 1) * split_len)
        all_begin = last_key * STRIDE + LEN - 1
        all_end = end
        if WINDOW > 0:
            end = tl.minimum(end, last_key + WINDOW)
            all_end = tl.minimum(end, first_key + WINDOW)
        i = tl.arange(0, KEYS)
        inside = first_key + i < count
        here = tl.cast(doc_key + first_key, tl.int64)
        k += batch * k_b + here * k_t + head * k_h
        v += batch * v_b + here * v_t + head * v_h
        dk += split.to(tl.int64) * dk_s + batch * dk_b + here * dk_t + head * dk_h
        dv += split.to(tl.int64) * dv_s + batch * dv_b + here * dv_t + head * dv_h
        top = tl.cast(start, tl.int64)
        q += batch * q_b + top * q_t + head * GROUP * q_h
        do += batch * do_b + top * do_t + head * GROUP * do_h
        lse2 += batch * row_b + top * row_t + head * GROUP * row_h
        delta += batch * row_b + top * row_t + head * GROUP * row_h
        k_tile = load_rows(k, i, k_t, KEY, KEY_P, inside)
        v_tile = load_rows(v, i, v_t, VALUE, VALUE_P, inside)
        dk_acc = tl.zeros([KEYS, KEY_P], tl.float32)
        dv_acc = tl.zeros([KEYS, VALUE_P], tl.float32)
        r0 = begin * GROUP
        r3 = end * GROUP
        r1 = r0 + tl.cdiv(tl.maximum(all_begin * GROUP - r0, 0), ROWS) * ROWS
        r2 = r1 + tl.maximum(all_end * GROUP - r1, 0) // ROWS * ROWS
        for phase in tl.static_range(3):
            from_row, to_row = span(phase, r0, r1, r2, r3)
            for row in range(from_row, to_row, ROWS):
                dk_acc, dv_acc = _keys_step(
                    k_tile, v_tile, dk_acc, dv_acc, q, do, lse2, delta, q_t, q_h, do_t, do_h,
                    row_t, row_h, first_key, row, r3, scale, GROUP, KEY, VALUE, KEY_P, VALUE_P,
                    LEN, STRIDE, WINDOW, ROWS, KEYS, phase, PRECISION,
                )  # fmt: skip
        store_rows(dk, i, dk_t, dk_acc * scale_out, KEY, KEY_P, inside)
        store_rows(dv, i, dv_t, dv_acc, VALUE, VALUE_P, inside)
