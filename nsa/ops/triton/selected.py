"""Attention over selected blocks: lists of blocks and of queries, kernels, launchers and op.

    block_index [.., T, n]  ->  union:   per tile, blocks ascending, each with its queries as bits
                            ->  members: per block and 32 queries, a word with a bit per query
                            ->  lists:   per block, queries ascending (compressed sparse rows)

A list holds a query once, even if the query names the block twice. A block's list holds no query
before the block, even if the query names the block. Block 0 of a packed document that begins at
`start` has number start // SELECT + document: documents before it may end with partial blocks.

For the output and the gradient of queries, a tile of neighbouring queries loops over the union of
their blocks; a bit per query and block says whether the query selected the block. A tile of few
queries gathers blocks. Many queries together select most blocks: their tile is dense attention that
skips the rest. For the gradients of keys and values a program sums over at most CHUNK queries of
one block's list, so that blocks which every query selected do not dominate the run time. Longer
lists give float32 parts, which another kernel sums in a fixed order and without atomics, so that
gradients have the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.inputs import AttentionInputs
from nsa.ops.triton.common import (
    LOG2E,
    add_key_gradients,
    add_query_gradient,
    backward_rows,
    constants_of,
    document_offsets,
    document_tile,
    dot,
    finish_softmax,
    gated_rows,
    group_rows,
    kernel,
    load_pair,
    load_rows,
    locate,
    max_tiles,
    softmax_step,
    start_softmax,
    store_pair,
    store_query_gradient,
    store_rows,
    zero_pair,
)
from nsa.ops.triton.configs import Config, choose_config
from nsa.ops.triton.launch import cdiv, launch, next_power_of_2
from nsa.spec import NSASpec

WORD = 32  # queries of one word of `members`
STEP = 1024  # words or queries that a step of a block's list reads


@triton.jit
def _members(
    index, t, row, valid, first, stride,
    TOP: tl.constexpr, SELECT: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Return blocks, `first` and later, and the queries of each as bits: both [BLOCK_WORDS, 32].

    It builds one word per query and 32 blocks, then transposes: the sum of distinct bits is their
    union. To compare each selected block with each block would take 32 times as many comparisons.
    """
    word = first // 32 + tl.arange(0, BLOCK_WORDS)
    words = tl.zeros([row.shape[0], BLOCK_WORDS], tl.int32)
    for n in range(TOP):
        b = tl.load(index + row * stride + n, mask=valid, other=-1)
        b = tl.where(b * SELECT <= t, b, -1)
        words |= tl.where((b >> 5)[:, None] == word[None, :], (1 << (b & 31))[:, None], 0)
    i = tl.arange(0, 32)
    member = (words[:, :, None] >> i[None, None, :]) & 1  # [QUERIES, BLOCK_WORDS, 32]
    return word[:, None] * 32 + i[None, :], tl.sum(member << row[:, None, None], 0)


@kernel
def union_kernel(
    index, blocks, members, counts, cu, seq_len, documents, list_len,
    TOP: tl.constexpr, SELECT: tl.constexpr,
    QUERIES: tl.constexpr, QUERIES_P: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Store the blocks that a tile's queries selected, ascending, and their queries as bits."""
    grid_tile = tl.program_id(0)
    heads = tl.num_programs(1)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    _document, tile, start, length = document_tile(cu, documents, grid_tile, seq_len, 1, QUERIES)
    row = tl.arange(0, QUERIES_P)
    t = tile * QUERIES + row
    valid = (row < QUERIES) & (t < length)
    index += ((batch * seq_len + start + tile * QUERIES) * heads + head) * TOP
    list_id = (batch * tl.num_programs(0) + grid_tile) * heads + head
    count = 0
    if tile * QUERIES < length:
        last = (tl.minimum(tile * QUERIES + QUERIES, length) - 1) // SELECT
        for first in range(0, last + 1, BLOCK_WORDS * 32):
            j, bits = _members(index, t, row, valid, first, heads * TOP, TOP, SELECT, BLOCK_WORDS)
            j, bits = tl.reshape(j, [BLOCK_WORDS * 32]), tl.reshape(bits, [BLOCK_WORDS * 32])
            used = (bits != 0).to(tl.int32)
            at = list_id * list_len + count + tl.cumsum(used, 0) - 1
            tl.store(blocks + at, j, mask=bits != 0)
            tl.store(members + at, bits, mask=bits != 0)
            count += tl.sum(used, 0)
    tl.store(counts + list_id, count)


@kernel
def members_kernel(
    index, members, cu, seq_len, documents, total_blocks,
    TOP: tl.constexpr, SELECT: tl.constexpr, WORD: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Write one word of WORD queries to the row of each block in members [B, Hkv, blocks, words].

    Words of blocks that begin after the queries, or of other documents, are not written or read.
    """
    grid_tile = tl.program_id(0)
    heads = tl.num_programs(1)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    document, tile, start, length = document_tile(cu, documents, grid_tile, seq_len, 1, WORD)
    row = tl.arange(0, WORD)
    t = tile * WORD + row
    valid = t < length
    index += ((batch * seq_len + start + tile * WORD) * heads + head) * TOP
    words = tl.num_programs(0)
    members += ((batch * heads + head) * total_blocks + start // SELECT + document) * words
    if tile * WORD < length:
        last = (tl.minimum(tile * WORD + WORD, length) - 1) // SELECT
        for first in range(0, last + 1, BLOCK_WORDS * 32):
            j, bits = _members(index, t, row, valid, first, heads * TOP, TOP, SELECT, BLOCK_WORDS)
            tl.store(members + j.to(tl.int64) * words + grid_tile, bits, mask=j <= last)


@triton.jit
def _popcount(x):
    """Count the bits of each int32."""
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x += x >> 8
    return (x + (x >> 16)) & 0x3F


@kernel
def totals_kernel(
    members, totals, cu, seq_len, documents, words,
    SELECT: tl.constexpr, WORD: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Count the queries of each block."""
    block = tl.program_id(0)
    list_id = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + block
    document, j, start, length = document_tile(cu, documents, block, seq_len, 1, SELECT)
    members += list_id * words + start // WORD + document
    total = tl.zeros([STEP], tl.int32)
    if j * SELECT < length:
        for first in range(j * SELECT // WORD, tl.cdiv(length, WORD), STEP):
            i = first + tl.arange(0, STEP)
            total += _popcount(tl.load(members + i, mask=i * WORD < length, other=0))
    tl.store(totals + list_id, tl.sum(total, 0))


@kernel
def lists_kernel(
    members, totals, offsets, queries, cu, seq_len, documents, words, list_len,
    SELECT: tl.constexpr, WORD: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write one block's list after the lists of earlier blocks, and its offset."""
    block = tl.program_id(0)
    total_blocks = tl.num_programs(0)
    head = tl.program_id(1).to(tl.int64)
    document, j, start, length = document_tile(cu, documents, block, seq_len, 1, SELECT)
    members += (head * total_blocks + block) * words + start // WORD + document
    totals += head * total_blocks
    offsets += head * (total_blocks + 1)
    queries += head * list_len
    before = tl.zeros([STEP], tl.int32)
    for first in range(0, block, STEP):
        i = first + tl.arange(0, STEP)
        before += tl.load(totals + i, mask=i < block, other=0)
    begin = tl.sum(before, 0)
    tl.store(offsets + block, begin)
    if j * SELECT < length:
        for first in range(j * SELECT // WORD * WORD, length, STEP):
            t = first + tl.arange(0, STEP)
            bits = tl.load(members + t // WORD, mask=t < length, other=0)
            member = (bits >> (t % WORD)) & 1
            tl.store(queries + begin + tl.cumsum(member, 0) - 1, start + t, mask=member == 1)
            begin += tl.sum(member, 0)
    if block == total_blocks - 1:
        tl.store(offsets + total_blocks, begin)


def blocks_by_tile(
    block_index: Tensor, cu_seqlens: Tensor | None, spec: NSASpec, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Unite the blocks that each tile of `queries` queries selected: (blocks, members, counts).

    Each list in blocks and members [B, tiles, Hkv, list_len] has `counts` [B, tiles, Hkv] entries.
    """
    batch, seq_len, groups, top = block_index.shape
    tiles = max_tiles(seq_len, queries, cu_seqlens)
    list_len = min(queries * top, spec.select_blocks_len(seq_len))
    blocks, members = (block_index.new_empty(batch, tiles, groups, list_len) for _ in range(2))
    counts = block_index.new_empty(batch, tiles, groups)
    queries_p, (cu, documents) = next_power_of_2(queries), document_offsets(cu_seqlens)
    launch(
        union_kernel, (tiles, groups, batch), Config(queries, 0, 4, 1),
        index=block_index.contiguous(), blocks=blocks, members=members, counts=counts, cu=cu,
        seq_len=seq_len, documents=documents, list_len=list_len,
        TOP=top, SELECT=spec.select_len, QUERIES=queries, QUERIES_P=queries_p,
        BLOCK_WORDS=_block_words(spec.select_blocks_len(seq_len), queries_p),
    )  # fmt: skip
    return blocks, members, counts


def queries_by_block(
    block_index: Tensor, cu_seqlens: Tensor | None, spec: NSASpec
) -> tuple[Tensor, Tensor]:
    """Return offsets [B, Hkv, blocks + 1] into each block's ascending queries [B, Hkv, T * n].

    The table of members has a word per block and 32 queries: T²/512 bytes per key/value head at
    blocks of 64, which is 8 KB at 2,048 tokens, 8 MB at 65,536 and 2 GB at a million.
    """
    batch, seq_len, groups, top = block_index.shape
    total = max_tiles(seq_len, spec.select_len, cu_seqlens)
    words = max_tiles(seq_len, WORD, cu_seqlens)
    members = block_index.new_empty(batch, groups, total, words)
    totals = block_index.new_empty(batch, groups, total)
    offsets = block_index.new_empty(batch, groups, total + 1)
    queries = block_index.new_empty(batch, groups, seq_len * top)
    cu, documents = document_offsets(cu_seqlens)
    launch(
        members_kernel, (words, groups, batch), Config(WORD, 0, 4, 1),
        index=block_index.contiguous(), members=members, cu=cu,
        seq_len=seq_len, documents=documents, total_blocks=total,
        TOP=top, SELECT=spec.select_len, WORD=WORD,
        BLOCK_WORDS=_block_words(spec.select_blocks_len(seq_len), WORD),
    )  # fmt: skip
    launch(
        totals_kernel, (total, groups * batch), Config(STEP, 0, 4, 1),
        members=members, totals=totals, cu=cu, seq_len=seq_len, documents=documents, words=words,
        SELECT=spec.select_len, WORD=WORD, STEP=STEP,
    )  # fmt: skip
    launch(
        lists_kernel, (total, groups * batch), Config(STEP, 0, 4, 1),
        members=members, totals=totals, offsets=offsets, queries=queries, cu=cu,
        seq_len=seq_len, documents=documents, words=words, list_len=seq_len * top,
        SELECT=spec.select_len, WORD=WORD, STEP=STEP,
    )  # fmt: skip
    return offsets, queries


def _block_words(blocks: int, queries: int) -> int:
    """Return BLOCK_WORDS: words for all blocks, but at most 4,096 elements in `member`."""
    return min(next_power_of_2(cdiv(blocks, 32)), max(1, 4096 // (32 * queries)))


@triton.jit
def _query_tile(cu, documents, seq_len, C: tl.constexpr):
    """Find a program's tile of queries. Return:

    - the tile's number in the grid, its first position, its document's length, the document's
      first token over all batches, and the tile's first row in memory;
    - for each row: its query in the tile, its offset from the first row, and whether it exists.
    """
    grid_tile = tl.num_programs(0) - 1 - tl.program_id(0)  # longest lists first
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
    """Return where a tile's list of blocks begins, the number of `past` steps, and of all steps.

    A step reads one piece of a block: at most KEYS keys. The `past` steps come first: all their
    keys precede all queries.
    """
    PIECES: tl.constexpr = (C.SELECT + C.KEYS - 1) // C.KEYS
    list_id = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + grid_tile
    list_id = list_id * tl.num_programs(1) + tl.program_id(1)
    count = tl.load(counts + list_id)
    # Exclude the blocks that contain the tile's queries: at most 32, at the end of the list.
    i = count - 1 - tl.arange(0, 32)
    block = tl.load(blocks + list_id * list_len + i, mask=i >= 0, other=-1)
    past = count - tl.sum((block >= t0 // C.SELECT).to(tl.int32), 0)
    return list_id * list_len, past * PIECES, count * PIECES


@triton.jit
def _scores(
    q, k, v, blocks, members, step, t, local, token, length, C: tl.constexpr, PAST: tl.constexpr
):  # fmt: skip
    """Load keys and values [KEYS, ..] of one step of a tile's list.

    Return them, their scores [ROWS, KEYS], and which rows selected the block. A key that a row does
    not see has score -inf. In a PAST step, rows that did not select the block have scores too: the
    caller ignores these.
    """
    PIECES: tl.constexpr = (C.SELECT + C.KEYS - 1) // C.KEYS
    PARTIAL: tl.constexpr = C.SELECT % C.KEYS != 0  # a block's last piece reaches into the next
    first = tl.load(blocks + step // PIECES) * C.SELECT + step % PIECES * C.KEYS
    bits = tl.load(members + step // PIECES)
    selects = ((bits >> local) & 1) == 1  # [ROWS]
    i = tl.arange(0, C.KEYS)
    left = C.SELECT - step % PIECES * C.KEYS
    own = i < left
    at = (token + first) * C.HEADS + tl.program_id(1)
    if PAST:
        inside = own if PARTIAL else None
    else:
        inside = i < length - first
        seen = tl.where(selects, t - first, -1)  # the last key that a row sees
        if PARTIAL:
            inside = inside & own
            seen = tl.minimum(seen, left - 1)
    k_tile, v_tile = load_pair(k, v, at, i, C.HEADS, C, inside)
    s = dot(q, tl.trans(k_tile))
    if not PAST:
        s = tl.where(i[None, :] <= seen[:, None], s, float("-inf"))
    elif PARTIAL:
        s = tl.where(own[None, :], s, float("-inf"))
    return k_tile, v_tile, s, selects


@kernel
def selected_forward_kernel(
    q, k, v, o, lse, o_cmp, o_win, gates, gated_sum, cu, blocks, members, counts,
    seq_len, documents, list_len, scale, C: tl.constexpr,
):  # fmt: skip
    """Store o and lse of one tile of queries; with `gates` also the gated sum of all branches."""
    grid_tile, t0, length, token, row, local, at, valid = _query_tile(cu, documents, seq_len, C)
    if t0 < length:
        list_at, past, steps = _block_list(blocks, counts, grid_tile, t0, list_len, C)
        q_tile = load_rows(q + row * C.KEY, at, C.KEY, C.KEY, C.KEY_P, valid)  # [ROWS, KEY_P]
        m, total, acc = start_softmax(C.ROWS, C.VALUE_P)
        for phase in tl.static_range(2):  # first the past steps, then the others
            for step in range(past * phase, past if phase == 0 else steps):
                _, v_tile, s, selects = _scores(
                    q_tile, k, v, blocks + list_at, members + list_at, step, t0 + local, local,
                    token, length, C, phase == 0,
                )  # fmt: skip
                if phase == 0:
                    m, total, acc = softmax_step(s, v_tile, m, total, acc, scale, selects)
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
    """Store dq of one tile of queries."""
    ROWS: tl.constexpr = C.ROWS
    KEY_P: tl.constexpr = C.KEY_P
    grid_tile, t0, length, token, row, local, at, valid = _query_tile(cu, documents, seq_len, C)
    if t0 < length:
        list_at, past, steps = _block_list(blocks, counts, grid_tile, t0, list_len, C)
        q_tile, do_tile = load_pair(q, do, row, at, 1, C, valid)  # [ROWS, ..]
        row_lse = tl.load(lse2 + row + at, mask=valid, other=float("inf"))
        row_delta = tl.load(delta + row + at, mask=valid, other=0.0)
        acc = tl.zeros([ROWS, KEY_P], tl.float32)
        for phase in tl.static_range(2):  # first the past steps, then the others
            for step in range(past * phase, past if phase == 0 else steps):
                k_tile, v_tile, s, selects = _scores(
                    q_tile, k, v, blocks + list_at, members + list_at, step, t0 + local, local,
                    token, length, C, phase == 0,
                )  # fmt: skip
                lse = row_lse
                if phase == 0:
                    lse = tl.where(selects, row_lse, float("inf"))  # p = 0
                acc = add_query_gradient(s, k_tile, v_tile, do_tile, lse, row_delta, acc, scale)
        store_query_gradient(dq + row * C.KEY, at, acc, scale_out, valid, C, ADD)


@triton.jit
def _part_number(begin, chunk, CHUNK: tl.constexpr):
    """Return the number, among all parts in the buffer, of one part of a long list.

    Lists have disjoint parts: one longer than CHUNK has at most 2 · length // CHUNK chunks.
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
    """Store dk and dv of one piece of a block, KEYS positions, from one chunk of the block's list.

    The grid's first axis is the heads of all sequences if HEADS_FIRST, else chunks.
    """
    AXIS: tl.constexpr = 0 if HEADS_FIRST else 1
    PIECES: tl.constexpr = (C.SELECT + C.KEYS - 1) // C.KEYS
    batch = (tl.program_id(AXIS) // C.HEADS).to(tl.int64)
    head = tl.program_id(AXIS) % C.HEADS
    piece = tl.program_id(1 - AXIS) % PIECES
    offsets += (batch * C.HEADS + head) * (total_blocks + 1)
    queries += (batch * C.HEADS + head) * list_len
    block, begin, end, chunk = locate(
        offsets, total_blocks, tl.program_id(1 - AXIS) // PIECES, 1, C.CHUNK
    )
    low = begin + chunk * C.CHUNK
    high = tl.minimum(end, low + C.CHUNK)
    _document, j, start, length = document_tile(cu, documents, block, seq_len, 1, C.SELECT)
    # Chunk 0 of an empty list writes zeros.
    if (j * C.SELECT < length) & ((low < high) | (chunk == 0)):
        i = piece * C.KEYS + tl.arange(0, C.KEYS)
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
        # Lists ascend, so queries inside the block, at most SELECT, come first. Only the steps of
        # their rows, `own` rows in all, need the causal mask.
        own_queries = tl.maximum(C.SELECT - chunk * C.CHUNK, 0)
        own = tl.minimum(tl.cdiv(own_queries * C.GROUP, C.ROWS) * C.ROWS, rows)
        # Load the next queries one step early, so that copies of their rows can overlap with this
        # step's products.
        next_t = tl.load(queries + i_row // C.GROUP, mask=i_row < rows, other=0)
        for phase in tl.static_range(2):
            for row in range(own * phase, tl.where(phase == 0, own, rows), C.ROWS):
                valid = row + i_row < rows
                h = (row + i_row) % C.GROUP
                t = next_t - start  # lists hold positions in the batch's row
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


# A program adds up at most CHUNK queries of a block's list. In small batches it adds fewer, so that
# no long program ends last, but at least MIN_CHUNK: each part is written to memory and read again.
CHUNK, MIN_CHUNK = 2048, 512
# The first blocks have the longest lists, so in sequences of at most SHORT tokens the first blocks
# of all heads start first. In longer sequences one head follows another, because the queries of all
# heads would not fit into L2.
SHORT = 4096
# A sequence of at most DENSE_BLOCKS · `select_top` blocks takes large tiles: neighbouring queries
# together select most of its blocks. An estimate, derived in docs/design/kernels.md.
DENSE_BLOCKS = 4
MAX_QUERIES = 32  # of a tile: each is a bit of an int32


def selected_forward(
    x: AttentionInputs,
    o_cmp: Tensor | None = None,
    o_win: Tensor | None = None,
    gates: Tensor | None = None,
    gated_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (o, lse). With gates and the other branches' o, also write `gated_sum`."""
    o, lse = x.empty_outputs()
    grid, config, inputs = _query_tiles("forward", x)
    launch(
        selected_forward_kernel, grid, config, **inputs, o=o, lse=lse,
        o_cmp=o_cmp, o_win=o_win, gates=gates, gated_sum=gated_sum,
    )  # fmt: skip
    return o, lse


def selected_backward(
    do: Tensor, x: AttentionInputs, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, with the same bits in every run."""
    dq = torch.empty_like(x.q, memory_format=torch.contiguous_format)
    do = do.contiguous()
    delta, lse2 = backward_rows(do, o, lse)
    return dq, *selected_gradients(do, x, lse2, delta, dq)


def selected_gradients(
    do: Tensor, x: AttentionInputs, lse2: Tensor, delta: Tensor, dq: Tensor, add: bool = False
) -> tuple[Tensor, Tensor]:
    """Return dk and dv from `backward_rows`' results; write dq, or with `add` add to it."""
    grid, config, inputs = _query_tiles("queries", x)
    launch(
        selected_queries_kernel, grid, config, **inputs,
        do=do, lse2=lse2, delta=delta, dq=dq, scale_out=x.scale, ADD=add,
    )  # fmt: skip
    return _key_gradients(do, x, lse2, delta)


def _query_tiles(name: str, x: AttentionInputs) -> tuple[tuple[int, ...], Config, dict[str, Any]]:
    """Return grid, config and shared arguments of the kernels that take tiles of queries.

    Tiles are large if queries share most blocks.
    """
    assert x.block_index is not None
    (batch, seq_len, groups, _), spec = x.k.shape, x.spec
    constants = constants_of(x.q, x.k, x.v)
    dense = spec.select_blocks_len(seq_len) <= DENSE_BLOCKS * spec.select_top
    operation = f"{'selected' if dense else 'gathered'}_{name}"
    config = choose_config(operation, constants.padded, x.q)
    queries = min(max(1, config.rows // constants.GROUP), MAX_QUERIES)
    rows, keys = max(16, next_power_of_2(queries * constants.GROUP)), _block_keys(config, spec)
    constants = constants._replace(QUERIES=queries, ROWS=rows, KEYS=keys, SELECT=spec.select_len)
    blocks, members, counts = blocks_by_tile(x.block_index, x.cu_seqlens, spec, queries)
    cu, documents = document_offsets(x.cu_seqlens)
    inputs = {
        "q": x.q.contiguous(), "k": x.k.contiguous(), "v": x.v.contiguous(), "cu": cu,
        "blocks": blocks, "members": members, "counts": counts, "seq_len": seq_len,
        "documents": documents, "list_len": blocks.shape[-1], "scale": x.scale * LOG2E,
        "C": constants,
    }  # fmt: skip
    return (max_tiles(seq_len, queries, x.cu_seqlens), groups, batch), config, inputs


def _key_gradients(
    do: Tensor, x: AttentionInputs, lse2: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    (batch, seq_len, groups, _), spec = x.k.shape, x.spec
    constants = constants_of(x.q, x.k, x.v)
    config = choose_config("selected_keys", constants.padded, x.k)
    keys = _block_keys(config, spec)
    assert x.block_index is not None
    offsets, queries = queries_by_block(x.block_index, x.cu_seqlens, spec)
    total_blocks = offsets.shape[-1] - 1
    short = seq_len <= SHORT
    chunks = 8 if short else 32  # into which the queries of a small batch are divided
    chunk = min(CHUNK, max(MIN_CHUNK, next_power_of_2(batch * seq_len) // chunks))
    has_parts = seq_len > chunk  # no list is longer than the sequence
    parts = 2 * seq_len * spec.select_top // chunk + 1  # as `_part_number` counts them
    part_rows = parts * spec.select_len if has_parts else 1
    dk, dv = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x.k, x.v))
    dk_part, dv_part = (
        y.new_empty(batch, part_rows, groups, y.shape[-1], dtype=torch.float32) for y in (x.k, x.v)
    )
    cu, documents = document_offsets(x.cu_seqlens)
    C = constants._replace(ROWS=config.rows, KEYS=keys, CHUNK=chunk, SELECT=spec.select_len)
    pieces, heads = cdiv(spec.select_len, keys), groups * batch
    programs = (seq_len * spec.select_top // chunk + total_blocks) * pieces  # see `locate`
    launch(
        selected_keys_kernel, (heads, programs) if short else (programs, heads), config,
        q=x.q.contiguous(), k=x.k.contiguous(), v=x.v.contiguous(),
        do=do, lse2=lse2, delta=delta, dk=dk, dv=dv, dk_part=dk_part, dv_part=dv_part,
        cu=cu, offsets=offsets, queries=queries,
        seq_len=seq_len, documents=documents, total_blocks=total_blocks,
        list_len=queries.shape[-1], part_rows=part_rows,
        scale=x.scale * LOG2E, scale_out=x.scale, C=C, HEADS_FIRST=short,
    )  # fmt: skip
    if has_parts:
        launch(
            add_parts_kernel, (total_blocks, pieces, heads), config,
            dk=dk, dv=dv, dk_part=dk_part, dv_part=dv_part, cu=cu, offsets=offsets,
            seq_len=seq_len, documents=documents, total_blocks=total_blocks,
            part_rows=part_rows, C=C,
        )  # fmt: skip
    return dk, dv


def _block_keys(config: Config, spec: NSASpec) -> int:
    """Return the keys of one step: no more than a block has, but at least 16, as `dot` requires."""
    return max(16, min(config.keys, next_power_of_2(spec.select_len)))


triton_selected = register(
    "nsa::triton_selected",
    AttentionInputs,
    selected_forward,
    fake=AttentionInputs.empty_outputs,
    outputs=2,
    gradient=Gradient(selected_backward, inputs=3, outputs=1),
)
