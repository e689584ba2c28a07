"""Helpers that kernels share: document lookup, row layout, masked loads, softmax and gradients.

A group is the query heads that share a key/value head. The rows of a key/value head are its queries
times its group: row r is query r // GROUP, head r % GROUP. So a tile of rows is full for every size
of the group, and the group shares each tile of keys. Tensors are contiguous [B, T, heads, size];
launchers copy those that are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import cdiv, launch, next_power_of_2, padded_size
from nsa.spec import NSASpec

try:
    from triton.language.target_info import is_hip
except ImportError:  # Triton 3.4, which unsupported_reason refuses on AMD's chips

    @tl.constexpr_function
    def is_hip() -> bool:
        return False


LOG2E = 1.4426950408889634  # kernels compute exp2, a hardware instruction

# Triton specialises integers that are 1 or a multiple of 16. These change from batch to batch, so
# that specialising them would recompile during a run.
VARYING = (
    *("seq_len", "q_len", "key_len", "documents", "rows"),
    *("split_len", "list_len", "total_blocks", "part_rows", "words"),
    *("cmp_tiles", "cmp_programs"),
)
kernel = partial(triton.jit, do_not_specialize=VARYING)


class Constants(NamedTuple):
    """The compile-time constants of attention kernels, as one argument `C`.

    A kernel is compiled again for each distinct value, so launchers keep the defaults of fields
    that it does not read. Shapes need a constexpr of their own: `ROWS: tl.constexpr = C.ROWS`.
    """

    HEADS: int  # key/value heads
    GROUP: int  # query heads per key/value head
    KEY: int  # size of a query or key
    VALUE: int
    KEY_P: int  # KEY, padded by `padded_size`
    VALUE_P: int
    ROWS: int = 0  # of a tile: queries times heads of a group
    KEYS: int = 0  # of a tile, or of one step of a loop
    QUERIES: int = 0  # of a tile
    LEN: int = 1  # positions of a compressed block
    STRIDE: int = 1
    WINDOW: int = 0  # 0: none
    SELECT: int = 0  # positions of a selection block
    COUNT: int = 0  # `NSASpec.max_overlaps`
    TOP: int = 0  # `NSASpec.select_top`
    INIT: int = 0  # `NSASpec.init_blocks`
    LOCAL: int = 0  # `NSASpec.local_blocks`
    BLOCKS: int = 0  # selection blocks that a tile ranks
    CHUNK: int = 0  # queries of a block's list that one program sums over, at most

    @property
    def padded(self) -> tuple[int, int]:
        """The padded head sizes, which `choose_config` takes."""
        return self.KEY_P, self.VALUE_P


@triton.jit
def locate(offsets, count, grid_tile, MUL: tl.constexpr, TILE: tl.constexpr):
    """Return which of `count` segments a grid tile covers: (segment, begin, end, tile in it).

    Segment i holds the entries from offsets[i] to offsets[i + 1]. An entry has MUL rows, and a tile
    covers TILE rows. The tiles of segment i begin at grid tile offsets[i] * MUL // TILE + i, which
    leaves enough tiles to every segment before the next begins. So the host launches a grid of
    total * MUL // TILE + count tiles and need not read `offsets`.
    """
    segment = -1
    for first in range(0, count, 64):
        i = first + tl.arange(0, 64)
        begins = tl.load(offsets + i, mask=i < count, other=0)
        segment += tl.sum(((i < count) & (begins * MUL // TILE + i <= grid_tile)).to(tl.int32), 0)
    begin = tl.load(offsets + segment)
    end = tl.load(offsets + segment + 1)
    return segment, begin, end, grid_tile - begin * MUL // TILE - segment


@triton.jit
def document_tile(cu, documents, grid_tile, seq_len, MUL: tl.constexpr, TILE: tl.constexpr):
    """Return a grid tile's (document, tile in the document, document's first position, length)."""
    if cu is None:
        return 0, grid_tile, 0, seq_len
    else:
        document, start, end, tile = locate(cu, documents, grid_tile, MUL, TILE)
        return document, tile, start, end - start


@triton.jit
def keys_before(cu, document, C: tl.constexpr):
    """Count the compressed keys of the documents before this one."""
    total = 0
    if cu is not None:
        for first in range(0, document, 64):
            i = first + tl.arange(0, 64)
            inside = i < document
            begin = tl.load(cu + i, mask=inside, other=0)
            length = tl.load(cu + i + 1, mask=inside, other=0) - begin
            total += tl.sum(visible(length - 1, C), 0)
    return total


@triton.jit
def visible(t, C: tl.constexpr):
    """Count the compressed blocks, of C.LEN and C.STRIDE, that end at or before position t."""
    return tl.maximum(t + 1 - C.LEN + C.STRIDE, 0) // C.STRIDE


@triton.jit
def group_rows(first_row, C: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the query and the offset in memory of each row [ROWS], relative to the first query.

    ALIGNED: the tile begins with a query's first head, so `first_row` changes nothing.
    """
    i = tl.arange(0, C.ROWS)
    if ALIGNED:
        local, h = i // C.GROUP, i % C.GROUP
    else:
        row = first_row + i
        local, h = row // C.GROUP - first_row // C.GROUP, row % C.GROUP
    return local, local * (C.HEADS * C.GROUP) + h


@triton.jit
def load_rows(base, at, row_stride, SIZE: tl.constexpr, PADDED: tl.constexpr, mask):
    """Load [rows, PADDED] from `base + at * row_stride`; 0 past SIZE and where `mask` is false.

    A load that needs no mask has none (`mask` is None), because masks cost registers.
    """
    d = tl.arange(0, PADDED)
    rows = base + (at * row_stride)[:, None] + d[None, :]
    if mask is None:
        if SIZE == PADDED:
            return tl.load(rows)
        else:
            return tl.load(rows, mask=(d < SIZE)[None, :], other=0.0)
    elif SIZE == PADDED:
        return tl.load(rows, mask=mask[:, None], other=0.0)
    else:
        return tl.load(rows, mask=mask[:, None] & (d < SIZE)[None, :], other=0.0)


@triton.jit
def store_rows(base, at, row_stride, x, SIZE: tl.constexpr, PADDED: tl.constexpr, mask):
    """Store x [rows, PADDED] where `load_rows` would read it, in the pointer's dtype."""
    d = tl.arange(0, PADDED)
    tl.store(
        base + (at * row_stride)[:, None] + d[None, :],
        x.to(base.dtype.element_ty),
        mask=mask[:, None] & (d < SIZE)[None, :],
    )


@triton.jit
def load_pair(a, b, first, at, HEADS: tl.constexpr, C: tl.constexpr, mask):
    """Load rows of keys and values, or of queries and outputs: [rows, KEY_P] and [rows, VALUE_P].

    The rows in memory are `first + at * HEADS`, because a position has HEADS rows.
    """
    return (
        load_rows(a + first * C.KEY, at, HEADS * C.KEY, C.KEY, C.KEY_P, mask),
        load_rows(b + first * C.VALUE, at, HEADS * C.VALUE, C.VALUE, C.VALUE_P, mask),
    )


@triton.jit
def zero_pair(C: tl.constexpr):
    """Zeros for the gradients of keys and values: [KEYS, KEY_P] and [KEYS, VALUE_P]."""
    KEYS: tl.constexpr = C.KEYS
    KEY_P: tl.constexpr = C.KEY_P
    VALUE_P: tl.constexpr = C.VALUE_P
    return tl.zeros([KEYS, KEY_P], tl.float32), tl.zeros([KEYS, VALUE_P], tl.float32)


@triton.jit
def store_pair(a, b, first, at, x, y, C: tl.constexpr, mask):
    """Store x and y where `load_pair` would read them with C.HEADS heads."""
    store_rows(a + first * C.KEY, at, C.HEADS * C.KEY, x, C.KEY, C.KEY_P, mask)
    store_rows(b + first * C.VALUE, at, C.HEADS * C.VALUE, y, C.VALUE, C.VALUE_P, mask)


@triton.jit
def gated_rows(o, at, gate, mask, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Return a branch's output times its gate, float32 [rows, PADDED]; `gate`: pointers [rows]."""
    g = tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    return g[:, None] * load_rows(o, at, SIZE, SIZE, PADDED, mask).to(tl.float32)


@triton.jit
def dot(a, b, acc=None):
    """Return a·b (+ acc). float32 takes three TF32 passes, nearly as precise as float32 products.

    AMD's compiler has no such passes, but AMD's matrix cores multiply float32.
    """
    if a.dtype == tl.float32:
        PRECISION: tl.constexpr = "ieee" if is_hip() else "tf32x3"
        return tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def span(PHASE: tl.constexpr, low, all_from, all_to, high):
    """Return where phase 0, 1 or 2 of a loop from `low` to `high` begins and ends.

    Phase 1 goes from `all_from` to `all_to`, where all rows see all keys: it needs no masks.
    """
    if PHASE == 0:
        return low, tl.minimum(all_from, high)
    elif PHASE == 1:
        return all_from, all_to
    else:
        return all_to, high


@triton.jit
def start_softmax(ROWS: tl.constexpr, VALUE_P: tl.constexpr):
    """Return a running softmax's maximum and sum [ROWS], and weighted values [ROWS, VALUE_P].

    The maximum, in base 2, starts at the lowest finite number, because -inf - -inf would be NaN.
    """
    m = tl.full([ROWS], -3.4028234e38, tl.float32)
    return m, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, VALUE_P], tl.float32)


@triton.jit
def softmax_step(s, v, m, total, acc, scale, sees=None):
    """Add scores [ROWS, KEYS] (-inf where hidden) and values to a running softmax.

    Scores are not scaled yet: `scale` (above 0, log2(e) included) and the maximum are applied in
    one multiply-add before exp2. With `sees` [ROWS], rows where it is false see none of the keys.
    """
    highest = tl.max(s, 1) * scale
    if sees is not None:
        highest = tl.where(sees, highest, float("-inf"))
    m_new = tl.maximum(m, highest)
    subtracted = m_new
    if sees is not None:
        subtracted = tl.where(sees, m_new, float("inf"))  # p = 0
    p = tl.exp2(s * scale - subtracted[:, None])
    old = tl.exp2(m - m_new)  # exactly 1 where the maximum stays the same
    total = total * old + tl.sum(p, 1)
    acc = acc * old[:, None]
    acc = dot(p.to(v.dtype), v, acc)
    return m_new, total, acc


@triton.jit
def finish_softmax(m, total, acc):
    """Return (o, natural-log lse); a row that saw nothing gives 0 and -inf."""
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    lse = tl.where(blind, float("-inf"), (m + tl.log2(total)) * 0.6931471805599453)  # ln 2
    return acc / total[:, None], lse


@triton.jit
def binary_lse(lse):
    """Return a natural-log lse in base 2; +inf where nothing was seen, so that p = 0 there."""
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)  # log2(e)


@triton.jit
def add_query_gradient(s, k, v, do, lse2, delta, dq, scale):
    """Add the gradient of scores s [ROWS, KEYS] of one tile of keys to dq [ROWS, KEY_P]."""
    p = tl.exp2(s * scale - lse2[:, None])
    dp = dot(do, tl.trans(v))
    ds = p * (dp - delta[:, None])
    return dot(ds.to(k.dtype), k, dq)


@triton.jit
def add_key_gradients(s, v, q, do, lse2, delta, dk, dv, scale):
    """Add the gradients of scores s [KEYS, ROWS] of one tile of rows to dk and dv [KEYS, ..]."""
    p = tl.exp2(s * scale - lse2[None, :])
    dv = dot(p.to(do.dtype), do, dv)
    dp = dot(v, tl.trans(do))
    ds = p * (dp - delta[None, :])
    dk = dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def store_query_gradient(dq, at, x, scale_out, valid, C: tl.constexpr, ADD: tl.constexpr):
    """Store x [ROWS, KEY_P] times `scale_out` in rows `at` of dq; with ADD, add it to them."""
    x *= scale_out
    if ADD:
        x += load_rows(dq, at, C.KEY, C.KEY, C.KEY_P, valid)
    store_rows(dq, at, C.KEY, x, C.KEY, C.KEY_P, valid)


@kernel
def _backward_rows_kernel(
    do, o, lse, dlse, delta, lse2, rows,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store delta and lse2, which `backward_rows` returns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    do_rows = load_rows(do, row, SIZE, SIZE, PADDED, valid).to(tl.float32)
    total = tl.sum(do_rows * load_rows(o, row, SIZE, SIZE, PADDED, valid).to(tl.float32), 1)
    if dlse is not None:
        total -= tl.load(dlse + row, mask=valid, other=0.0)
    tl.store(delta + row, total, mask=valid)
    tl.store(lse2 + row, binary_lse(tl.load(lse + row, mask=valid, other=0.0)), mask=valid)


def backward_rows(
    do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what backward kernels read of each row: delta = Σ do·o - dlse, and lse in base 2.

    Both are float32 [B, T, Hq]. One kernel computes them: PyTorch would copy do and o to float32.
    """
    do, o = do.contiguous(), o.contiguous()
    delta, lse2 = (torch.empty_like(lse, memory_format=torch.contiguous_format) for _ in range(2))
    size, rows = do.shape[-1], lse.numel()
    padded = next_power_of_2(size)
    step = max(1, 4096 // padded)
    launch(
        _backward_rows_kernel, (cdiv(rows, step),), Config(step, 0, 4, 1),
        do=do, o=o, lse=lse.contiguous(), dlse=None if dlse is None else dlse.contiguous(),
        delta=delta, lse2=lse2, rows=rows, SIZE=size, PADDED=padded, ROWS=step,
    )  # fmt: skip
    return delta, lse2


def constants_of(
    q: Tensor, k: Tensor, v: Tensor | None = None, spec: NSASpec | None = None, **fields: int
) -> Constants:
    """Return the constants of tensors [B, T or N, heads, size] and of `spec`, and other fields."""
    value = 0 if v is None else v.shape[3]
    return _constants(q.shape[2], k.shape[2], q.shape[3], value, spec, **fields)


@lru_cache(maxsize=1024)
def _constants(
    heads: int, kv_heads: int, key: int, value: int, spec: NSASpec | None, **fields: int
) -> Constants:
    padded = padded_size(key), padded_size(value) if value else 0
    constants = Constants(kv_heads, heads // kv_heads, key, value, *padded)
    if spec is not None:
        constants = constants._replace(
            LEN=spec.block_len, STRIDE=spec.block_stride, SELECT=spec.select_len,
            COUNT=spec.max_overlaps, TOP=spec.select_top,
            INIT=spec.init_blocks, LOCAL=spec.local_blocks,
        )  # fmt: skip
    return constants._replace(**fields)


def document_offsets(cu_seqlens: Tensor | None) -> tuple[Tensor | None, int]:
    """Return the arguments `cu` (int32 offsets or None) and `documents` of `document_tile`."""
    if cu_seqlens is None:
        return None, 1
    return cu_seqlens.to(torch.int32).contiguous(), cu_seqlens.shape[0] - 1


def max_tiles(total: int, tile: int, cu_seqlens: Tensor | None) -> int:
    """Return how many grid tiles of `tile` rows `document_tile` needs for `total` rows."""
    if cu_seqlens is None:
        return cdiv(total, tile)
    return total // tile + cu_seqlens.shape[0] - 1


PARTS = Config(32, 32, 4, 1)  # rows and columns that a program of `sum_parts` adds at a time


@kernel
def sum_parts_kernel(
    parts, first, second, third, rows,
    FIRST: tl.constexpr, SECOND: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Sum the rows of parts in ascending order; split the sum into one or three tensors."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([COLS], tl.float32)
    for begin in range(0, rows, ROWS):
        row = (begin + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (col < WIDTH)[None, :]
        total += tl.sum(tl.load(parts + row[:, None] * WIDTH + col[None, :], mask, other=0.0), 0)
    total = total.to(first.dtype.element_ty)
    tl.store(first + col, total, mask=col < FIRST)
    if second is not None:
        at = col - FIRST
        tl.store(second + at, total, mask=(at >= 0) & (at < SECOND))
        at -= SECOND
        tl.store(third + at, total, mask=(at >= 0) & (col < WIDTH))


def sum_parts(parts: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of float32 rows `parts` [rows, WIDTH], split into one or three tensors."""
    sums = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]
    second, third = sums[1:] if len(sums) == 3 else (None, None)
    rows, width = parts.shape
    launch(
        sum_parts_kernel, (cdiv(width, PARTS.keys),), PARTS,
        parts=parts, first=sums[0], second=second, third=third, rows=rows,
        FIRST=sums[0].numel(), SECOND=0 if second is None else second.numel(), WIDTH=width,
        ROWS=PARTS.rows, COLS=PARTS.keys,
    )  # fmt: skip
    return sums
