"""Triton kernels of attention over selected blocks: the gradients of keys and values.

Each block has a list of the queries that selected it (`offsets`, `queries`: compressed sparse
rows). A program accumulates one block's gradients over at most CHUNK queries, so that blocks which
every query selected do not dominate the run time. Longer lists give float32 parts, which are
summed in a fixed order: no atomics, and bitwise reproducible gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.common import (
    add_key_gradients,
    document_tile,
    dot,
    kernel,
    load_rows,
    locate,
    store_rows,
)


@triton.jit
def _part_slot(begin, chunk, CHUNK: tl.constexpr):
    """Index of the buffer slot for one part of a long list.

    A list of more than CHUNK has at most 2 · length // CHUNK chunks, so lists never share a slot.
    """
    return begin * 2 // CHUNK + chunk


@triton.jit
def _keys_step(
    k_tile, v_tile, dk, dv, q, do, lse2, delta, n, t, h, valid, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Add the rows of queries t and heads h to dk and dv; CAUSAL masks keys n after t."""
    # Offsets of tiles and of single numbers have different layouts, and are computed separately:
    # converting one to the other takes registers and shared memory.
    at = t.to(tl.int64) * (HEADS * GROUP)
    q_tile = load_rows(q, at * KEY + h * KEY, 1, KEY, KEY_P, valid)  # [ROWS, KEY_P]
    do_tile = load_rows(do, at * VALUE + h * VALUE, 1, VALUE, VALUE_P, valid)
    row_lse = tl.load(lse2 + at + h, mask=valid, other=float("inf"))
    row_delta = tl.load(delta + at + h, mask=valid, other=0.0)
    s = dot(k_tile, tl.trans(q_tile))  # [KEYS, ROWS]
    if CAUSAL:
        s = tl.where(n[:, None] <= t[None, :], s, float("-inf"))
    return add_key_gradients(s, v_tile, q_tile, do_tile, row_lse, row_delta, dk, dv, scale)


@kernel
def selected_keys_kernel(
    q, k, v, do, lse2, delta, dk, dv, dk_part, dv_part, cu, offsets, queries,
    seq_len, documents, total_blocks, list_len, part_rows, scale, scale_out,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr, SELECT: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv of KEYS positions of a block, from one chunk of its list of queries."""
    part = tl.program_id(1)
    head = (tl.program_id(2) % HEADS).to(tl.int64)
    batch = (tl.program_id(2) // HEADS).to(tl.int64)
    offsets += (batch * HEADS + head) * (total_blocks + 1)
    queries += (batch * HEADS + head) * list_len
    block, begin, end, chunk = locate(offsets, total_blocks, tl.program_id(0), 1, CHUNK)
    low = begin + chunk * CHUNK
    high = tl.minimum(end, low + CHUNK)
    _document, j, start, length = document_tile(cu, documents, block, seq_len, 1, SELECT)
    if (j * SELECT < length) & ((low < high) | (chunk == 0)):
        i = part * KEYS + tl.arange(0, KEYS)
        n = j * SELECT + i
        inside = (i < SELECT) & (n < length)
        token = batch * seq_len + start
        row_at = (token * HEADS + head) * GROUP  # the document's first row
        q += row_at * KEY
        do += row_at * VALUE
        lse2 += row_at
        delta += row_at
        k += (token * HEADS + head) * KEY
        v += (token * HEADS + head) * VALUE
        key_at = n.to(tl.int64)
        k_tile = load_rows(k, key_at, HEADS * KEY, KEY, KEY_P, inside)  # [KEYS, KEY_P]
        v_tile = load_rows(v, key_at, HEADS * VALUE, VALUE, VALUE_P, inside)  # [KEYS, VALUE_P]
        dk_acc = tl.zeros([KEYS, KEY_P], tl.float32)
        dv_acc = tl.zeros([KEYS, VALUE_P], tl.float32)
        i_row = tl.arange(0, ROWS)
        rows = (high - low) * GROUP
        queries += low
        # Lists ascend, so queries inside the block, which need the causal mask, come first.
        own = tl.cdiv(tl.maximum(SELECT - chunk * CHUNK, 0) * GROUP, ROWS) * ROWS
        own = tl.minimum(own, rows)
        # Load the next queries one step early, so that copies of their rows can overlap with this
        # step's products.
        next_t = tl.load(queries + i_row // GROUP, mask=i_row < rows, other=0)
        for phase in tl.static_range(2):
            for row in range(own * phase, tl.where(phase == 0, own, rows), ROWS):
                valid = row + i_row < rows
                h = (row + i_row) % GROUP
                t = next_t - start  # positions in the batch's row; the document's begin at `start`
                after = row + ROWS + i_row
                next_t = tl.load(queries + after // GROUP, mask=after < rows, other=0)
                dk_acc, dv_acc = _keys_step(
                    k_tile, v_tile, dk_acc, dv_acc, q, do, lse2, delta, n, t, h, valid, scale,
                    HEADS, GROUP, KEY, VALUE, KEY_P, VALUE_P, phase == 0,
                )  # fmt: skip
        dk_acc *= scale_out
        if end - begin <= CHUNK:
            out = token * HEADS + head
            store_rows(dk + out * KEY, key_at, HEADS * KEY, dk_acc, KEY, KEY_P, inside)
            store_rows(dv + out * VALUE, key_at, HEADS * VALUE, dv_acc, VALUE, VALUE_P, inside)
        else:
            slot = batch * part_rows + _part_slot(begin, chunk, CHUNK).to(tl.int64) * SELECT
            out = slot * HEADS + head
            store_rows(dk_part + out * KEY, i, HEADS * KEY, dk_acc, KEY, KEY_P, inside)
            store_rows(dv_part + out * VALUE, i, HEADS * VALUE, dv_acc, VALUE, VALUE_P, inside)


@kernel
def add_parts_kernel(
    dk, dv, dk_part, dv_part, cu, offsets, seq_len, documents, total_blocks, part_rows,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr, SELECT: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Add the parts of a block with a long list."""
    block = tl.program_id(0)
    head = (tl.program_id(2) % HEADS).to(tl.int64)
    batch = (tl.program_id(2) // HEADS).to(tl.int64)
    offsets += (batch * HEADS + head) * (total_blocks + 1)
    begin = tl.load(offsets + block)
    end = tl.load(offsets + block + 1)
    _document, j, start, length = document_tile(cu, documents, block, seq_len, 1, SELECT)
    if end - begin > CHUNK:
        i = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
        n = j * SELECT + i
        inside = (i < SELECT) & (n < length)
        dk_sum = tl.zeros([KEYS, KEY_P], tl.float32)
        dv_sum = tl.zeros([KEYS, VALUE_P], tl.float32)
        for chunk in range(0, tl.cdiv(end - begin, CHUNK)):
            slot = batch * part_rows + _part_slot(begin, chunk, CHUNK).to(tl.int64) * SELECT
            part = slot * HEADS + head
            dk_sum += load_rows(dk_part + part * KEY, i, HEADS * KEY, KEY, KEY_P, inside)
            dv_sum += load_rows(dv_part + part * VALUE, i, HEADS * VALUE, VALUE, VALUE_P, inside)
        out = (batch * seq_len + start) * HEADS + head
        at = n.to(tl.int64)
        store_rows(dk + out * KEY, at, HEADS * KEY, dk_sum, KEY, KEY_P, inside)
        store_rows(dv + out * VALUE, at, HEADS * VALUE, dv_sum, VALUE, VALUE_P, inside)
