"""Triton kernels of attention over selected blocks: the gradients of keys and values.

Each block has a list of the queries that selected it (`offsets`, `queries`: compressed sparse
rows). A program sums one block's gradients over at most CHUNK queries, so that blocks which every
query selected do not dominate the run time. Longer lists give float32 parts, which a second kernel
sums in a fixed order: no atomics, and bitwise reproducible gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.common import (
    add_key_gradients,
    document_tile,
    dot,
    kernel,
    load_pair,
    load_rows,
    locate,
    store_pair,
    zero_pair,
)


@triton.jit
def _part_number(begin, chunk, CHUNK: tl.constexpr):
    """The number, among all parts in the buffer, of one part of a long list.

    A list longer than CHUNK has at most 2 · length // CHUNK chunks, so no two lists share a part.
    """
    return begin * 2 // CHUNK + chunk


@triton.jit
def _keys_step(
    k_tile, v_tile, dk, dv, q, do, lse2, delta, n, t, h, valid, scale,
    C: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Add the rows of queries t and heads h to dk and dv; CAUSAL masks keys n after t."""
    # Offsets of tiles and of single numbers are computed separately: they have different layouts,
    # and converting one to the other takes registers and shared memory.
    at = t.to(tl.int64) * (C.HEADS * C.GROUP)
    q_tile = load_rows(q, at * C.KEY + h * C.KEY, 1, C.KEY, C.KEY_P, valid)  # [ROWS, KEY_P]
    do_tile = load_rows(do, at * C.VALUE + h * C.VALUE, 1, C.VALUE, C.VALUE_P, valid)
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
    C: tl.constexpr, HEADS_FIRST: tl.constexpr,
):  # fmt: skip
    """dk and dv of KEYS positions of a block, from one chunk of its list of queries.

    HEADS_FIRST: the grid's first axis is heads of all batch rows, else chunks.
    """
    AXIS: tl.constexpr = 0 if HEADS_FIRST else 1
    PARTS: tl.constexpr = (C.SELECT + C.KEYS - 1) // C.KEYS
    batch = (tl.program_id(AXIS) // C.HEADS).to(tl.int64)
    head = tl.program_id(AXIS) % C.HEADS
    part = tl.program_id(1 - AXIS) % PARTS
    offsets += (batch * C.HEADS + head) * (total_blocks + 1)
    queries += (batch * C.HEADS + head) * list_len
    block, begin, end, chunk = locate(
        offsets, total_blocks, tl.program_id(1 - AXIS) // PARTS, 1, C.CHUNK
    )
    low = begin + chunk * C.CHUNK
    high = tl.minimum(end, low + C.CHUNK)
    _document, j, start, length = document_tile(cu, documents, block, seq_len, 1, C.SELECT)
    if (j * C.SELECT < length) & ((low < high) | (chunk == 0)):
        i = part * C.KEYS + tl.arange(0, C.KEYS)
        n = j * C.SELECT + i
        inside = (i < C.SELECT) & (n < length)
        token = batch * seq_len + start
        row_at = (token * C.HEADS + head) * C.GROUP  # the document's first row
        q += row_at * C.KEY
        do += row_at * C.VALUE
        lse2 += row_at
        delta += row_at
        first, key_at = token * C.HEADS + head, n.to(tl.int64)
        k_tile, v_tile = load_pair(k, v, first, key_at, C.HEADS, C, inside)  # [KEYS, ..]
        dk_acc, dv_acc = zero_pair(C)
        i_row = tl.arange(0, C.ROWS)
        rows = (high - low) * C.GROUP
        queries += low
        # Lists ascend, so queries inside the block, which need the causal mask, come first.
        own = tl.cdiv(tl.maximum(C.SELECT - chunk * C.CHUNK, 0) * C.GROUP, C.ROWS) * C.ROWS
        own = tl.minimum(own, rows)
        # Load the next queries one step early, so that copies of their rows can overlap with this
        # step's products.
        next_t = tl.load(queries + i_row // C.GROUP, mask=i_row < rows, other=0)
        for phase in tl.static_range(2):
            for row in range(own * phase, tl.where(phase == 0, own, rows), C.ROWS):
                valid = row + i_row < rows
                h = (row + i_row) % C.GROUP
                t = next_t - start  # positions in the batch's row; the document's begin at `start`
                after = row + C.ROWS + i_row
                next_t = tl.load(queries + after // C.GROUP, mask=after < rows, other=0)
                dk_acc, dv_acc = _keys_step(
                    k_tile, v_tile, dk_acc, dv_acc, q, do, lse2, delta, n, t, h, valid, scale,
                    C, phase == 0,
                )  # fmt: skip
        dk_acc *= scale_out
        if end - begin <= C.CHUNK:
            store_pair(dk, dv, first, key_at, dk_acc, dv_acc, C, inside)
        else:
            part_row = batch * part_rows + _part_number(begin, chunk, C.CHUNK) * C.SELECT
            store_pair(dk_part, dv_part, part_row * C.HEADS + head, i, dk_acc, dv_acc, C, inside)


@kernel
def add_parts_kernel(
    dk, dv, dk_part, dv_part, cu, offsets, seq_len, documents, total_blocks, part_rows,
    C: tl.constexpr,
):  # fmt: skip
    """Add the parts of a block with a long list."""
    block = tl.program_id(0)
    head = tl.program_id(2) % C.HEADS
    batch = (tl.program_id(2) // C.HEADS).to(tl.int64)
    offsets += (batch * C.HEADS + head) * (total_blocks + 1)
    begin = tl.load(offsets + block)
    end = tl.load(offsets + block + 1)
    _document, j, start, length = document_tile(cu, documents, block, seq_len, 1, C.SELECT)
    if end - begin > C.CHUNK:
        i = tl.program_id(1) * C.KEYS + tl.arange(0, C.KEYS)
        n = j * C.SELECT + i
        inside = (i < C.SELECT) & (n < length)
        dk_sum, dv_sum = zero_pair(C)
        for chunk in range(0, tl.cdiv(end - begin, C.CHUNK)):
            part_row = batch * part_rows + _part_number(begin, chunk, C.CHUNK) * C.SELECT
            first = part_row * C.HEADS + head
            dk_part_tile, dv_part_tile = load_pair(dk_part, dv_part, first, i, C.HEADS, C, inside)
            dk_sum += dk_part_tile
            dv_sum += dv_part_tile
        first = (batch * seq_len + start) * C.HEADS + head
        store_pair(dk, dv, first, n.to(tl.int64), dk_sum, dv_sum, C, inside)
