"""Selector loss: one kernel computes a mass per head and block, the next a loss per query.

    mass_kernel         logarithm of each block's softmax mass, from selected or compressed keys
    divergence_kernel   both softmaxes over blocks, the loss, and dp = ∂loss/∂p by block
    keys_kernel         the gradient of compressed keys; a program sums it over all queries
    queries_kernel      the gradient of an index's queries, if there is an index

Rows are the sampled queries times the heads of a group, of q or of q_cmp. A compressed block adds
exp(score) to a selection block once for each position that both blocks cover. A compressed block
has l positions, so a row's compressed masses add up to l times its softmax's denominator.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.inputs import SelectorLossInputs
from nsa.ops.triton.common import (
    LOG2E,
    Constants,
    constants_of,
    document_offsets,
    dot,
    kernel,
    load_rows,
    store_rows,
    visible,
)
from nsa.ops.triton.configs import Config, choose_config
from nsa.ops.triton.launch import cdiv, launch, next_power_of_2
from nsa.ops.triton.select import first_overlap, overlap

FAR = tl.constexpr(1 << 30)  # a position that no token has
STEP = 512  # masses, heads x blocks, that divergence_kernel reads at a time


@triton.jit
def _documents_of(cu, documents, t, C: tl.constexpr):
    """Return the first token and first compressed key of each t's document: int32 [rows]."""
    start, first_key = tl.zeros_like(t), tl.zeros_like(t)
    if cu is not None:
        for first in range(0, documents, 64):
            i = first + tl.arange(0, 64)
            begin = tl.load(cu + i, mask=i < documents, other=FAR)
            end = tl.load(cu + i + 1, mask=i < documents, other=FAR)
            begun, ended = begin[None, :] <= t[:, None], end[None, :] <= t[:, None]
            start = tl.maximum(start, tl.max(tl.where(begun, begin[None, :], 0), 1))
            keys = visible(end - begin - 1, C)[None, :]
            first_key += tl.sum(tl.where(ended, keys, 0), 1)
    return start, first_key


@triton.jit
def _query_rows(t, row, seq_len, batch, head, C: tl.constexpr):
    """Return where the rows of tokens t are in queries [B, T, Hkv · GROUP, Dk]."""
    return ((batch * seq_len + t) * C.HEADS + head) * C.GROUP + row % C.GROUP


@triton.jit
def _sampled_rows(queries, q, cu, first, rows, seq_len, documents, batch, head, C: tl.constexpr):
    """Return a tile's rows: (valid, position, document's first token and key, q [ROWS, KEY_P]).

    A row that does not exist has position -1, so it sees no key.
    """
    row = first + tl.arange(0, C.ROWS)
    valid = row < rows
    t = tl.load(queries + row // C.GROUP, mask=valid, other=0)
    at = _query_rows(t, row, seq_len, batch, head, C)
    q_tile = load_rows(q, at, C.KEY, C.KEY, C.KEY_P, valid)
    t = t.to(tl.int32)
    start, first_key = _documents_of(cu, documents, t, C)
    return valid, tl.where(valid, t - start, -1), start, first_key, q_tile


@triton.jit
def _add(s, m, total):
    """Add base-2 scores [rows, keys] to a running maximum and sum [rows]."""
    m_new = tl.maximum(m, tl.max(s, 1))
    top = tl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, total * tl.exp2(m - top) + tl.sum(tl.exp2(s - top[:, None]), 1)


@triton.jit
def _log_sum(m, total):
    """Return the base-2 logarithm of the sum; -inf if nothing was added."""
    return tl.where(total > 0.0, m + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))


@triton.jit
def _selected_mass(q_tile, k, block, position, reach, scale, C: tl.constexpr):
    """Return a block's mass for each row [ROWS]; `k` points to the document's first key."""
    ROWS: tl.constexpr = C.ROWS
    m, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for first in range(0, C.SELECT, C.KEYS):
        i = first + tl.arange(0, C.KEYS)
        key = block * C.SELECT + i
        inside = (i < C.SELECT) & (key <= reach)
        k_tile = load_rows(k, key.to(tl.int64), C.HEADS * C.KEY, C.KEY, C.KEY_P, inside)
        s = dot(q_tile, tl.trans(k_tile)) * scale
        sees = inside[None, :] & (key[None, :] <= position[:, None])
        m, total = _add(tl.where(sees, s, float("-inf")), m, total)
    return _log_sum(m, total)


@triton.jit
def _compressed_mass(q_tile, k, j, seen_by, high, scale, C: tl.constexpr):
    """Return masses of blocks j [ROWS, BLOCKS]; `k` points to the document's compressed keys."""
    ROWS: tl.constexpr = C.ROWS
    BLOCKS: tl.constexpr = C.BLOCKS
    low = first_overlap(j, C)
    m = tl.full([ROWS, BLOCKS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, BLOCKS], tl.float32)
    for c in range(C.COUNT):
        i = low + c
        weight = overlap(i, j, C)
        inside = (i >= 0) & (i < high) & (weight > 0.0)
        k_tile = load_rows(k, i.to(tl.int64), C.HEADS * C.KEY, C.KEY, C.KEY_P, inside)
        s = dot(q_tile, tl.trans(k_tile)) * scale
        s = tl.where(inside[None, :] & (i[None, :] < seen_by[:, None]), s, float("-inf"))
        m_new = tl.maximum(m, s)
        top = tl.where(m_new == float("-inf"), 0.0, m_new)
        total = total * tl.exp2(m - top) + tl.exp2(s - top) * weight[None, :]
        m = m_new
    return _log_sum(m, total)


@kernel
def mass_kernel(
    q, k_sel, k_cmp, queries, mass, cu,
    seq_len, key_len, documents, rows, total_blocks, scale,
    C: tl.constexpr,
):  # fmt: skip
    """Store masses of C.BLOCKS blocks for a tile of rows, except of blocks after a row's own.

    Masses come from k_sel, or from k_cmp if k_sel is None. The documents of a tile's rows are
    computed one after another.
    """
    BLOCKS: tl.constexpr = C.BLOCKS
    tiles = tl.cdiv(total_blocks, BLOCKS)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first_row = tl.program_id(0) // tiles * C.ROWS
    first_block = tl.program_id(0) % tiles * BLOCKS
    valid, position, start, first_key, q_tile = _sampled_rows(
        queries, q, cu, first_row, rows, seq_len, documents, batch, head, C
    )
    row = (batch * C.HEADS + head) * rows + first_row + tl.arange(0, C.ROWS)
    mass += row * total_blocks
    seen_by = visible(position, C)
    j = first_block + tl.arange(0, BLOCKS)
    current = tl.min(tl.where(valid, start, FAR), 0)  # first token of a document
    while current < FAR:
        mine = valid & (start == current)
        reach = tl.max(tl.where(mine, position, -1), 0)
        stop = tl.minimum(first_block + BLOCKS, reach // C.SELECT + 1)
        if k_sel is not None:
            k = k_sel + ((batch * seq_len + current) * C.HEADS + head) * C.KEY
            for block in range(first_block, stop):
                one = _selected_mass(q_tile, k, block, position, reach, scale, C)
                tl.store(mass + block, one, mask=mine & (block * C.SELECT <= position))
        elif first_block < stop:
            key = tl.min(tl.where(mine, first_key, FAR), 0)
            high = tl.max(tl.where(mine, seen_by, 0), 0)
            k = k_cmp + ((batch * key_len + key) * C.HEADS + head) * C.KEY
            tile = _compressed_mass(q_tile, k, j, seen_by, high, scale, C)
            at = mass[:, None] + j[None, :]
            tl.store(at, tile, mask=mine[:, None] & (j[None, :] * C.SELECT <= position[:, None]))
        current = tl.min(tl.where(valid & (start > current), start, FAR), 0)


@triton.jit
def _block_masses(mass, row, first, own, total_blocks, HEADS: tl.constexpr, C: tl.constexpr):
    """Load masses [heads, BLOCKS] of blocks from `first` on; -inf for blocks after `own`.

    `row` [heads] are the rows of one query, of which the first HEADS exist.
    """
    j = first + tl.arange(0, C.BLOCKS)
    g = tl.arange(0, row.shape[0])
    inside = (g < HEADS)[:, None] & (j <= own)[None, :]
    at = (row * total_blocks)[:, None] + j[None, :]
    return tl.load(mass + at, mask=inside, other=float("-inf"))


@kernel
def divergence_kernel(
    queries, sel_mass, cmp_mass, losses, target, dp, by_head, cu,
    documents, total_blocks,
    C: tl.constexpr, HEADS_P: tl.constexpr, RANKING: tl.constexpr, RANKING_P: tl.constexpr,
):  # fmt: skip
    """Store the loss of one query and KV head, its target, and what the gradient needs.

    Names with `a` belong to the C.GROUP rows of `sel_mass`, names with `b` to the RANKING rows of
    `cmp_mass`.
    """
    TINY: tl.constexpr = 1.1754943508222875e-38  # the smallest normal number, in place of 0
    s, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, count = tl.program_id(2).to(tl.int64), tl.num_programs(0)
    t = tl.load(queries + s + tl.arange(0, 1)).to(tl.int32)  # [1], for `_documents_of`
    start, _first_key = _documents_of(cu, documents, t, C)
    own = tl.sum(t - start, 0) // C.SELECT
    last = own - C.LOCAL  # of the ranked blocks
    query = (batch * C.HEADS + head) * count + s
    row_a = query * C.GROUP + tl.arange(0, HEADS_P)
    g = tl.arange(0, RANKING_P)
    row_b = query * RANKING + g
    target += query * total_blocks
    dp += query * total_blocks
    m_a, sum_a = tl.full([HEADS_P], float("-inf"), tl.float32), tl.zeros([HEADS_P], tl.float32)
    m_b, sum_b = tl.full([RANKING_P], float("-inf"), tl.float32), tl.zeros([RANKING_P], tl.float32)
    for first in range(0, own + 1, C.BLOCKS):
        a = _block_masses(sel_mass, row_a, first, own, total_blocks, C.GROUP, C)
        b = _block_masses(cmp_mass, row_b, first, own, total_blocks, RANKING, C)
        m_a, sum_a = _add(a, m_a, sum_a)
        m_b, sum_b = _add(b, m_b, sum_b)
    # A row that saw nothing has lse +inf, so that its probabilities are 0.
    lse_a = tl.where(sum_a > 0.0, _log_sum(m_a, sum_a), float("inf"))[:, None]
    lse_b = tl.where(sum_b > 0.0, _log_sum(m_b, sum_b), float("inf"))
    target_sum, p_sum = 0.0, 0.0
    for first in range(0, last + 1, C.BLOCKS):
        a = _block_masses(sel_mass, row_a, first, own, total_blocks, C.GROUP, C)
        b = _block_masses(cmp_mass, row_b, first, own, total_blocks, RANKING, C)
        j = first + tl.arange(0, C.BLOCKS)
        ranked = (j >= C.INIT) & (j <= last)
        target_p = tl.where(ranked, tl.sum(tl.exp2(a - lse_a), 0) / C.GROUP, 0.0)
        p = tl.where(ranked, tl.sum(tl.exp2(b - lse_b[:, None]), 0) / RANKING, 0.0)
        target_sum += tl.sum(target_p, 0)
        p_sum += tl.sum(p, 0)
    log_ratio = tl.log2(tl.maximum(p_sum, TINY)) - tl.log2(tl.maximum(target_sum, TINY))
    dp_sum = tl.where(p_sum > TINY, target_sum / tl.maximum(p_sum, TINY), 0.0)
    loss, delta = 0.0, tl.zeros([RANKING_P], tl.float32)
    for first in range(0, total_blocks, C.BLOCKS):
        a = _block_masses(sel_mass, row_a, first, own, total_blocks, C.GROUP, C)
        b = _block_masses(cmp_mass, row_b, first, own, total_blocks, RANKING, C)
        j = first + tl.arange(0, C.BLOCKS)
        ranked = (j >= C.INIT) & (j <= last)
        by_head_p = tl.exp2(b - lse_b[:, None])
        target_p = tl.where(ranked, tl.sum(tl.exp2(a - lse_a), 0) / C.GROUP, 0.0)
        p = tl.where(ranked, tl.sum(by_head_p, 0) / RANKING, 0.0)
        log_p = tl.log2(tl.maximum(p, TINY))
        loss += tl.sum(target_p * (tl.log2(tl.maximum(target_p, TINY)) - log_p + log_ratio), 0)
        d = tl.where(p > TINY, dp_sum - target_p / tl.maximum(p, TINY), dp_sum)
        d = tl.where(ranked, d, 0.0)
        delta += tl.sum(by_head_p * d[None, :], 1)
        tl.store(target + j, target_p, mask=j < total_blocks)
        tl.store(dp + j, d, mask=j < total_blocks)
    tl.store(losses + query, loss * 0.6931471805599453)  # ln 2
    # The lse over compressed keys: `lse_b` counts each key once for each of its positions.
    lse = lse_b - tl.log2(tl.full([RANKING_P], C.LEN, tl.float32))
    tl.store(by_head + row_b, lse, mask=g < RANKING)
    all_rows = tl.num_programs(2).to(tl.int64) * C.HEADS * count * RANKING  # of lse; delta follows
    tl.store(by_head + all_rows + row_b, delta, mask=g < RANKING)


@triton.jit
def _score_gradient(
    k_tile, q_tile, i, inside, first_key, position, row, valid, dp, by_head, all_rows, total_blocks,
    scale, C: tl.constexpr,
):  # fmt: skip
    """Return ∂loss/∂score of compressed keys i [KEYS] and rows, times `all_rows`: [KEYS, ROWS]."""
    KEYS: tl.constexpr = C.KEYS
    ROWS: tl.constexpr = C.ROWS
    OVERLAPS: tl.constexpr = (C.LEN + C.SELECT - 2) // C.SELECT + 1
    local = i[:, None] - first_key[None, :]  # of the row's document, [KEYS, ROWS]
    sees = inside[:, None] & (local >= 0) & (local < visible(position, C)[None, :])
    lse = tl.load(by_head + row, mask=valid, other=float("inf"))
    delta = tl.load(by_head + all_rows + row, mask=valid, other=0.0)
    s = dot(k_tile, tl.trans(q_tile)) * scale
    p = tl.where(sees, tl.exp2(s - lse[None, :]), 0.0)
    gradient = tl.zeros([KEYS, ROWS], tl.float32)
    for c in tl.static_range(OVERLAPS):
        j = local * C.STRIDE // C.SELECT + c
        weight = overlap(local, j, C)
        d = dp + (row // C.GROUP)[None, :] * total_blocks + j
        gradient += weight * tl.load(d, mask=sees & (weight > 0.0), other=0.0)
    return p * (gradient / C.LEN - delta[None, :])


@kernel
def keys_kernel(
    k_cmp, q, queries, dp, by_head, dloss, dk, cu,
    seq_len, key_len, documents, rows, total_blocks, scale, scale_out,
    C: tl.constexpr,
):  # fmt: skip
    """Store the gradient of a tile of compressed keys, a sum over all rows in ascending order."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * C.KEYS + tl.arange(0, C.KEYS)
    at, inside = (batch * key_len + i) * C.HEADS + head, i < key_len
    k_tile = load_rows(k_cmp, at, C.KEY, C.KEY, C.KEY_P, inside)
    all_rows = (tl.num_programs(2) * C.HEADS * rows).to(tl.int64)
    by_head += (batch * C.HEADS + head) * rows
    dp += (batch * C.HEADS + head) * (rows // C.GROUP) * total_blocks
    total = tl.zeros_like(k_tile).to(tl.float32)  # [KEYS, KEY_P]
    for first in range(0, rows, C.ROWS):
        valid, position, _start, first_key, q_tile = _sampled_rows(
            queries, q, cu, first, rows, seq_len, documents, batch, head, C
        )
        row = first + tl.arange(0, C.ROWS)
        ds = _score_gradient(
            k_tile, q_tile, i, inside, first_key, position, row, valid, dp, by_head, all_rows,
            total_blocks, scale, C,
        )  # fmt: skip
        total = dot(ds.to(q_tile.dtype), q_tile, total)
    # Scale last: in half precision a mean over all queries would underflow.
    total *= scale_out * tl.load(dloss) / all_rows.to(tl.float32)
    store_rows(dk, at, C.KEY, total, C.KEY, C.KEY_P, inside)


@kernel
def queries_kernel(
    k_cmp, q, queries, dp, by_head, dloss, dq, cu,
    seq_len, key_len, documents, rows, total_blocks, scale, scale_out,
    C: tl.constexpr,
):  # fmt: skip
    """Store the gradient of a tile of queries, a sum over the keys that they see."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first_row = tl.program_id(0) * C.ROWS
    valid, position, _start, first_key, q_tile = _sampled_rows(
        queries, q, cu, first_row, rows, seq_len, documents, batch, head, C
    )
    row = first_row + tl.arange(0, C.ROWS)
    all_rows = (tl.num_programs(2) * C.HEADS * rows).to(tl.int64)
    by_head += (batch * C.HEADS + head) * rows
    dp += (batch * C.HEADS + head) * (rows // C.GROUP) * total_blocks
    total = tl.zeros_like(q_tile).to(tl.float32)  # [ROWS, KEY_P]
    begin = tl.min(tl.where(valid, first_key, key_len), 0)
    end = tl.max(tl.where(valid, first_key + visible(position, C), 0), 0)
    for first in range(begin, end, C.KEYS):
        i = first + tl.arange(0, C.KEYS)
        at, inside = (batch * key_len + i) * C.HEADS + head, i < end
        k_tile = load_rows(k_cmp, at, C.KEY, C.KEY, C.KEY_P, inside)
        ds = _score_gradient(
            k_tile, q_tile, i, inside, first_key, position, row, valid, dp, by_head, all_rows,
            total_blocks, scale, C,
        )  # fmt: skip
        total = dot(tl.trans(ds).to(k_tile.dtype), k_tile, total)
    total *= scale_out * tl.load(dloss) / all_rows.to(tl.float32)
    t = tl.load(queries + row // C.GROUP, mask=valid, other=0)
    at = _query_rows(t, row, seq_len, batch, head, C)
    store_rows(dq, at, C.KEY, total, C.KEY, C.KEY_P, valid)


def selector_loss_forward(x: SelectorLossInputs) -> tuple[Tensor, ...]:
    """Return the outputs in the order of `SelectorLossInputs.empty_outputs`."""
    _, target, dp, by_head = x.empty_outputs()
    batch, groups, count, blocks = target.shape
    losses = target.new_empty(batch, groups, count)
    cu, documents = document_offsets(x.cu_seqlens)
    masses = []
    for q, k_sel, k_cmp in ((x.q, x.k_sel, None), (x.ranking, None, x.k_cmp)):
        constants, config = _tile(x, q)
        rows = count * constants.GROUP
        mass = target.new_empty(batch, groups, rows, blocks)
        tiles = cdiv(rows, constants.ROWS) * cdiv(blocks, constants.BLOCKS)
        launch(
            mass_kernel, (tiles, groups, batch), config,
            q=q.contiguous(), k_sel=None if k_sel is None else k_sel.contiguous(),
            k_cmp=None if k_cmp is None else k_cmp.contiguous(), queries=x.queries, mass=mass,
            cu=cu, seq_len=x.k_sel.shape[1], key_len=x.k_cmp.shape[1], documents=documents,
            rows=rows, total_blocks=blocks, scale=x.scale * LOG2E, C=constants,
        )  # fmt: skip
        masses.append(mass)
    constants, config = _tile(x, x.q)
    ranking = by_head.shape[-1]
    heads_p, ranking_p = next_power_of_2(constants.GROUP), next_power_of_2(ranking)
    step = min(next_power_of_2(blocks), max(1, STEP // heads_p))
    launch(
        divergence_kernel, (count, groups, batch), config._replace(warps=1),
        queries=x.queries, sel_mass=masses[0], cmp_mass=masses[1],
        losses=losses, target=target, dp=dp, by_head=by_head, cu=cu,
        documents=documents, total_blocks=blocks,
        C=constants._replace(BLOCKS=step, ROWS=0, KEYS=0), HEADS_P=heads_p,
        RANKING=ranking, RANKING_P=ranking_p,
    )  # fmt: skip
    return losses.mean(), target, dp, by_head


def selector_loss_backward(
    dloss: Tensor, x: SelectorLossInputs, dp: Tensor, by_head: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of k_cmp and q_cmp (empty if None), with the same bits in every run."""
    dk = torch.empty_like(x.k_cmp, memory_format=torch.contiguous_format)
    # Zeros, because queries that are not sampled have no gradient.
    dq = dk.new_zeros(0 if x.q_cmp is None else x.q_cmp.shape)
    constants, config = _tile(x, x.ranking)
    constants = constants._replace(KEYS=config.rows, ROWS=config.keys, BLOCKS=0, COUNT=0)
    batch, key_len, groups, _ = x.k_cmp.shape
    cu, documents = document_offsets(x.cu_seqlens)
    rows = x.queries.shape[0] * constants.GROUP
    common = {
        "k_cmp": x.k_cmp.contiguous(), "q": x.ranking.contiguous(), "queries": x.queries,
        "dp": dp, "by_head": by_head, "dloss": dloss, "cu": cu,
        "seq_len": x.k_sel.shape[1], "key_len": key_len,
        "documents": documents, "rows": rows, "total_blocks": dp.shape[-1],
        "scale": x.scale * LOG2E, "scale_out": x.scale, "C": constants,
    }  # fmt: skip
    grid = cdiv(key_len, constants.KEYS), groups, batch
    launch(keys_kernel, grid, config, dk=dk, **common)
    if x.q_cmp is not None:
        # With 64 rows sm_90's compiler would serialise the product of the transposed gradient.
        small = constants._replace(ROWS=constants.KEYS)
        grid = cdiv(rows, small.ROWS), groups, batch
        launch(queries_kernel, grid, config, dq=dq, **common | {"C": small})
    return dk, dq


def _tile(x: SelectorLossInputs, q: Tensor) -> tuple[Constants, Config]:
    """Return mass_kernel's constants for these queries, and a config."""
    constants = constants_of(q, x.k_cmp, spec=x.spec, TOP=0)
    config = choose_config("selector", constants.padded, q)
    steps = min(config.keys, max(16, next_power_of_2(x.spec.select_len)))
    # 16 blocks give many programs. In float32 products with 16 columns spill registers: 32 blocks.
    blocks = 16 if q.dtype.itemsize <= 2 else 32
    return constants._replace(ROWS=config.rows, KEYS=steps, BLOCKS=blocks), config


triton_selector_loss = register(
    "nsa::triton_selector_loss",
    SelectorLossInputs,
    selector_loss_forward,
    SelectorLossInputs.empty_outputs,
    outputs=4,
    gradient=Gradient(selector_loss_backward, inputs=2, outputs=1, saved=slice(2, 4)),
)
