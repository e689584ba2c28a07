"""Kernels, launchers and ops of SwiGLU, of RMSNorm with the residual add, and of cross-entropy.

The backward kernel of RMSNorm leaves the weight's gradient in one float32 row per program;
`sum_parts` adds these rows in ascending order, so results are the same in every run. Cross-entropy
runs a program per row in two passes: the first keeps a running maximum and sum, the second
overwrites the logits with their gradient. Few rows are in progress at a time, and so the second
pass reads most of them from L2.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.constants import IGNORE_INDEX
from nsa.ops.custom_op import Gradient, register
from nsa.ops.triton.common import kernel, load_rows, store_rows, sum_parts
from nsa.ops.triton.configs import Config, warp_size
from nsa.ops.triton.launch import cdiv, launch, next_power_of_2

# `keys` are columns. 16 elements per thread: two loads of 16 bytes in bf16.
SWIGLU_TILE = Config(rows=4, keys=512, warps=4, stages=1)


@triton.jit
def _swiglu_tile(rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return this program's row numbers [ROWS], columns [COLS] and mask [ROWS, COLS]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    return row, col, (row < rows)[:, None] & (col < WIDTH)[None, :]


@kernel
def swiglu_kernel(
    gate_up, out, rows,
    WIDTH: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Store silu(gate) * up; gate and up are columns of gate_up."""
    row, col, mask = _swiglu_tile(rows, WIDTH, ROWS, COLS)
    at = gate_up + (row * PACKED)[:, None] + col[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)  # [ROWS, COLS]
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    result = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    tl.store(out + (row * WIDTH)[:, None] + col[None, :], result, mask=mask)


@kernel
def swiglu_backward_kernel(
    d_out, gate_up, d_gate_up, rows,
    WIDTH: tl.constexpr, PACKED: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of gate and up side by side, and zeros in the padding."""
    row, col, mask = _swiglu_tile(rows, WIDTH, ROWS, COLS)
    inside = (row * PACKED)[:, None] + col[None, :]
    gate = tl.load(gate_up + inside, mask=mask, other=0.0).to(tl.float32)  # [ROWS, COLS]
    up = tl.load(gate_up + inside + WIDTH, mask=mask, other=0.0).to(tl.float32)
    do = tl.load(d_out + (row * WIDTH)[:, None] + col[None, :], mask=mask, other=0.0)
    do = do.to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = do * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_up = do * gate * sigmoid
    dtype = d_gate_up.dtype.element_ty
    tl.store(d_gate_up + inside, d_gate.to(dtype), mask=mask)
    tl.store(d_gate_up + inside + WIDTH, d_up.to(dtype), mask=mask)
    if PACKED > 2 * WIDTH:  # the first column of programs writes the padding
        pad = 2 * WIDTH + tl.arange(0, PAD)
        first = (row < rows) & (tl.program_id(1) == 0)
        tl.store(
            d_gate_up + (row * PACKED)[:, None] + pad[None, :],
            tl.zeros([ROWS, PAD], dtype),
            mask=first[:, None] & (pad < PACKED)[None, :],
        )


class SwiGLUInputs(NamedTuple):
    gate_up: Tensor  # [.., gate | up | padding]
    width: int  # columns of gate, and of up


def swiglu_forward(x: SwiGLUInputs) -> Tensor:
    """Return silu(gate) · up, [.., width]."""
    out = _swiglu_output(x)
    packed, rows, grid = _swiglu_sizes(x)
    launch(
        swiglu_kernel, grid, SWIGLU_TILE,
        gate_up=x.gate_up.contiguous(), out=out, rows=rows,
        WIDTH=x.width, PACKED=packed, ROWS=SWIGLU_TILE.rows, COLS=SWIGLU_TILE.keys,
    )  # fmt: skip
    return out


def swiglu_backward(d_out: Tensor, x: SwiGLUInputs) -> Tensor:
    """Return the gradient of gate_up, with 0 in the padding."""
    d_gate_up = torch.empty_like(x.gate_up, memory_format=torch.contiguous_format)
    packed, rows, grid = _swiglu_sizes(x)
    launch(
        swiglu_backward_kernel, grid, SWIGLU_TILE,
        d_out=d_out.contiguous(), gate_up=x.gate_up.contiguous(), d_gate_up=d_gate_up, rows=rows,
        WIDTH=x.width, PACKED=packed, PAD=next_power_of_2(max(1, packed - 2 * x.width)),
        ROWS=SWIGLU_TILE.rows, COLS=SWIGLU_TILE.keys,
    )  # fmt: skip
    return d_gate_up


def _swiglu_sizes(x: SwiGLUInputs) -> tuple[int, int, tuple[int, int]]:
    """Return columns and rows of gate_up, and the grid of programs."""
    packed = x.gate_up.shape[-1]
    rows = x.gate_up.numel() // packed
    return packed, rows, (cdiv(rows, SWIGLU_TILE.rows), cdiv(x.width, SWIGLU_TILE.keys))


def _swiglu_output(x: SwiGLUInputs) -> Tensor:
    return x.gate_up.new_empty(*x.gate_up.shape[:-1], x.width)


triton_swiglu = register(
    "nsa::triton_swiglu",
    SwiGLUInputs,
    swiglu_forward,
    fake=_swiglu_output,
    gradient=Gradient(swiglu_backward, inputs=1, outputs=1, saved=slice(0)),
)


ELEMENTS = 2048  # of RMSNorm's tile of rows: 16 per thread of four warps
ROWS_PER_PART = 32  # rows that one program of the backward kernel sums over


@triton.jit
def _load(base, at, mask, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load rows [ROWS, PADDED] in float32; the weight has one row."""
    return load_rows(base, at, WIDTH, WIDTH, PADDED, mask).to(tl.float32)


@triton.jit
def _inverse_rms(h, valid, eps, WIDTH: tl.constexpr):
    """Return 1 / RMS of each row, [ROWS, 1]; 0 for rows past the end, even if eps is 0."""
    inverse = tl.rsqrt(tl.sum(h * h, 1) / WIDTH + eps)
    return tl.where(valid, inverse, 0.0)[:, None]


@kernel
def add_rms_norm_kernel(
    x, delta, weight, total, normed, rows, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store total = x + delta, or x without a delta, and total's norm times weight."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    h = _load(x, row, valid, WIDTH, PADDED)  # [ROWS, PADDED]
    if delta is not None:
        h += _load(delta, row, valid, WIDTH, PADDED)
        h = h.to(total.dtype.element_ty).to(tl.float32)  # the norm of what is stored
    store_rows(total, row, WIDTH, h, WIDTH, PADDED, valid)
    w = _load(weight, tl.arange(0, 1), None, WIDTH, PADDED)  # [1, PADDED]
    y = h * _inverse_rms(h, valid, eps, WIDTH) * w
    store_rows(normed, row, WIDTH, y, WIDTH, PADDED, valid)


@kernel
def rms_norm_backward_kernel(
    d_normed, d_total, total, weight, dx, parts, rows, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, PER_PART: tl.constexpr,
):  # fmt: skip
    """Store dx = (w*dy - unit * mean(w*dy*unit)) / rms + d_total, and a row of dw per program."""
    w = _load(weight, tl.arange(0, 1), None, WIDTH, PADDED)  # [1, PADDED]
    dw = tl.zeros([ROWS, PADDED], tl.float32)
    for first in range(0, PER_PART, ROWS):
        row = tl.program_id(0).to(tl.int64) * PER_PART + first + tl.arange(0, ROWS)
        valid = row < rows
        h = _load(total, row, valid, WIDTH, PADDED)  # [ROWS, PADDED]
        inverse = _inverse_rms(h, valid, eps, WIDTH)
        unit = h * inverse
        dy = _load(d_normed, row, valid, WIDTH, PADDED)
        dw += dy * unit
        dy *= w
        dh = (dy - unit * (tl.sum(dy * unit, 1) / WIDTH)[:, None]) * inverse
        if d_total is not None:
            dh += _load(d_total, row, valid, WIDTH, PADDED)
        store_rows(dx, row, WIDTH, dh, WIDTH, PADDED, valid)
    d = tl.arange(0, PADDED)
    tl.store(parts + tl.program_id(0) * WIDTH + d, tl.sum(dw, 0), mask=d < WIDTH)


class AddRMSNormInputs(NamedTuple):
    x: Tensor  # [.., width]
    delta: Tensor | None  # [.., width]
    weight: Tensor  # [width]
    eps: float


def add_rms_norm_forward(x: AddRMSNormInputs) -> tuple[Tensor, Tensor]:
    """Return (total = x + delta, total's norm times weight); without a delta, total is a copy of x.

    A custom op cannot return its input. Callers read total and not x, so x has one gradient:
    another kernel would have to add two.
    """
    total, normed = (torch.empty_like(x.x, memory_format=torch.contiguous_format) for _ in range(2))
    rows, width = normed.numel() // normed.shape[-1], normed.shape[-1]
    padded, tile_rows, config = _norm_tile(width)
    launch(
        add_rms_norm_kernel, (cdiv(rows, tile_rows),), config,
        x=x.x.contiguous(), delta=None if x.delta is None else x.delta.contiguous(),
        weight=x.weight.contiguous(), total=total, normed=normed,
        rows=rows, eps=x.eps, WIDTH=width, PADDED=padded, ROWS=tile_rows,
    )  # fmt: skip
    return total, normed


@lru_cache(maxsize=64)
def _norm_tile(width: int) -> tuple[int, int, Config]:
    """Return the padded width, the rows of a tile, and a config."""
    padded = next_power_of_2(width)
    tile_rows = min(max(1, ELEMENTS // padded), ROWS_PER_PART)
    warps = min(16, max(4, tile_rows * padded // 512))
    return padded, tile_rows, Config(tile_rows, 0, warps, 1)


def add_rms_norm_backward(
    d_total: Tensor | None, d_normed: Tensor | None, x: AddRMSNormInputs, total: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradient of x, which is also delta's, and the gradient of weight."""
    if d_normed is None:
        d_normed = torch.zeros_like(total)
    rows, width = total.numel() // total.shape[-1], total.shape[-1]
    padded, tile_rows, config = _norm_tile(width)
    count = cdiv(rows, ROWS_PER_PART)
    parts = total.new_empty(count, width, dtype=torch.float32)
    dx = torch.empty_like(total, memory_format=torch.contiguous_format)
    launch(
        rms_norm_backward_kernel, (count,), config,
        d_normed=d_normed.contiguous(), d_total=None if d_total is None else d_total.contiguous(),
        total=total.contiguous(), weight=x.weight.contiguous(), dx=dx, parts=parts,
        rows=rows, eps=x.eps, WIDTH=width, PADDED=padded, ROWS=tile_rows, PER_PART=ROWS_PER_PART,
    )  # fmt: skip
    return dx, *sum_parts(parts, [x.weight])


triton_add_rms_norm = register(
    "nsa::triton_add_rms_norm",
    AddRMSNormInputs,
    add_rms_norm_forward,
    fake=lambda x: (x.x.new_empty(x.x.shape), x.x.new_empty(x.x.shape)),
    outputs=2,
    gradient=Gradient(
        add_rms_norm_backward,
        inputs=3,
        outputs=2,
        saved=slice(1),
        result_of=(0, 0, 1),  # x and delta share a gradient
        zeros=False,
        shape_only=2,
    ),
)


COLUMNS = 8192  # logits of a row per step: 16 bytes of bf16 per thread of 32 warps


@kernel
def cross_entropy_kernel(
    logits, labels, losses, vocabulary,
    GRADIENT: tl.constexpr, IGNORE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store -log p[label] of one row, and with GRADIENT p - 1 at the label and p elsewhere."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    label = tl.load(labels + row)
    i = tl.arange(0, COLUMNS)
    if label == IGNORE:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for first in range(0, vocabulary, COLUMNS):
                zeros = tl.zeros([COLUMNS], logits.dtype.element_ty)
                tl.store(logits + first + i, zeros, mask=first + i < vocabulary)
    else:
        # Read the label's logit before the second pass overwrites it. An unknown label gives NaN,
        # because the host would have to wait to raise an error.
        known = (label >= 0) & (label < vocabulary)
        at_label = tl.load(logits + label, mask=known, other=float("nan")).to(tl.float32)
        m = -3.4e38  # finite, so that m - m is 0 where all logits so far are -inf
        total = 0.0
        for first in range(0, vocabulary, COLUMNS):
            inside = first + i < vocabulary
            x = tl.load(logits + first + i, mask=inside, other=float("-inf"))
            x = x.to(tl.float32)  # [COLUMNS]
            m_new = tl.maximum(m, tl.max(x, 0))
            total = total * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), 0)
            m = m_new
        tl.store(losses + row, m - at_label + tl.log(total))
        if GRADIENT:
            scale = 1.0 / total
            for first in range(0, vocabulary, COLUMNS):
                inside = first + i < vocabulary
                x = tl.load(logits + first + i, mask=inside, other=float("-inf")).to(tl.float32)
                p = tl.exp(x - m) * scale  # [COLUMNS]
                p = tl.where(first + i == label, p - 1.0, p)
                tl.store(logits + first + i, p.to(logits.dtype.element_ty), mask=inside)


def cross_entropy_(logits: Tensor, labels: Tensor, with_gradients: bool) -> Tensor:
    """Return -log softmax(logits)[label], float32 [rows]; `with_gradients` overwrites logits."""
    rows, vocabulary = logits.shape
    assert logits.is_contiguous()
    losses = logits.new_empty(rows, dtype=torch.float32)
    columns = min(COLUMNS, next_power_of_2(vocabulary))
    warps = max(1, columns // (8 * warp_size(logits.device)))
    launch(
        cross_entropy_kernel, (rows,), Config(1, columns, warps, 1),
        logits=logits, labels=labels.contiguous(), losses=losses, vocabulary=vocabulary,
        GRADIENT=with_gradients, IGNORE=IGNORE_INDEX, COLUMNS=columns,
    )  # fmt: skip
    return losses
