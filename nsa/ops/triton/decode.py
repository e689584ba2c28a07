"""Decoding: one new token of each sequence attends over its cache; kernels, launcher and op.

One token has few query heads per key/value head but thousands of keys. So the keys of every branch
are split into parts, with a program for each: PART compressed keys, one selected block, or PART
positions of the window. Each part stores o and lse; a last kernel joins parts and applies gates.

    compressed parts -> scores -> importance -> rank -> selected blocks and window -> mix

Lengths are read on the device and grids follow the buffers' capacity, so the host does not wait for
the device and a step can be captured as a CUDA graph. How keys are split depends on neither batch
nor capacity, so a token's result has the same bits in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.constants import BRANCHES
from nsa.ops.custom_op import register
from nsa.ops.inputs import DecodeInputs
from nsa.ops.triton.common import (
    LOG2E,
    binary_lse,
    constants_of,
    dot,
    finish_softmax,
    load_rows,
    softmax_step,
    start_softmax,
    store_rows,
    visible,
)
from nsa.ops.triton.configs import Config, choose_config
from nsa.ops.triton.launch import cdiv, launch, padded_size
from nsa.ops.triton.select import LEAST, TAKEN, first_overlap, overlap


@triton.jit
def _attend(
    q, k, v, o, lse, part_row, parts, scale, rows, C: tl.constexpr, begin, end,
    ring=None, scores=None, score_stride=None,
):  # fmt: skip
    """Attend with `rows` query heads to the keys from `begin` to `end`; store o and lse.

    Head h stores them in row `part_row + h * parts`, and its scores, unless `scores` is None, from
    h * `score_stride` on. o is not stored if `v` is None. With `ring`, key p is in row p % `ring`.
    """
    h = tl.arange(0, C.ROWS)
    valid = h < rows
    q_tile = load_rows(q, h, C.KEY, C.KEY, C.KEY_P, valid)  # [ROWS, KEY_P]
    m, total, acc = start_softmax(C.ROWS, C.VALUE_P)
    for first in range(begin, end, C.KEYS):
        n = first + tl.arange(0, C.KEYS)
        inside = n < end
        row = (n if ring is None else n % ring).to(tl.int64)
        k_tile = load_rows(k, row, C.HEADS * C.KEY, C.KEY, C.KEY_P, inside)  # [KEYS, KEY_P]
        s = dot(q_tile, tl.trans(k_tile))
        s = tl.where(inside[None, :], s, float("-inf"))  # [ROWS, KEYS]
        if scores is not None:
            at = (h * score_stride)[:, None] + n[None, :]
            tl.store(scores + at, s * scale, mask=valid[:, None] & inside[None, :])
        if v is not None:
            v_tile = load_rows(v, row, C.HEADS * C.VALUE, C.VALUE, C.VALUE_P, inside)
            m, total, acc = softmax_step(s, v_tile, m, total, acc, scale)
        else:
            m, total = _sum_step(s, m, total, scale)
    o_tile, logsum = finish_softmax(m, total, acc)
    at = part_row + h * parts
    if v is not None:
        store_rows(o, at, C.VALUE, o_tile, C.VALUE, C.VALUE_P, valid)
    tl.store(lse + at, logsum, mask=valid)


@triton.jit
def _sum_step(s, m, total, scale):
    """`softmax_step` without values: a running maximum and sum."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - m_new[:, None])
    return m_new, total * tl.exp2(m - m_new) + tl.sum(p, 1)


@triton.jit
def _program_rows(batch, C: tl.constexpr):
    """Return a program's key/value head, its first row among all query heads, and its row count.

    If a group has more query heads than a tile has rows, several programs split the group.
    """
    SPLITS: tl.constexpr = (C.GROUP + C.ROWS - 1) // C.ROWS
    head = tl.program_id(1).to(tl.int64) // SPLITS
    first = tl.program_id(1) % SPLITS * C.ROWS
    row = (batch * C.HEADS + head) * C.GROUP + first
    return head, row, tl.minimum(C.ROWS, C.GROUP - first)


@triton.jit
def decode_compressed_kernel(
    q, k_cmp, v_cmp, lengths, o, lse, scores, k_cmp_b, v_cmp_b, parts, score_stride, scale,
    C: tl.constexpr, PART: tl.constexpr, FIRST_PART: tl.constexpr,
):  # fmt: skip
    """Attend to a part of the compressed keys; store o, lse and scores."""
    part = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    head, row, rows = _program_rows(batch, C)
    seen = visible(tl.load(lengths + batch).to(tl.int32) - 1, C)
    if part * PART < seen:
        if scores is not None:
            scores += row * score_stride
        if v_cmp is not None:
            v_cmp += batch * v_cmp_b + head * C.VALUE
        _attend(
            q + row * C.KEY, k_cmp + batch * k_cmp_b + head * C.KEY, v_cmp,
            o, lse, row * parts + FIRST_PART + part, parts, scale, rows, C,
            begin=part * PART, end=tl.minimum(seen, (part + 1) * PART),
            scores=scores, score_stride=score_stride,
        )  # fmt: skip


@triton.jit
def _logsum(lse, first, stop, row, valid, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Return the lse of each row [ROWS] from its parts `first` to `stop`."""
    m, total, acc = start_softmax(ROWS, 1)
    for begin in range(first, stop, TILE):
        i = begin + tl.arange(0, TILE)
        inside = valid[:, None] & (i < stop)[None, :]
        s = tl.load(lse + row[:, None] + i[None, :], mask=inside, other=float("-inf"))
        m, total = _sum_step(s, m, total, 1.4426950408889634)  # lse · log2(e)
    return finish_softmax(m, total, acc)[1]


@triton.jit
def decode_importance_kernel(
    scores, lse, lengths, importance, parts, score_stride, blocks,
    C: tl.constexpr, GROUP_P: tl.constexpr, PART: tl.constexpr, FIRST_PART: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Store the importance of blocks, as in select.py; +inf for those that are always selected.

    Nothing is stored if there are at most TOP blocks, because all of them are selected.
    """
    BLOCKS: tl.constexpr = C.BLOCKS
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + batch).to(tl.int32)
    candidates = tl.cdiv(length, C.SELECT)
    if (candidates > C.TOP) & (tl.program_id(0) * C.BLOCKS < candidates):
        h = tl.arange(0, GROUP_P)
        valid = h < C.GROUP
        group = batch * tl.num_programs(1) + head
        row = group * C.GROUP + h
        seen = visible(length - 1, C)
        j = tl.program_id(0) * C.BLOCKS + tl.arange(0, C.BLOCKS)
        low = first_overlap(j, C)
        if lse is None:  # the scores of one head, as in `_log_importance` of select.py
            m = tl.full([BLOCKS], LEAST, tl.float32)
            total = tl.zeros([BLOCKS], tl.float32)
            for c in range(C.COUNT):
                i = low + c
                weight = overlap(i, j, C)
                sees = (i >= 0) & (i < seen) & (weight > 0.0)
                s = tl.load(scores + group * score_stride + i, mask=sees, other=LEAST)
                m_new = tl.maximum(m, s)
                p = tl.where(sees, tl.exp2(s - m_new), 0.0)
                total = total * tl.exp2(m - m_new) + p * weight
                m = m_new
            # NaN becomes LEAST: NaNs would share a rank, and part of `index` would not be written.
            total = tl.where(total > 0.0, m + tl.log2(tl.where(total > 0.0, total, 1.0)), LEAST)
        else:
            stop = FIRST_PART + tl.cdiv(seen, PART)
            row_lse = _logsum(lse, FIRST_PART, stop, row * parts, valid, GROUP_P, TILE)
            total = tl.zeros([BLOCKS], tl.float32)
            for c in range(C.COUNT):
                i = low + c
                inside = valid[:, None] & ((i >= 0) & (i < seen))[None, :]
                at = (row * score_stride)[:, None] + i[None, :]
                s = tl.load(scores + at, mask=inside, other=float("-inf"))  # [GROUP_P, C.BLOCKS]
                weight = overlap(i, j, C)
                total += tl.sum(tl.exp2(s - binary_lse(row_lse)[:, None]), 0) * weight
            # NaN becomes 0, for the same reason as above. The token's output is NaN anyway.
            total = tl.where(total >= 0.0, total, 0.0)
        total = tl.where((j < C.INIT) | (j >= candidates - C.LOCAL), float("inf"), total)
        tl.store(importance + group * blocks + j, total, mask=j < candidates)


@triton.jit
def decode_rank_kernel(importance, lengths, index, blocks, C: tl.constexpr):
    """Select the TOP blocks of highest importance, ties to the lower index.

    A block's rank is the number of blocks before it: no sorting, and programs are independent.
    """
    BLOCKS: tl.constexpr = C.BLOCKS
    group = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    candidates = tl.cdiv(tl.load(lengths + tl.program_id(2)).to(tl.int32), C.SELECT)
    if (candidates > C.TOP) & (tl.program_id(0) * C.BLOCKS < candidates):
        importance += group * blocks
        j = tl.program_id(0) * C.BLOCKS + tl.arange(0, C.BLOCKS)
        own = tl.load(importance + j, mask=j < candidates, other=TAKEN)[:, None]
        rank = tl.zeros([BLOCKS], tl.int32)
        for first in range(0, candidates, C.BLOCKS):
            i = first + tl.arange(0, C.BLOCKS)
            other = tl.load(importance + i, mask=i < candidates, other=TAKEN)[None, :]
            before = (other > own) | ((other == own) & (i[None, :] < j[:, None]))
            rank += tl.sum(before.to(tl.int32), 1)
        tl.store(index + group * C.TOP + rank, j, mask=(j < candidates) & (rank < C.TOP))


@triton.jit
def decode_parts_kernel(
    q, k_sel, v_sel, k_win, v_win, index, lengths, o, lse,
    k_sel_b, v_sel_b, k_win_b, v_win_b, parts, ring, scale,
    C: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Attend to a selected block or a part of the window; TOP or WINDOW is 0 without the branch."""
    part = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    head, row, rows = _program_rows(batch, C)
    length = tl.load(lengths + batch).to(tl.int32)
    q += row * C.KEY
    part_row = row * parts + part
    if C.TOP > 0:
        candidates = tl.cdiv(length, C.SELECT)
        if part < tl.minimum(candidates, C.TOP):
            j = part  # at most TOP blocks: all are selected
            if candidates > C.TOP:
                j = tl.load(index + row // C.GROUP * C.TOP + part)
            _attend(
                q, k_sel + batch * k_sel_b + head * C.KEY, v_sel + batch * v_sel_b + head * C.VALUE,
                o, lse, part_row, parts, scale, rows, C,
                begin=j * C.SELECT, end=tl.minimum(length, (j + 1) * C.SELECT),
            )  # fmt: skip
    if C.WINDOW > 0:
        begin = tl.maximum(length - C.WINDOW, 0) + (part - C.TOP) * PART
        if (part >= C.TOP) & (begin < length):
            _attend(
                q, k_win + batch * k_win_b + head * C.KEY, v_win + batch * v_win_b + head * C.VALUE,
                o, lse, part_row, parts, scale, rows, C,
                begin=begin, end=tl.minimum(length, begin + PART), ring=ring,
            )  # fmt: skip


@triton.jit
def _join(o, lse, part_row, count, gates, gate, C: tl.constexpr, TILE: tl.constexpr):
    """Join a branch's first `count` parts; return o [1, VALUE_P], gated unless `gates` is None."""
    m, total, acc = start_softmax(1, C.VALUE_P)
    for first in range(0, count, TILE):
        i = first + tl.arange(0, TILE)
        inside = i < count
        s = tl.load(lse + part_row + i, mask=inside, other=float("-inf")) * 1.4426950408889634
        part = load_rows(o, part_row + i, C.VALUE, C.VALUE, C.VALUE_P, inside)
        m_new = tl.maximum(m, tl.max(s, 0))
        p = tl.exp2(s - m_new)
        old = tl.exp2(m - m_new)
        total = total * old + tl.sum(p, 0)
        acc = acc * old[:, None] + tl.sum(p[:, None] * part, 0)[None, :]
        m = m_new
    o_tile = finish_softmax(m, total, acc)[0]
    if gates is not None:
        o_tile *= tl.load(gates + gate).to(tl.float32)
    return o_tile


@triton.jit
def decode_mix_kernel(
    o, lse, gates, lengths, out, parts,
    C: tl.constexpr, PART: tl.constexpr, FIRST_PART: tl.constexpr, TILE: tl.constexpr,
    CMP: tl.constexpr, SEL: tl.constexpr, WIN: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """Store Σ gate · output of a query head; CMP, SEL, WIN: the branch's gate, -1: no branch."""
    VALUE_P: tl.constexpr = C.VALUE_P
    row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    length = tl.load(lengths + tl.program_id(1)).to(tl.int32)
    total = tl.zeros([1, VALUE_P], tl.float32)
    part_row = row * parts
    if gates is not None:
        gates += row * GATES
    if CMP >= 0:
        count = tl.cdiv(visible(length - 1, C), PART)
        total += _join(o, lse, part_row + FIRST_PART, count, gates, CMP, C, TILE)
    if SEL >= 0:
        count = tl.minimum(tl.cdiv(length, C.SELECT), C.TOP)
        total += _join(o, lse, part_row, count, gates, SEL, C, TILE)
    if WIN >= 0:
        count = tl.cdiv(tl.minimum(length, C.WINDOW), PART)
        total += _join(o, lse, part_row + C.TOP, count, gates, WIN, C, TILE)
    zero = tl.arange(0, 1)  # `total` has one row
    store_rows(out + row * C.VALUE, zero, C.VALUE, total, C.VALUE, C.VALUE_P, zero == 0)


PART = 128  # compressed keys, or positions of the window, that one program attends to
BLOCKS = 64  # selection blocks that one program ranks
ELEMENTS = 2048  # elements of o that the last kernel joins at a time


def decode_forward(x: DecodeInputs) -> Tensor:
    """Run five kernels; some are skipped without a branch, or if all blocks are selected.

    The parts of a head are numbered: selected blocks, then the window, then compressed keys.
    """
    (batch, heads, _), spec, branches = x.q.shape, x.spec, x.branches.split("+")
    k, v = x.pair(branches[0])
    kv_heads = k.shape[2]
    top = spec.select_top if "sel" in branches else 0
    window = spec.window if "win" in branches else 0
    constants = constants_of(x.q[:, None], k, v, spec, TOP=top, WINDOW=window, BLOCKS=BLOCKS)
    config = choose_config("gathered_decode", constants.padded, x.q)
    constants = constants._replace(ROWS=config.rows, KEYS=config.keys)
    total_blocks = 0 if x.k_sel is None else spec.select_blocks_len(x.k_sel.shape[1])
    selecting = top > 0 and total_blocks > top
    keys = 0
    if x.k_cmp is not None and (selecting or "cmp" in branches):
        keys = x.k_cmp.shape[1]
    key_parts = cdiv(keys, PART)
    first_part = top + cdiv(window, PART)  # of compressed keys
    parts, score_stride = _capacity(first_part + key_parts), _capacity(keys)
    blocks, scale = _capacity(total_blocks), x.scale * LOG2E
    q, lengths = x.q.contiguous(), x.lengths.contiguous()
    gates = None if x.gates is None else x.gates.contiguous()
    # An index ranks with its own queries, one head per KV head: their scores need no normalizer.
    indexed = x.q_cmp is not None
    ranking = q if x.q_cmp is None else x.q_cmp.contiguous()
    ranking_constants = constants._replace(GROUP=1) if indexed else constants
    k_cmp, k_cmp_b = _buffer(x.k_cmp)
    v_cmp, v_cmp_b = _buffer(x.v_cmp if "cmp" in branches else None)
    k_sel, k_sel_b = _buffer(x.k_sel)
    v_sel, v_sel_b = _buffer(x.v_sel)
    k_win, k_win_b = _buffer(x.k_win)
    v_win, v_win_b = _buffer(x.v_win)
    out = _empty_output(x)
    index = q.new_empty(batch, kv_heads, spec.select_top, dtype=torch.int32)
    o = q.new_empty(batch, heads, parts, v.shape[-1], dtype=torch.float32)
    lse = q.new_empty(batch, heads, parts, dtype=torch.float32)
    scores = None
    if selecting:
        scores = q.new_empty(batch, ranking.shape[1], score_stride, dtype=torch.float32)
    programs = kv_heads * cdiv(heads // kv_heads, config.rows)
    tile = max(1, ELEMENTS // constants.VALUE_P)
    launch(
        decode_compressed_kernel, (key_parts, kv_heads if indexed else programs, batch), config,
        q=ranking, k_cmp=k_cmp, v_cmp=v_cmp, lengths=lengths, o=o, lse=lse, scores=scores,
        k_cmp_b=k_cmp_b, v_cmp_b=v_cmp_b, parts=parts, score_stride=score_stride, scale=scale,
        C=ranking_constants, PART=PART, FIRST_PART=first_part,
    )  # fmt: skip
    if selecting:
        importance = q.new_empty(batch, kv_heads, blocks, dtype=torch.float32)
        ranking_grid = cdiv(total_blocks, BLOCKS), kv_heads, batch
        ranking_config = Config(rows=BLOCKS, keys=0, warps=4, stages=1)
        launch(
            decode_importance_kernel, ranking_grid, ranking_config,
            scores=scores, lse=None if indexed else lse, lengths=lengths, importance=importance,
            parts=parts, score_stride=score_stride, blocks=blocks, C=ranking_constants, TILE=tile,
            GROUP_P=padded_size(ranking_constants.GROUP), PART=PART, FIRST_PART=first_part,
        )  # fmt: skip
        launch(
            decode_rank_kernel, ranking_grid, ranking_config,
            importance=importance, lengths=lengths, index=index, blocks=blocks, C=constants,
        )  # fmt: skip
    launch(
        decode_parts_kernel, (first_part, programs, batch), config,
        q=q, k_sel=k_sel, v_sel=v_sel, k_win=k_win, v_win=v_win, index=index, lengths=lengths,
        o=o, lse=lse, k_sel_b=k_sel_b, v_sel_b=v_sel_b, k_win_b=k_win_b, v_win_b=v_win_b,
        parts=parts, ring=1 if k_win is None else k_win.shape[1], scale=scale,
        C=constants, PART=PART,
    )  # fmt: skip
    cmp, sel, win = (branches.index(b) if b in branches else -1 for b in BRANCHES)
    launch(
        decode_mix_kernel, (heads, batch), Config(rows=1, keys=tile, warps=1, stages=1),
        o=o, lse=lse, gates=gates, lengths=lengths, out=out, parts=parts, C=constants,
        PART=PART, FIRST_PART=first_part, TILE=tile,
        CMP=cmp, SEL=sel, WIN=win, GATES=len(branches),
    )  # fmt: skip
    return out


def _buffer(x: Tensor | None) -> tuple[Tensor | None, int]:
    """Return a buffer of keys or values, and the stride between its sequences.

    A cache passes the first entries of larger buffers: contiguous sequences, far apart.
    """
    if x is None:
        return None, 0
    x = x if x[:1].is_contiguous() else x.contiguous()
    return x, x.stride(0)


def _capacity(count: int) -> int:
    """Round up to a multiple of 16, because Triton compiles a kernel again for other sizes."""
    return cdiv(count, 16) * 16


def _empty_output(x: DecodeInputs) -> Tensor:
    _, v = x.pair(x.branches.split("+")[0])
    return x.q.new_empty(*x.q.shape[:2], v.shape[-1])


triton_decode = register("nsa::triton_decode", DecodeInputs, decode_forward, fake=_empty_output)
