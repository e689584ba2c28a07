"""Lists for the selected branch: the blocks of a tile of queries, the queries of a block.

    block_index [.., T, n]  ->  union:   per tile, blocks ascending, each with its queries as bits
                            ->  members: per block and 32 queries, a word with a bit per query
                            ->  lists:   per block, queries ascending (compressed sparse rows)

A list holds a query once, even if the query names the block twice. Blocks that begin after a query
are in none of its lists. No atomics: lists are the same from run to run, and nothing waits for the
host. Packed documents number their blocks from start // SELECT + document on, as `locate` does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.common import document_offsets, document_tile, kernel, max_tiles
from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import cdiv, launch, next_power_of_2
from nsa.spec import NSASpec

WORD = 32  # queries of one word of `members`
STEP = 1024  # words or queries that a step of a block's list reads


@triton.jit
def _members(
    index, t, row, valid, first, stride,
    TOP: tl.constexpr, SELECT: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Blocks from `first` on, [WORDS, 32], and the queries that selected each as bits.

    Builds one word per query and 32 blocks, then transposes. Comparing each selected block with
    each block would take 32 times as many comparisons.
    """
    word = first // 32 + tl.arange(0, WORDS)
    words = tl.zeros([row.shape[0], WORDS], tl.int32)
    for n in range(TOP):
        b = tl.load(index + row * stride + n, mask=valid, other=-1)
        b = tl.where(b * SELECT <= t, b, -1)
        words |= tl.where((b >> 5)[:, None] == word[None, :], (1 << (b & 31))[:, None], 0)
    i = tl.arange(0, 32)
    member = (words[:, :, None] >> i[None, None, :]) & 1  # [QUERIES, WORDS, 32]
    return word[:, None] * 32 + i[None, :], tl.sum(member << row[:, None, None], 0)


@kernel
def union_kernel(
    index, blocks, members, counts, cu, seq_len, documents, list_len,
    TOP: tl.constexpr, SELECT: tl.constexpr,
    QUERIES: tl.constexpr, QUERIES_P: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The union of the blocks of a tile's queries, ascending, and each one's queries as bits."""
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
        for first in range(0, last + 1, WORDS * 32):
            j, bits = _members(index, t, row, valid, first, heads * TOP, TOP, SELECT, WORDS)
            j, bits = tl.reshape(j, [WORDS * 32]), tl.reshape(bits, [WORDS * 32])
            used = (bits != 0).to(tl.int32)
            at = list_id * list_len + count + tl.cumsum(used, 0) - 1
            tl.store(blocks + at, j, mask=bits != 0)
            tl.store(members + at, bits, mask=bits != 0)
            count += tl.sum(used, 0)
    tl.store(counts + list_id, count)


@kernel
def members_kernel(
    index, members, cu, seq_len, documents, total_blocks,
    TOP: tl.constexpr, SELECT: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """members [B, Hkv, blocks, words]: one word of each block that begins before its queries end.

    Words of earlier queries, and of other documents, are neither written nor read.
    """
    grid_tile = tl.program_id(0)
    heads = tl.num_programs(1)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    document, tile, start, length = document_tile(cu, documents, grid_tile, seq_len, 1, WORD)
    row = tl.arange(0, WORD)
    t = tile * WORD + row
    index += ((batch * seq_len + start + tile * WORD) * heads + head) * TOP
    members += ((batch * heads + head) * total_blocks + start // SELECT + document) * (
        tl.num_programs(0)
    ) + grid_tile
    if tile * WORD < length:
        last = (tl.minimum(tile * WORD + WORD, length) - 1) // SELECT
        for first in range(0, last + 1, WORDS * 32):
            j, bits = _members(index, t, row, t < length, first, heads * TOP, TOP, SELECT, WORDS)
            tl.store(members + j.to(tl.int64) * tl.num_programs(0), bits, mask=j <= last)


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
    """Write one block's list after those of earlier blocks, and its offset."""
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
    """Unite the blocks of each tile of `queries`: (blocks, members, counts).

    blocks and members [B, tiles, Hkv, list_len]; counts [B, tiles, Hkv] of them are written.
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
        WORDS=_words(spec.select_blocks_len(seq_len), queries_p),
    )  # fmt: skip
    return blocks, members, counts


def queries_by_block(
    block_index: Tensor, cu_seqlens: Tensor | None, spec: NSASpec
) -> tuple[Tensor, Tensor]:
    """The queries of each block, ascending: offsets [B, Hkv, blocks + 1] into [B, Hkv, T * n].

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
        WORDS=_words(spec.select_blocks_len(seq_len), WORD),
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


def _words(blocks: int, queries: int) -> int:
    """Words of 32 blocks per step: no more than exist, and at most 4,096 bits per tile."""
    return min(next_power_of_2(cdiv(blocks, 32)), max(1, 4096 // (32 * queries)))
