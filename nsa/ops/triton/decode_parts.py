"""Triton kernels of decoding: attention of one new token of each sequence over its cache.

A token has G rows a key/value head and thousands of keys, so its keys are cut into parts, a program
each, whatever branch they belong to: PART compressed keys, one selected block, PART positions of
the window. Each part stores its own softmax, and a last kernel joins them under the gates.

    compressed parts -> scores -> importance -> rank -> selected blocks and window -> mix

Lengths are read on the device and grids follow the buffers' capacity, so nothing waits for the host
and a step can be captured as a CUDA graph. How keys are cut depends on neither batch nor capacity:
a sequence's token is the same to the bit whatever is decoded beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.common import (
    dot,
    finish_softmax,
    load_rows,
    probabilities,
    softmax_step,
    store_rows,
    visible,
)
from nsa.ops.triton.select import first_overlap, overlap


@triton.jit
def _attend(
    q, k, v, o, lse, scores, place, row_o, row_scores, begin, end, ring, scale, rows,
    HEADS: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_P: tl.constexpr, VALUE_P: tl.constexpr, KEYS: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Softmax of `rows` query heads over the keys from `begin` to `end`, stored at `place`.

    Position p is in row p, or p % `ring` where RING. Scores are stored where there is a buffer for
    them; without values only lse is.
    """
    h = tl.arange(0, ROWS)
    valid = h < rows
    q_tile = load_rows(q, h, KEY, KEY, KEY_P, valid)  # [ROWS, KEY_P]
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_P], tl.float32)
    for first in range(begin, end, KEYS):
        n = first + tl.arange(0, KEYS)
        inside = n < end
        row = (n % ring if RING else n).to(tl.int64)
        k_tile = load_rows(k, row, HEADS * KEY, KEY, KEY_P, inside)  # [KEYS, KEY_P]
        s = dot(q_tile, tl.trans(k_tile))
        s = tl.where(inside[None, :], s, float("-inf"))  # [ROWS, KEYS]
        if scores is not None:
            at = (h * row_scores)[:, None] + n[None, :]
            tl.store(scores + at, s * scale, mask=valid[:, None] & inside[None, :])
        if v is not None:
            v_tile = load_rows(v, row, HEADS * VALUE, VALUE, VALUE_P, inside)
            m, total, acc = softmax_step(s, v_tile, m, total, acc, scale)
        else:
            m, total = _sum_step(s, m, total, scale)
    out, logsum = finish_softmax(m, total, acc, scale)
    at = place + h * row_o
    if v is not None:
        store_rows(o, at, VALUE, out, VALUE, VALUE_P, valid)
    tl.store(lse + at, logsum, mask=valid)


@triton.jit
def _sum_step(s, m, total, scale):
    """`softmax_step` without values: a running maximum and sum."""
    m_new = tl.maximum(m, tl.max(s, 1))
    top = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale - (top * scale)[:, None])
    return m_new, total * tl.exp2((m - top) * scale) + tl.sum(p, 1)


@triton.jit
def _program_rows(batch, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """A program's key/value head, its first row among all query heads, and its number of rows.

    Several programs split a group of more heads than a tile has rows.
    """
    SPLITS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    head = tl.program_id(1).to(tl.int64) // SPLITS
    first = tl.program_id(1) % SPLITS * ROWS
    return head, (batch * HEADS + head) * GROUP + first, tl.minimum(ROWS, GROUP - first)


@triton.jit
def decode_compressed_kernel(
    q, k_cmp, v_cmp, lengths, o, lse, scores, k_cmp_b, v_cmp_b, parts, row_scores, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_P: tl.constexpr, VALUE_P: tl.constexpr, LEN: tl.constexpr,
    STRIDE: tl.constexpr, PART: tl.constexpr, FIRST_PART: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A part of the compressed keys; scores for selection, o only where the branch is mixed in."""
    part = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    head, row, rows = _program_rows(batch, HEADS, GROUP, ROWS)
    seen = visible(tl.load(lengths + batch).to(tl.int32) - 1, LEN, STRIDE)
    if part * PART < seen:
        if scores is not None:
            scores += row * row_scores
        if v_cmp is not None:
            v_cmp += batch * v_cmp_b + head * VALUE
        _attend(
            q + row * KEY, k_cmp + batch * k_cmp_b + head * KEY, v_cmp, o, lse, scores,
            row * parts + FIRST_PART + part, parts, row_scores,
            part * PART, tl.minimum(seen, (part + 1) * PART), 1, scale,
            rows, HEADS, ROWS, KEY, VALUE, KEY_P, VALUE_P, KEYS, False,
        )  # fmt: skip


@triton.jit
def _logsum(lse, first, stop, row, valid, ROWS: tl.constexpr, TILE: tl.constexpr):
    """The lse of a softmax whose parts from `first` to `stop` are in rows of `lse`: [ROWS]."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for begin in range(first, stop, TILE):
        i = begin + tl.arange(0, TILE)
        inside = valid[:, None] & (i < stop)[None, :]
        s = tl.load(lse + row[:, None] + i[None, :], mask=inside, other=float("-inf"))
        m, total = _sum_step(s, m, total, 1.4426950408889634)
    return finish_softmax(m, total, tl.zeros([ROWS, 1], tl.float32), 1.4426950408889634)[1]


@triton.jit
def decode_importance_kernel(
    scores, lse, lengths, importance, parts, row_scores, blocks,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, LEN: tl.constexpr, STRIDE: tl.constexpr,
    SELECT: tl.constexpr, COUNT: tl.constexpr, TOP: tl.constexpr, INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    PART: tl.constexpr, FIRST_PART: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The importance of blocks, as in select.py; +inf for those that are always selected.

    Nothing is stored where there are no more than TOP blocks.
    """
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + batch).to(tl.int32)
    candidates = tl.cdiv(length, SELECT)
    if (candidates > TOP) & (tl.program_id(0) * BLOCKS < candidates):
        h = tl.arange(0, GROUP_P)
        valid = h < GROUP
        group = batch * tl.num_programs(1) + head
        row = group * GROUP + h
        seen = visible(length - 1, LEN, STRIDE)
        stop = FIRST_PART + tl.cdiv(seen, PART)
        row_lse = _logsum(lse, FIRST_PART, stop, row * parts, valid, GROUP_P, TILE)
        j = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
        low = first_overlap(j, LEN, STRIDE, SELECT)
        total = tl.zeros([BLOCKS], tl.float32)
        for c in range(COUNT):
            i = low + c
            inside = valid[:, None] & ((i >= 0) & (i < seen))[None, :]
            at = (row * row_scores)[:, None] + i[None, :]
            s = tl.load(scores + at, mask=inside, other=float("-inf"))  # [GROUP_P, BLOCKS]
            weight = overlap(i, j, LEN, STRIDE, SELECT)
            total += tl.sum(probabilities(s, row_lse[:, None]), 0) * weight
        # NaN would rank nowhere and leave places unwritten: the output is NaN without that.
        total = tl.where(total >= 0.0, total, 0.0)
        total = tl.where((j < INIT) | (j >= candidates - LOCAL), float("inf"), total)
        tl.store(importance + group * blocks + j, total, mask=j < candidates)


@triton.jit
def decode_rank_kernel(
    importance, lengths, index, blocks,
    SELECT: tl.constexpr, TOP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Each block's rank among all; the first TOP are selected, of equals the lower.

    A block counts those before it: no sorting, no rounds, and programs are independent.
    """
    group = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    candidates = tl.cdiv(tl.load(lengths + tl.program_id(2)).to(tl.int32), SELECT)
    if (candidates > TOP) & (tl.program_id(0) * BLOCKS < candidates):
        importance += group * blocks
        j = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
        mine = tl.load(importance + j, mask=j < candidates, other=-1.0)[:, None]
        rank = tl.zeros([BLOCKS], tl.int32)
        for first in range(0, candidates, BLOCKS):
            i = first + tl.arange(0, BLOCKS)
            other = tl.load(importance + i, mask=i < candidates, other=-1.0)[None, :]
            before = (other > mine) | ((other == mine) & (i[None, :] < j[:, None]))
            rank += tl.sum(before.to(tl.int32), 1)
        tl.store(index + group * TOP + rank, j, mask=(j < candidates) & (rank < TOP))


@triton.jit
def decode_parts_kernel(
    q, k_sel, v_sel, k_win, v_win, index, lengths, o, lse,
    k_sel_b, v_sel_b, k_win_b, v_win_b, parts, ring, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_P: tl.constexpr, VALUE_P: tl.constexpr, SELECT: tl.constexpr,
    TOP: tl.constexpr, WINDOW: tl.constexpr, PART: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A selected block, or a part of the window; TOP or WINDOW is 0 without that branch."""
    part = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    head, row, rows = _program_rows(batch, HEADS, GROUP, ROWS)
    length = tl.load(lengths + batch).to(tl.int32)
    q += row * KEY
    place = row * parts + part
    if TOP > 0:
        candidates = tl.cdiv(length, SELECT)
        if part < tl.minimum(candidates, TOP):
            j = part
            if candidates > TOP:
                j = tl.load(index + row // GROUP * TOP + part)
            _attend(
                q, k_sel + batch * k_sel_b + head * KEY, v_sel + batch * v_sel_b + head * VALUE,
                o, lse, None, place, parts, 0,
                j * SELECT, tl.minimum(length, (j + 1) * SELECT), 1, scale,
                rows, HEADS, ROWS, KEY, VALUE, KEY_P, VALUE_P, KEYS, False,
            )  # fmt: skip
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0) + (part - TOP) * PART
        if (part >= TOP) & (begin < length):
            _attend(
                q, k_win + batch * k_win_b + head * KEY, v_win + batch * v_win_b + head * VALUE,
                o, lse, None, place, parts, 0,
                begin, tl.minimum(length, begin + PART), ring, scale,
                rows, HEADS, ROWS, KEY, VALUE, KEY_P, VALUE_P, KEYS, True,
            )  # fmt: skip


@triton.jit
def _join(o, lse, row, count, gate, VALUE: tl.constexpr, VALUE_P: tl.constexpr, TILE: tl.constexpr):
    """One branch's output from its first `count` parts, times its gate: [1, VALUE_P]."""
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, VALUE_P], tl.float32)
    for first in range(0, count, TILE):
        i = first + tl.arange(0, TILE)
        inside = i < count
        s = tl.load(lse + row + i, mask=inside, other=float("-inf")) * 1.4426950408889634
        part = load_rows(o, row + i, VALUE, VALUE, VALUE_P, inside)
        m_new = tl.maximum(m, tl.max(s, 0))
        p = tl.exp2(s - m_new)
        old = tl.exp2(m - m_new)
        total = total * old + tl.sum(p, 0)
        acc = acc * old[:, None] + tl.sum(p[:, None] * part, 0)[None, :]
        m = m_new
    return finish_softmax(m, total, acc, 1.0)[0] * tl.load(gate).to(tl.float32)


@triton.jit
def decode_mix_kernel(
    o, lse, gates, lengths, out, parts,
    VALUE: tl.constexpr, VALUE_P: tl.constexpr, LEN: tl.constexpr, STRIDE: tl.constexpr,
    SELECT: tl.constexpr, TOP: tl.constexpr, WINDOW: tl.constexpr, PART: tl.constexpr,
    FIRST_PART: tl.constexpr, CMP: tl.constexpr, SEL: tl.constexpr, WIN: tl.constexpr,
    GATES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Σ gate · output for one query head; CMP, SEL and WIN are the branches' gates, or -1."""
    row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    length = tl.load(lengths + tl.program_id(1)).to(tl.int32)
    total = tl.zeros([1, VALUE_P], tl.float32)
    gates += row * GATES
    at = row * parts
    if CMP >= 0:
        count = tl.cdiv(visible(length - 1, LEN, STRIDE), PART)
        total += _join(o, lse, at + FIRST_PART, count, gates + CMP, VALUE, VALUE_P, TILE)
    if SEL >= 0:
        count = tl.minimum(tl.cdiv(length, SELECT), TOP)
        total += _join(o, lse, at, count, gates + SEL, VALUE, VALUE_P, TILE)
    if WIN >= 0:
        count = tl.cdiv(tl.minimum(length, WINDOW), PART)
        total += _join(o, lse, at + TOP, count, gates + WIN, VALUE, VALUE_P, TILE)
    one = tl.arange(0, 1)
    store_rows(out + row * VALUE, one, VALUE, total, VALUE, VALUE_P, one == 0)
