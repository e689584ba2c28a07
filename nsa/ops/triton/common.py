"""What several kernels share: finding a document, masks, softmax steps, and row sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import launch, rows_contiguous, strides

LOG2E = 1.4426950408889634  # kernels use powers of two, which the hardware has

# Triton compiles a kernel anew where a number is 1 or a multiple of 16. These change from batch to
# batch and gain nothing by it, and a run would stand still in the middle for it.
COUNTS = (
    "seq_len",
    "q_len",
    "documents",
    "total_blocks",
    "split_len",
    "lse_b",
    "row_b",
    "chosen_b",
    "out_b",
)
STRIDES = (f"{name}_{axis}" for name in ("list", "counts", "offsets", "queries") for axis in "bth")
kernel = partial(triton.jit, do_not_specialize=(*COUNTS, *STRIDES))


@triton.jit
def locate(offsets, count, slot, MUL: tl.constexpr, TILE: tl.constexpr):
    """Which run of ascending `offsets` a slot is in: (run, begin, end, tile of the run).

    Run i gets the slots from offsets[i] * MUL // TILE + i on: always enough for its tiles, so a
    grid of total * MUL // TILE + count needs no table built beforehand and no wait for the device.
    """
    run = -1
    for first in range(0, count, 64):
        i = first + tl.arange(0, 64)
        begins = tl.load(offsets + i, mask=i < count, other=0)
        run += tl.sum(((i < count) & (begins * MUL // TILE + i <= slot)).to(tl.int32), 0)
    begin = tl.load(offsets + run)
    end = tl.load(offsets + run + 1)
    return run, begin, end, slot - begin * MUL // TILE - run


@triton.jit
def keys_before(cu, document, LEN: tl.constexpr, STRIDE: tl.constexpr):
    """How many compressed keys the documents before this one have."""
    total = 0
    for first in range(0, document, 64):
        i = first + tl.arange(0, 64)
        inside = i < document
        begin = tl.load(cu + i, mask=inside, other=0)
        length = tl.load(cu + i + 1, mask=inside, other=0) - begin
        total += tl.sum(visible(length - 1, LEN, STRIDE), 0)
    return total


@triton.jit
def visible(t, LEN: tl.constexpr, STRIDE: tl.constexpr):
    """How many blocks end at or before position t."""
    return tl.maximum(t + 1 - LEN + STRIDE, 0) // STRIDE


@triton.jit
def load_rows(base, at, row_stride, SIZE: tl.constexpr, PADDED: tl.constexpr, mask):
    """[rows, PADDED] from rows at `base + at * row_stride`; 0 outside of SIZE and `mask` (or None).

    No mask where none is needed: masks cost registers.
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
    """Write x [rows, PADDED] where `load_rows` would read it, in the type that is there."""
    d = tl.arange(0, PADDED)
    tl.store(
        base + (at * row_stride)[:, None] + d[None, :],
        x.to(base.dtype.element_ty),
        mask=mask[:, None] & (d < SIZE)[None, :],
    )


@triton.jit
def span(PHASE: tl.constexpr, low, a, b, high):
    """Where the keys before a (masked), from a to b (not), and from b on (masked) begin and end."""
    if PHASE == 0:
        return low, tl.minimum(a, high)
    elif PHASE == 1:
        return a, b
    else:
        return b, high


@triton.jit
def softmax_step(s, v, m, total, acc, scale, PRECISION: tl.constexpr):
    """Take scores (-inf where unseen) and their values into a running softmax.

    Scores come as the product left them: `scale`, which is above 0 and leads to base 2, and the
    maximum are one multiply-add on the way to the exponential.
    """
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has seen nothing yet stays at -inf, and -inf - -inf must not become NaN.
    top = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale - (top * scale)[:, None])
    # Exactly 1 where the maximum stands. As one multiply-add this would be off by the rounding of
    # top * scale, by the same at every tile.
    old = tl.exp2((m - top) * scale)
    total = total * old + tl.sum(p, 1)
    acc = acc * old[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return m_new, total, acc


@triton.jit
def finish_softmax(m, total, acc, scale):
    """(o, natural-log lse); a row that saw nothing gives 0 and -inf."""
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    lse = tl.where(blind, float("-inf"), (m * scale + tl.log2(total)) * 0.6931471805599453)
    return acc / total[:, None], lse


@triton.jit
def probabilities(s, lse):
    """Softmax from base-2 scores and the natural-log lse (broadcastable); 0 where lse is -inf."""
    return tl.exp2(s - binary_lse(lse))


@triton.jit
def binary_lse(lse):
    """A natural-log lse in base 2; +inf, which leaves no probability, where nothing was seen."""
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@kernel
def _backward_rows_kernel(
    do, o, lse, dlse, delta, lse2,
    do_b, do_t, do_h, o_b, o_t, o_h,
    seq_len, heads,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < seq_len * heads
    t, h = row // heads, row % heads
    d = tl.arange(0, PADDED)
    inside = valid[:, None] & (d < SIZE)[None, :]
    x = tl.load(do + batch * do_b + (t * do_t + h * do_h)[:, None] + d, mask=inside, other=0.0)
    y = tl.load(o + batch * o_b + (t * o_t + h * o_h)[:, None] + d, mask=inside, other=0.0)
    total = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    at = batch * seq_len * heads + row
    if dlse is not None:
        total -= tl.load(dlse + at, mask=valid, other=0.0)
    tl.store(delta + at, total, mask=valid)
    tl.store(lse2 + at, binary_lse(tl.load(lse + at, mask=valid, other=0.0)), mask=valid)


def backward_rows(
    do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What backward kernels need of each row, made once: Σ do·o less dlse, and lse in base 2.

    Both float32 [B, T, H], without float32 copies of do and o.
    """
    do, o = rows_contiguous(do), rows_contiguous(o)
    batch, seq_len, heads, size = do.shape
    delta, lse2 = (
        torch.empty(batch, seq_len, heads, dtype=torch.float32, device=do.device) for _ in range(2)
    )
    padded = triton.next_power_of_2(size)
    rows = max(1, 4096 // padded)
    launch(
        _backward_rows_kernel,
        (triton.cdiv(seq_len * heads, rows), 1, batch),
        {"do": do, "o": o, "lse": lse.contiguous()}
        | {"dlse": None if dlse is None else dlse.contiguous(), "delta": delta, "lse2": lse2}
        | strides(do=do, o=o)
        | {"seq_len": seq_len, "heads": heads},
        {"SIZE": size, "PADDED": padded, "ROWS": rows},
        Config(rows, 0, 4, 1),
    )
    return delta, lse2


def shape_constants(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> dict[str, Any]:
    """What every attention kernel is compiled for."""
    return {
        "GROUP": q.shape[2] // k.shape[2],
        "KEY": q.shape[3],
        "VALUE": v.shape[3],
        "KEY_P": padded_size(q.shape[3]),
        "VALUE_P": padded_size(v.shape[3]),
        "PACKED": cu_seqlens is not None,
        "PRECISION": precision(q.dtype),
    }


def backward_arguments(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse2: Tensor,
    delta: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> dict[str, Any]:
    """What every backward kernel reads; lse2 and delta are contiguous, and share their strides."""
    cu, documents = offsets_of(cu_seqlens)
    return {
        **{"q": q, "k": k, "v": v, "do": do, "lse2": lse2, "delta": delta, "cu": cu},
        **strides(q=q, k=k, v=v, do=do, row=lse2),
        **{"seq_len": q.shape[1], "documents": documents},
        **{"scale": scale * LOG2E, "scale_out": scale},
    }


def padded_size(size: int) -> int:
    """A head size as a matrix product takes it: a power of two, 16 or more."""
    return max(16, triton.next_power_of_2(size))


def precision(dtype: torch.dtype) -> str:
    """float32 runs on tensor cores in three passes, which loses next to nothing."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def offsets_of(cu_seqlens: Tensor | None) -> tuple[Tensor | None, int]:
    """Document offsets as the kernels take them, and the number of documents (1 where unpacked)."""
    if cu_seqlens is None:
        return None, 1
    return cu_seqlens.to(torch.int32).contiguous(), len(cu_seqlens) - 1


def slots(total: int, tile: int, cu_seqlens: Tensor | None) -> int:
    """How many programs `locate` may need for `total` rows in tiles of `tile`."""
    if cu_seqlens is None:
        return triton.cdiv(total, tile)
    return total // tile + len(cu_seqlens) - 1
