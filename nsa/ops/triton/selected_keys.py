"""Attention over chosen blocks: the gradients of keys and values.

Block by block, over the list of the queries that chose it (`offsets`, `queries`: compressed
sparse rows). A program adds up one block's gradient over CHUNK queries of its list, so that a
block which every query chose does not hold up the others. Blocks with a longer list leave float32
parts, which are added in order: no atomics, and the same gradients from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.common import kernel, load_rows, locate, store_rows
from nsa.ops.triton.selected import place_tile


@triton.jit
def _part_slot(begin, chunk, CHUNK: tl.constexpr):
    """Where a part of a long list is kept.

    A list of more than CHUNK has at most 2 · length // CHUNK chunks, so lists never share a slot.
    """
    return begin * 2 // CHUNK + chunk


@kernel
def selected_keys_kernel(
    q, k, v, do, lse2, delta, dk, dv, dk_part, dv_part, cu, offsets, queries,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
    dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, row_b, row_t, row_h,
    dk_part_b, dk_part_t, dk_part_h, dv_part_b, dv_part_t, dv_part_h,
    offsets_b, offsets_t, queries_b, queries_t,
    seq_len, documents, total_blocks, scale, scale_out,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr, SELECT: tl.constexpr, PACKED: tl.constexpr,
    HEADS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)  # of a block longer than KEYS
    head = (tl.program_id(2) % HEADS).to(tl.int64)
    batch = (tl.program_id(2) // HEADS).to(tl.int64)
    offsets += batch * offsets_b + head * offsets_t
    queries += batch * queries_b + head * queries_t
    block, begin, end, chunk = locate(offsets, total_blocks, tl.program_id(0), 1, CHUNK)
    whole = end - begin <= CHUNK
    low = begin + chunk * CHUNK
    high = tl.minimum(end, low + CHUNK)
    j, start, length = place_tile(cu, documents, block, seq_len, SELECT, PACKED)
    if (j * SELECT < length) & ((low < high) | (chunk == 0)):
        i = part * KEYS + tl.arange(0, KEYS)
        n = j * SELECT + i
        inside = (i < SELECT) & (n < length)
        top = tl.cast(start, tl.int64)
        q += batch * q_b + top * q_t + head * GROUP * q_h
        do += batch * do_b + top * do_t + head * GROUP * do_h
        lse2 += batch * row_b + top * row_t + head * GROUP * row_h
        delta += batch * row_b + top * row_t + head * GROUP * row_h
        key_at = n.to(tl.int64)
        k_tile = load_rows(
            k + batch * k_b + top * k_t + head * k_h, key_at, k_t, KEY, KEY_P, inside
        )
        v_tile = load_rows(
            v + batch * v_b + top * v_t + head * v_h, key_at, v_t, VALUE, VALUE_P, inside
        )
        dk_acc = tl.zeros([KEYS, KEY_P], tl.float32)
        dv_acc = tl.zeros([KEYS, VALUE_P], tl.float32)
        row = tl.arange(0, ROWS)
        rows = (high - low) * GROUP
        queries += low
        # Lists ascend, so the block's own queries, which do not see all of it, come first.
        own = tl.cdiv(tl.maximum(SELECT - chunk * CHUNK, 0) * GROUP, ROWS) * ROWS
        own = tl.minimum(own, rows)
        # Who comes next is read a step ahead: copies whose addresses are not known yet cannot be
        # under way while the products of the step before are computed.
        ahead = tl.load(queries + row // GROUP, mask=row < rows, other=0)
        for phase in tl.static_range(2):
            for first in range(own * phase, tl.where(phase == 0, own, rows), ROWS):
                valid = first + row < rows
                h = (first + row) % GROUP
                # Positions in the batch's row of tokens; the document's own start at `start`.
                t = ahead - start
                after = first + ROWS + row
                ahead = tl.load(queries + after // GROUP, mask=after < rows, other=0)
                at = t.to(tl.int64)
                q_tile = load_rows(q, at * q_t + h * q_h, 1, KEY, KEY_P, valid)
                do_tile = load_rows(do, at * do_t + h * do_h, 1, VALUE, VALUE_P, valid)
                row_at = at * row_t + h * row_h
                row_lse = tl.load(lse2 + row_at, mask=valid, other=float("inf"))
                row_delta = tl.load(delta + row_at, mask=valid, other=0.0)
                s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
                if phase == 0:
                    s = tl.where(n[:, None] <= t[None, :], s, float("-inf"))
                p = tl.exp2(s * scale - row_lse[None, :])
                dv_acc = tl.dot(p.to(do_tile.dtype), do_tile, dv_acc, input_precision=PRECISION)
                dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
                ds = p * (dp - row_delta[None, :])
                dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
        dk_acc *= scale_out
        if whole:
            dk += batch * dk_b + top * dk_t + head * dk_h
            dv += batch * dv_b + top * dv_t + head * dv_h
            store_rows(dk, key_at, dk_t, dk_acc, KEY, KEY_P, inside)
            store_rows(dv, key_at, dv_t, dv_acc, VALUE, VALUE_P, inside)
        else:
            slot = _part_slot(begin, chunk, CHUNK).to(tl.int64) * SELECT
            dk_part += batch * dk_part_b + slot * dk_part_t + head * dk_part_h
            dv_part += batch * dv_part_b + slot * dv_part_t + head * dv_part_h
            store_rows(dk_part, i, dk_part_t, dk_acc, KEY, KEY_P, inside)
            store_rows(dv_part, i, dv_part_t, dv_acc, VALUE, VALUE_P, inside)


@kernel
def add_parts_kernel(
    dk, dv, dk_part, dv_part, cu, offsets,
    dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
    dk_part_b, dk_part_t, dk_part_h, dv_part_b, dv_part_t, dv_part_h, offsets_b, offsets_t,
    seq_len, documents,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_P: tl.constexpr, VALUE_P: tl.constexpr,
    SELECT: tl.constexpr, PACKED: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Add the parts of a block with a long list."""
    block = tl.program_id(0)
    part = tl.program_id(1)
    head = (tl.program_id(2) % HEADS).to(tl.int64)
    batch = (tl.program_id(2) // HEADS).to(tl.int64)
    offsets += batch * offsets_b + head * offsets_t
    begin = tl.load(offsets + block)
    end = tl.load(offsets + block + 1)
    j, start, length = place_tile(cu, documents, block, seq_len, SELECT, PACKED)
    if end - begin > CHUNK:
        i = part * KEYS + tl.arange(0, KEYS)
        n = j * SELECT + i
        inside = (i < SELECT) & (n < length)
        dk_sum = tl.zeros([KEYS, KEY_P], tl.float32)
        dv_sum = tl.zeros([KEYS, VALUE_P], tl.float32)
        dk_part += batch * dk_part_b + head * dk_part_h
        dv_part += batch * dv_part_b + head * dv_part_h
        for chunk in range(0, tl.cdiv(end - begin, CHUNK)):
            slot = _part_slot(begin, chunk, CHUNK).to(tl.int64) * SELECT
            dk_sum += load_rows(dk_part + slot * dk_part_t, i, dk_part_t, KEY, KEY_P, inside)
            dv_sum += load_rows(dv_part + slot * dv_part_t, i, dv_part_t, VALUE, VALUE_P, inside)
        top = tl.cast(start, tl.int64)
        dk += batch * dk_b + top * dk_t + head * dk_h
        dv += batch * dv_b + top * dv_t + head * dv_h
        store_rows(dk, n.to(tl.int64), dk_t, dk_sum, KEY, KEY_P, inside)
        store_rows(dv, n.to(tl.int64), dv_t, dv_sum, VALUE, VALUE_P, inside)
