"""Attention over a band of keys (window, compressed branch, or both), and NSA's op of all branches.

A query at t sees key n iff n * STRIDE + LEN - 1 <= t and, with a window, n > t - WINDOW. In the
compressed branch LEN and STRIDE are those of a block, and WINDOW is 0, which means none. In the
window branch LEN and STRIDE are 1. A launch computes one branch, or both from one tile of queries;
the arguments of a missing branch are None. common.py defines the layout of rows.

`triton_gated` computes the three branches and their gated sum. One forward kernel computes the
compressed branch and the window; the selected branch's kernel also adds up the gated branches. The
gradient g · do of a branch's output is never stored. Let g be the branch's gate, p its softmax, s
its scores, dp = do · vᵀ, and delta = Σ do · o of each row, which is also the gate's gradient. Then
ds = (g·p) · (dp - delta) and dv = (g·p)ᵀ · do. Since g·p = exp(s - (lse - ln g)), the kernels that
know no gates compute ds and dv if they get lse - ln g instead of lse.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.inputs import AttentionInputs, GatedInputs
from nsa.ops.triton.common import (
    LOG2E,
    Constants,
    add_key_gradients,
    add_query_gradient,
    backward_rows,
    binary_lse,
    constants_of,
    document_offsets,
    document_tile,
    dot,
    finish_softmax,
    group_rows,
    kernel,
    keys_before,
    load_pair,
    load_rows,
    max_tiles,
    softmax_step,
    span,
    start_softmax,
    store_pair,
    store_query_gradient,
    store_rows,
    visible,
    zero_pair,
)
from nsa.ops.triton.configs import Config, choose_config
from nsa.ops.triton.launch import cdiv, launch, padded_size
from nsa.ops.triton.select import select_forward
from nsa.ops.triton.selected import selected_forward, selected_gradients


@triton.jit
def _row_tile(cu, documents, seq_len, C: tl.constexpr):
    """Find a program's tile of rows; return document, token, length, first_row, row, at, t, valid.

    - The document's number; its first token, counted over all batches; its length.
    - The tile's first row, counted in the document; the row in memory where its query begins.
    - Of each row of the tile: offset from `row`, position, whether it exists.
    """
    head = tl.program_id(1)
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows, which see most keys, first
    document, tile, start, length = document_tile(cu, documents, i, seq_len, C.GROUP, C.ROWS)
    first_row = tile * C.ROWS
    t0 = first_row // C.GROUP
    local, at = group_rows(first_row, C, C.ROWS % C.GROUP == 0)
    valid = first_row + tl.arange(0, C.ROWS) < length * C.GROUP
    token = tl.program_id(2).to(tl.int64) * seq_len + start
    row = ((token + t0) * C.HEADS + head) * C.GROUP
    return document, token, length, first_row, row, at, t0 + local, valid


@triton.jit
def _first_key(cu, document, token, batch, key_len, C: tl.constexpr):
    """Return a document's first key over all batches, given its first token over all batches."""
    if C.LEN == 1 and C.STRIDE == 1:
        return token
    else:
        return batch * key_len + keys_before(cu, document, C)


@triton.jit
def _bounds(first_row, length, C: tl.constexpr):
    """Return a tile's ranges of keys: some rows see low to high, all see all_from to all_to."""
    t_first = first_row // C.GROUP
    t_last = (tl.minimum(first_row + C.ROWS, length * C.GROUP) - 1) // C.GROUP
    high = visible(t_last, C)
    low = 0
    all_from = 0
    if C.WINDOW > 0:
        low = tl.maximum(t_first + 1 - C.WINDOW, 0) // C.KEYS * C.KEYS
        all_from = tl.cdiv(tl.maximum(t_last + 1 - C.WINDOW, 0), C.KEYS) * C.KEYS
    all_to = tl.maximum(visible(t_first, C) // C.KEYS * C.KEYS, all_from)
    return low, all_from, all_to, high


@triton.jit
def _scores(q, k, v, first, high, far_end, future, C: tl.constexpr, PHASE: tl.constexpr):
    """Load keys and values [KEYS, ..] from `first` on; return them and their scores [ROWS, KEYS].

    A query sees the keys far_end < n < future; other scores are -inf. Phase 0 masks the far end and
    phase 2 the future. In a short window, a tile of phase 0 may also contain the future of a query.
    """
    SHORT: tl.constexpr = C.WINDOW <= C.KEYS + C.ROWS // C.GROUP  # keys and queries of a tile
    FAR: tl.constexpr = PHASE == 0
    FUTURE: tl.constexpr = PHASE == 2 or (PHASE == 0 and SHORT)
    i = tl.arange(0, C.KEYS)
    inside = (i < high - first) if FUTURE else None
    k_tile, v_tile = load_pair(k, v, 0, i, C.HEADS, C, inside)
    s = dot(q, tl.trans(k_tile))
    if FAR:
        s = tl.where(i[None, :] > (far_end - first)[:, None], s, float("-inf"))
    if FUTURE:
        s = tl.where(i[None, :] < (future - first)[:, None], s, float("-inf"))
    return k_tile, v_tile, s


@triton.jit
def _forward(
    q_tile, k, v, o, lse, key, first_row, row, at, t, valid, length, scale, C: tl.constexpr
):  # fmt: skip
    """Store one branch's o and lse of a tile of rows; `key`: where the document's keys begin."""
    far_end, future = t - C.WINDOW, visible(t, C)
    m, total, acc = start_softmax(C.ROWS, C.VALUE_P)
    low, all_from, all_to, high = _bounds(first_row, length, C)
    for phase in tl.static_range(3):
        if phase > 0 or C.WINDOW > 0:  # without a window, phase 0 has no keys
            begin, end = span(phase, low, all_from, all_to, high)
            # Advance pointers: an index would need 64 bits, and so would each comparison with it.
            k_at = k + key * C.KEY + tl.cast(begin, tl.int64) * (C.HEADS * C.KEY)
            v_at = v + key * C.VALUE + tl.cast(begin, tl.int64) * (C.HEADS * C.VALUE)
            for first in range(begin, end, C.KEYS):
                _, v_tile, s = _scores(q_tile, k_at, v_at, first, high, far_end, future, C, phase)
                m, total, acc = softmax_step(s, v_tile, m, total, acc, scale)
                k_at += C.KEYS * C.HEADS * C.KEY
                v_at += C.KEYS * C.HEADS * C.VALUE
    out, logsum = finish_softmax(m, total, acc)
    store_rows(o + row * C.VALUE, at, C.VALUE, out, C.VALUE, C.VALUE_P, valid)
    tl.store(lse + row + at, logsum, mask=valid)


@kernel
def band_forward_kernel(
    q, k_win, v_win, o_win, lse_win, k_cmp, v_cmp, o_cmp, lse_cmp, cu,
    seq_len, key_len, documents, scale, WIN: tl.constexpr, CMP: tl.constexpr,
):  # fmt: skip
    """Store o and lse of one tile of rows."""
    C: tl.constexpr = CMP if k_win is None else WIN  # rows are laid out alike in both
    document, token, length, first_row, row, at, t, valid = _row_tile(cu, documents, seq_len, C)
    if first_row < length * C.GROUP:
        head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
        if k_cmp is not None:  # computed before the window's loop: fewer registers spill
            cmp_key = _first_key(cu, document, token, batch, key_len, CMP) * C.HEADS + head
        q_tile = load_rows(q + row * C.KEY, at, C.KEY, C.KEY, C.KEY_P, valid)  # [ROWS, KEY_P]
        if k_win is not None:
            _forward(
                q_tile, k_win, v_win, o_win, lse_win, token * C.HEADS + head,
                first_row, row, at, t, valid, length, scale, WIN,
            )  # fmt: skip
        if k_cmp is not None:
            _forward(
                q_tile, k_cmp, v_cmp, o_cmp, lse_cmp, cmp_key,
                first_row, row, at, t, valid, length, scale, CMP,
            )  # fmt: skip


@triton.jit
def _branch_rows(
    do, o, gates, lse, dgates, delta, lse2, first, at, rows, valid,
    BRANCH: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return one branch's lse2 = lse / ln 2 - log2(gate) and delta = Σ do·o, both [ROWS].

    Without gates, lse2 and delta are loaded. With gates, they are computed and stored, and delta is
    also stored as the gate's gradient.
    """
    row = first + at
    if gates is None:
        row_lse = tl.load(lse2 + row, mask=valid, other=float("inf"))
        return row_lse, tl.load(delta + row, mask=valid, other=0.0)
    else:
        o_tile = load_rows(o + first * C.VALUE, at, C.VALUE, C.VALUE, C.VALUE_P, valid)
        total = tl.sum(o_tile.to(tl.float32) * do.to(tl.float32), 1)
        gate = tl.load(gates + row * 3 + BRANCH, mask=valid, other=0.0).to(tl.float32)
        row_lse = tl.load(lse + row, mask=valid, other=float("-inf"))
        # A gate of 0 gives lse2 = +inf, and so p = 0, as for a row that saw nothing.
        closed = gate == 0.0
        shifted = binary_lse(row_lse) - tl.log2(tl.where(closed, 1.0, gate))
        shifted = tl.where(closed, float("inf"), shifted)
        tl.store(dgates + row * 3 + BRANCH, total.to(dgates.dtype.element_ty), mask=valid)
        tl.store(delta + BRANCH * rows + row, total, mask=valid)
        tl.store(lse2 + BRANCH * rows + row, shifted, mask=valid)
        return shifted, total


@triton.jit
def _query_gradient(
    q_tile, k, v, do_tile, row_lse, row_delta, acc, key, first_row, t, length, scale,
    C: tl.constexpr,
):  # fmt: skip
    """Add one branch's part of a tile's dq to acc [ROWS, KEY_P]; `key` as for `_forward`."""
    far_end, future = t - C.WINDOW, visible(t, C)
    low, all_from, all_to, high = _bounds(first_row, length, C)
    for phase in tl.static_range(3):
        if phase > 0 or C.WINDOW > 0:
            begin, end = span(phase, low, all_from, all_to, high)
            k_at = k + key * C.KEY + tl.cast(begin, tl.int64) * (C.HEADS * C.KEY)
            v_at = v + key * C.VALUE + tl.cast(begin, tl.int64) * (C.HEADS * C.VALUE)
            for first in range(begin, end, C.KEYS):
                k_tile, v_tile, s = _scores(
                    q_tile, k_at, v_at, first, high, far_end, future, C, phase
                )
                acc = add_query_gradient(s, k_tile, v_tile, do_tile, row_lse, row_delta, acc, scale)
                k_at += C.KEYS * C.HEADS * C.KEY
                v_at += C.KEYS * C.HEADS * C.VALUE
    return acc


@kernel
def band_queries_kernel(
    q, k_win, v_win, k_cmp, v_cmp, do, o_cmp, o_sel, o_win, gates, lse_cmp, lse_sel, lse_win,
    dgates, delta, lse2, dq, cu, seq_len, key_len, documents, rows, scale, scale_out,
    WIN: tl.constexpr, CMP: tl.constexpr,
):  # fmt: skip
    """Store dq of one tile of rows; with gates also what `_branch_rows` stores of each branch."""
    C: tl.constexpr = CMP if k_win is None else WIN
    KEY_P: tl.constexpr = C.KEY_P
    ROWS: tl.constexpr = C.ROWS
    document, token, length, first_row, row, at, t, valid = _row_tile(cu, documents, seq_len, C)
    if first_row < length * C.GROUP:
        head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
        do_tile = load_rows(do + row * C.VALUE, at, C.VALUE, C.VALUE, C.VALUE_P, valid)
        all_rows = tl.cast(rows, tl.int64)  # multiplied by the number of the branch
        if gates is not None:
            _branch_rows(
                do_tile, o_sel, gates, lse_sel, dgates, delta, lse2, row, at, all_rows, valid, 1, C
            )
        if k_cmp is not None:
            cmp_lse, cmp_delta = _branch_rows(
                do_tile, o_cmp, gates, lse_cmp, dgates, delta, lse2, row, at, all_rows, valid, 0, C
            )
        if k_win is not None:
            win_lse, win_delta = _branch_rows(
                do_tile, o_win, gates, lse_win, dgates, delta, lse2, row, at, all_rows, valid, 2, C
            )
        q_tile = load_rows(q + row * C.KEY, at, C.KEY, C.KEY, C.KEY_P, valid)  # [ROWS, KEY_P]
        acc = tl.zeros([ROWS, KEY_P], tl.float32)
        if k_win is not None:
            key = token * C.HEADS + head
            acc = _query_gradient(q_tile, k_win, v_win, do_tile, win_lse, win_delta, acc, key,
                                  first_row, t, length, scale, WIN)  # fmt: skip
        if k_cmp is not None:
            key = _first_key(cu, document, token, batch, key_len, CMP) * C.HEADS + head
            acc = _query_gradient(q_tile, k_cmp, v_cmp, do_tile, cmp_lse, cmp_delta, acc, key,
                                  first_row, t, length, scale, CMP)  # fmt: skip
        store_query_gradient(dq + row * C.KEY, at, acc, scale_out, valid, C, False)


@triton.jit
def _keys_step(
    k_tile, v_tile, dk, dv, q, do, lse2, delta, first_key, first_row, end_row, scale,
    C: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Add the gradients from one tile of rows to dk and dv.

    Phase 0 masks the future and phase 2 the window's far end; phase 0 of a short window masks both.
    """
    SHORT: tl.constexpr = C.WINDOW <= C.KEYS + C.ROWS // C.GROUP  # keys and queries of a tile
    FUTURE: tl.constexpr = PHASE == 0
    FAR: tl.constexpr = C.WINDOW > 0 and (PHASE == 2 or (PHASE == 0 and SHORT))
    valid = (first_row + tl.arange(0, C.ROWS) < end_row) if PHASE != 1 else None
    t0 = first_row // C.GROUP
    local, at = group_rows(first_row, C, C.ROWS % C.GROUP == 0)
    row = tl.cast(t0, tl.int64) * (C.HEADS * C.GROUP)
    q_tile, do_tile = load_pair(q, do, row, at, 1, C, valid)  # [ROWS, ..]
    if PHASE != 1:
        row_lse = tl.load(lse2 + row + at, mask=valid, other=float("inf"))
        row_delta = tl.load(delta + row + at, mask=valid, other=0.0)
    else:
        row_lse = tl.load(lse2 + row + at)
        row_delta = tl.load(delta + row + at)
    s = dot(k_tile, tl.trans(q_tile))  # [KEYS, ROWS]
    n = tl.arange(0, C.KEYS)[:, None]
    if FUTURE:
        end = visible(t0 + local, C) - first_key
        s = tl.where(n < end[None, :], s, float("-inf"))
    if FAR:
        s = tl.where(n > (t0 + local - C.WINDOW - first_key)[None, :], s, float("-inf"))
    return add_key_gradients(s, v_tile, q_tile, do_tile, row_lse, row_delta, dk, dv, scale)


@triton.jit
def _key_gradients(
    q, k, v, do, lse2, delta, dk, dv, cu, batch, head, grid_tile, split,
    seq_len, key_len, documents, split_len, scale, scale_out, C: tl.constexpr,
):  # fmt: skip
    """Store dk and dv of one tile of one branch's keys, from one split of the queries."""
    POSITIONS: tl.constexpr = C.KEYS * C.STRIDE
    document, tile, start, length = document_tile(cu, documents, grid_tile, seq_len, 1, POSITIONS)
    token = batch * seq_len + start
    count = visible(length - 1, C)
    first_key = tile * C.KEYS
    if first_key < count:
        last_key = tl.minimum(first_key + C.KEYS, count) - 1
        # Queries of this split from `begin` to `end` see a key of the tile; those from `all_begin`
        # to `all_end` see all of its keys.
        begin = tl.maximum(split * split_len, first_key * C.STRIDE + C.LEN - 1)
        end = tl.minimum(length, (split + 1) * split_len)
        all_begin = last_key * C.STRIDE + C.LEN - 1
        all_end = end
        if C.WINDOW > 0:
            end = tl.minimum(end, last_key + C.WINDOW)
            all_end = tl.minimum(end, first_key + C.WINDOW)
        i = tl.arange(0, C.KEYS)
        inside = first_key + i < count
        key = _first_key(cu, document, token, batch, key_len, C) + first_key
        row = (token * C.HEADS + head) * C.GROUP
        q += row * C.KEY
        do += row * C.VALUE
        lse2 += row
        delta += row
        k_tile, v_tile = load_pair(k, v, key * C.HEADS + head, i, C.HEADS, C, inside)  # [KEYS, ..]
        dk_acc, dv_acc = zero_pair(C)
        # Rows of these queries; all_from and all_to are rounded to whole tiles from `low` on.
        low = begin * C.GROUP
        high = end * C.GROUP
        all_from = low + tl.cdiv(tl.maximum(all_begin * C.GROUP - low, 0), C.ROWS) * C.ROWS
        all_to = all_from + tl.maximum(all_end * C.GROUP - all_from, 0) // C.ROWS * C.ROWS
        for phase in tl.static_range(3):
            from_row, to_row = span(phase, low, all_from, all_to, high)
            for first_row in range(from_row, to_row, C.ROWS):
                dk_acc, dv_acc = _keys_step(
                    k_tile, v_tile, dk_acc, dv_acc, q, do, lse2, delta,
                    first_key, first_row, high, scale, C, phase,
                )  # fmt: skip
        key += split * (tl.num_programs(0) // C.HEADS) * key_len  # [splits, B, N, ..]
        dk_acc *= scale_out
        store_pair(dk, dv, key * C.HEADS + head, i, dk_acc, dv_acc, C, inside)


@kernel
def band_keys_kernel(
    q, k_win, v_win, k_cmp, v_cmp, do, lse2_win, delta_win, lse2_cmp, delta_cmp,
    dk_win, dv_win, dk_cmp, dv_cmp, cu,
    seq_len, key_len, documents, split_len, cmp_tiles, cmp_programs, scale, scale_out,
    WIN: tl.constexpr, CMP: tl.constexpr,
):  # fmt: skip
    """Store dk and dv of one tile of keys, of the compressed branch or of the window.

    Programs of both branches run at the same time and share q and do in L2. Programs of compressed
    keys start first, for all sequences and heads, because they read the most queries.
    """
    C: tl.constexpr = CMP if k_win is None else WIN
    batch, head = (tl.program_id(0) // C.HEADS).to(tl.int64), tl.program_id(0) % C.HEADS
    i = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    if i < cmp_programs:
        if k_cmp is not None:  # the last split first: its queries see most keys
            _key_gradients(
                q, k_cmp, v_cmp, do, lse2_cmp, delta_cmp, dk_cmp, dv_cmp,
                cu, batch, head, i % cmp_tiles, (cmp_programs - 1 - i) // cmp_tiles,
                seq_len, key_len, documents, split_len, scale, scale_out, CMP,
            )  # fmt: skip
    elif k_win is not None:
        _key_gradients(
            q, k_win, v_win, do, lse2_win, delta_win, dk_win, dv_win,
            cu, batch, head, i - cmp_programs, 0,
            seq_len, seq_len, documents, seq_len, scale, scale_out, WIN,
        )  # fmt: skip


# A document has few tiles of compressed keys, and very many queries see each. So several programs
# share a tile: each reads a split of the queries, and their float32 results are added in a fixed
# order. A split of 512 queries takes about as long as a tile of the window's keys (python -m
# tests.bench schedule).
QUERIES_PER_SPLIT = 512
MAX_SPLITS = 16
MAX_AXIS = 65_535  # CUDA's limit of programs in a grid's second or third axis


# Launchers take the window, the compressed branch, or both, with the same queries, documents and
# scale. A missing branch is None.
Branch = AttentionInputs | None


def launch_forward(win: Branch, cmp: Branch) -> list[Tensor]:
    """Return o and lse of the window, then of the compressed branch."""
    x, config, inputs = _setup("forward", win, cmp)
    outputs = [(None, None) if y is None else y.empty_outputs() for y in (win, cmp)]
    (o_win, lse_win), (o_cmp, lse_cmp) = outputs
    launch(
        band_forward_kernel, _rows_grid(x, config), config, **inputs,
        o_win=o_win, lse_win=lse_win, o_cmp=o_cmp, lse_cmp=lse_cmp,
    )  # fmt: skip
    return [y for pair in outputs for y in pair if y is not None]


def launch_queries(
    win: Branch, cmp: Branch, *, do: Tensor, delta: Tensor, lse2: Tensor, dq: Tensor,
    gates: Tensor | None = None, dgates: Tensor | None = None,
    o_cmp: Tensor | None = None, lse_cmp: Tensor | None = None,
    o_sel: Tensor | None = None, lse_sel: Tensor | None = None,
    o_win: Tensor | None = None, lse_win: Tensor | None = None,
) -> None:  # fmt: skip
    """Write dq; with gates also dgates, and delta and lse2 of all branches from their o and lse."""
    x, config, inputs = _setup("queries", win, cmp)
    launch(
        band_queries_kernel, _rows_grid(x, config), config, **inputs,
        do=do, o_cmp=o_cmp, o_sel=o_sel, o_win=o_win, gates=gates,
        lse_cmp=lse_cmp, lse_sel=lse_sel, lse_win=lse_win,
        dgates=dgates, delta=delta, lse2=lse2, dq=dq,
        rows=x.q.shape[:3].numel(), scale_out=x.scale,
    )  # fmt: skip


def launch_keys(
    win: Branch, cmp: Branch, *, do: Tensor,
    lse2_win: Tensor, delta_win: Tensor, lse2_cmp: Tensor, delta_cmp: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Return dk and dv of the window, then of the compressed branch."""
    x, config, inputs = _setup("keys", win, cmp)
    (batch, seq_len), groups = x.q.shape[:2], x.k.shape[2]
    dk_win = dv_win = dk_cmp = dv_cmp = None
    window_tiles, split_len, cmp_tiles, cmp_programs = 0, seq_len, 1, 0
    if win is not None:
        window_tiles = max_tiles(seq_len, config.keys, x.cu_seqlens)
        dk_win, dv_win = _parts(win, 1)
    if cmp is not None:
        splits = min(MAX_SPLITS, cdiv(seq_len, QUERIES_PER_SPLIT))
        split_len = cdiv(seq_len, splits)
        cmp_tiles = max_tiles(seq_len, config.keys * cmp.spec.block_stride, x.cu_seqlens)
        cmp_programs = cmp_tiles * splits
        dk_cmp, dv_cmp = _parts(cmp, splits)
    programs = cmp_programs + window_tiles
    # More than MAX_AXIS programs need the third axis too; programs past the last tile are idle.
    grid = groups * batch, min(programs, MAX_AXIS), cdiv(programs, MAX_AXIS)
    launch(
        band_keys_kernel, grid, config, **inputs, do=do,
        lse2_win=lse2_win, delta_win=delta_win, lse2_cmp=lse2_cmp, delta_cmp=delta_cmp,
        dk_win=dk_win, dv_win=dv_win, dk_cmp=dk_cmp, dv_cmp=dv_cmp, split_len=split_len,
        cmp_tiles=cmp_tiles, cmp_programs=cmp_programs, scale_out=x.scale,
    )  # fmt: skip
    gradients = [y for y in (dk_win, dv_win, dk_cmp, dv_cmp) if y is not None]
    return [y[0] if y.shape[0] == 1 else y.sum(0).to(x.k.dtype) for y in gradients]


def _setup(
    operation: str, win: Branch, cmp: Branch
) -> tuple[AttentionInputs, Config, dict[str, Any]]:
    """Return one of the branches, the kernel's config, and the arguments that all kernels take."""
    x = cmp if win is None else win
    assert x is not None
    name = "compressed" if win is None else "window"
    if win is not None and cmp is not None:
        name = "gated"
    sizes = padded_size(x.q.shape[3]), padded_size(x.v.shape[3])
    config = choose_config(f"{name}_{operation}", sizes, x.q)
    cu, documents = document_offsets(x.cu_seqlens)
    k_win, v_win = (None, None) if win is None else (win.k.contiguous(), win.v.contiguous())
    k_cmp, v_cmp = (None, None) if cmp is None else (cmp.k.contiguous(), cmp.v.contiguous())
    inputs = {
        "q": x.q.contiguous(), "k_win": k_win, "v_win": v_win, "k_cmp": k_cmp, "v_cmp": v_cmp,
        "cu": cu, "documents": documents,
        "seq_len": x.q.shape[1], "key_len": 0 if cmp is None else cmp.k.shape[1],
        "scale": x.scale * LOG2E, "WIN": _constants(win, config), "CMP": _constants(cmp, config),
    }  # fmt: skip
    return x, config, inputs


def _constants(x: Branch, config: Config) -> Constants | None:
    if x is None:
        return None
    rows, keys, spec = config.rows, config.keys, x.spec
    if x.branch == "window":
        return constants_of(x.q, x.k, x.v, ROWS=rows, KEYS=keys, WINDOW=spec.window)
    length, stride = spec.block_len, spec.block_stride
    return constants_of(x.q, x.k, x.v, ROWS=rows, KEYS=keys, LEN=length, STRIDE=stride)


def _rows_grid(x: AttentionInputs, config: Config) -> tuple[int, ...]:
    batch, seq_len, heads, _ = x.q.shape
    groups = x.k.shape[2]
    return max_tiles(seq_len * (heads // groups), config.rows, x.cu_seqlens), groups, batch


def _parts(x: AttentionInputs, splits: int) -> tuple[Tensor, Tensor]:
    """Return uninitialised dk and dv of a branch, [splits, B, N, Hkv, ..]."""
    # Packed, k may have more rows than the documents have compressed keys, because cu_seqlens on a
    # device is not checked. No kernel writes the gradients of these rows, so they start at 0.
    packed = x.cu_seqlens is not None and x.branch == "compressed"
    empty = torch.zeros if packed else torch.empty
    dtype = torch.float32 if splits > 1 else x.k.dtype
    dk, dv = (empty(splits, *y.shape, dtype=dtype, device=y.device) for y in (x.k, x.v))
    return dk, dv


def _branches(x: AttentionInputs) -> tuple[Branch, Branch]:
    return (x, None) if x.branch == "window" else (None, x)


def band_forward(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return (o, lse)."""
    return tuple(launch_forward(*_branches(x)))


def band_backward(
    do: Tensor, dlse: Tensor, x: AttentionInputs, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, with the same bits in every run."""
    dq = torch.empty_like(x.q, memory_format=torch.contiguous_format)
    do = do.contiguous()
    delta, lse2 = backward_rows(do, o, lse, dlse)
    win, cmp = _branches(x)
    launch_queries(win, cmp, do=do, delta=delta, lse2=lse2, dq=dq)
    dk, dv = launch_keys(
        win, cmp, do=do, lse2_win=lse2, delta_win=delta, lse2_cmp=lse2, delta_cmp=delta
    )
    return dq, dk, dv


triton_band = register(
    "nsa::triton_band",
    AttentionInputs,
    band_forward,
    fake=AttentionInputs.empty_outputs,
    outputs=2,
    gradient=Gradient(band_backward, inputs=3, outputs=2),
)


def gated_forward(x: GatedInputs) -> tuple[Tensor, ...]:
    """Return (o, block_index, then o and lse of the compressed, selected and window branch)."""
    win, cmp = x.branch("window", x.k_win, x.v_win), x.branch("compressed", x.k_cmp, x.v_cmp)
    o_win, lse_win, o_cmp, lse_cmp = launch_forward(win, cmp)
    index = select_forward(x.selection(lse_cmp))
    o = torch.empty_like(o_cmp)
    selected = x.branch("selected", x.k_sel, x.v_sel, index)
    o_sel, lse_sel = selected_forward(
        selected, o_cmp=o_cmp, o_win=o_win, gates=x.gates.contiguous(), gated_sum=o
    )
    return o, index, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win


def gated_backward(
    do: Tensor, x: GatedInputs, index: Tensor,
    o_cmp: Tensor, lse_cmp: Tensor, o_sel: Tensor, lse_sel: Tensor, o_win: Tensor, lse_win: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of q, of the three pairs of keys and values, and of the gates."""
    do, gates = do.contiguous(), x.gates.contiguous()
    win, cmp = x.branch("window", x.k_win, x.v_win), x.branch("compressed", x.k_cmp, x.v_cmp)
    dq = torch.empty_like(x.q, memory_format=torch.contiguous_format)
    dgates = torch.empty_like(gates)
    # [3, B, T, Hq], by branch: delta = Σ do·o, and lse2 = (lse - ln gate) / ln 2.
    delta, lse2 = (do.new_empty(3, *x.q.shape[:3], dtype=torch.float32) for _ in range(2))
    launch_queries(  # the selected branch adds to dq later
        win, cmp, do=do, delta=delta, lse2=lse2, dq=dq,
        gates=gates, dgates=dgates, o_cmp=o_cmp, lse_cmp=lse_cmp,
        o_sel=o_sel, lse_sel=lse_sel, o_win=o_win, lse_win=lse_win,
    )  # fmt: skip
    dk_win, dv_win, dk_cmp, dv_cmp = launch_keys(
        win, cmp, do=do, lse2_win=lse2[2], delta_win=delta[2],
        lse2_cmp=lse2[0], delta_cmp=delta[0],
    )  # fmt: skip
    selected = x.branch("selected", x.k_sel, x.v_sel, index)
    dk_sel, dv_sel = selected_gradients(do, selected, lse2[1], delta[1], dq, add=True)
    return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, dgates


def _empty_outputs(x: GatedInputs) -> tuple[Tensor, ...]:
    branch = x.branch("window", x.k_win, x.v_win)  # o and lse of all branches have the same shapes
    o, lse = branch.empty_outputs()
    cmp, sel, win = (branch.empty_outputs() for _ in range(3))
    return o, x.selection(lse).empty_index(), *cmp, *sel, *win


triton_gated = register(
    "nsa::triton_gated",
    GatedInputs,
    gated_forward,
    _empty_outputs,
    outputs=8,
    gradient=Gradient(gated_backward, inputs=8, outputs=1, saved=slice(1, None)),
)
