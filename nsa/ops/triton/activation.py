"""SwiGLU kernels, launchers and custom op: one kernel each way, on gate and up side by side."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.triton.common import kernel
from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import cdiv, launch, next_power_of_2

TILE = Config(4, 512, 4, 1)  # 16 elements per thread: two loads of 16 bytes in bf16


@triton.jit
def _tile(rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """This program's row numbers [ROWS], columns [COLS] and mask [ROWS, COLS]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    return row, col, (row < rows)[:, None] & (col < WIDTH)[None, :]


@kernel
def swiglu_kernel(
    gate_up, out, rows,
    WIDTH: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up; gate and up are columns of gate_up."""
    row, col, mask = _tile(rows, WIDTH, ROWS, COLS)
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
    """The gradients of gate and up side by side; zeros in the padding."""
    row, col, mask = _tile(rows, WIDTH, ROWS, COLS)
    inside = (row * PACKED)[:, None] + col[None, :]
    gate = tl.load(gate_up + inside, mask=mask, other=0.0).to(tl.float32)  # [ROWS, COLS]
    up = tl.load(gate_up + inside + WIDTH, mask=mask, other=0.0).to(tl.float32)
    do = tl.load(d_out + (row * WIDTH)[:, None] + col[None, :], mask=mask, other=0.0)
    do, sigmoid = do.to(tl.float32), tl.sigmoid(gate)
    d_gate = do * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_up = do * gate * sigmoid
    dtype = d_gate_up.dtype.element_ty
    tl.store(d_gate_up + inside, d_gate.to(dtype), mask=mask)
    tl.store(d_gate_up + inside + WIDTH, d_up.to(dtype), mask=mask)
    if PACKED > 2 * WIDTH:
        # Padding has no gradient. The first column of programs writes it.
        pad = 2 * WIDTH + tl.arange(0, PAD)
        first = (row < rows) & (tl.program_id(1) == 0)
        tl.store(
            d_gate_up + (row * PACKED)[:, None] + pad[None, :],
            tl.zeros([ROWS, PAD], dtype),
            mask=first[:, None] & (pad < PACKED)[None, :],
        )


class PackedGates(NamedTuple):
    """Inputs of the op."""

    gate_up: Tensor  # [.., gate | up | padding]
    width: int  # columns of gate, and of up


def swiglu_forward(x: PackedGates) -> Tensor:
    """silu(gate) · up: [.., width]."""
    out, packed, rows, grid = _output(x), *_sizes(x)
    launch(
        swiglu_kernel, grid, TILE,
        gate_up=x.gate_up.contiguous(), out=out, rows=rows,
        WIDTH=x.width, PACKED=packed, ROWS=TILE.rows, COLS=TILE.keys,
    )  # fmt: skip
    return out


def swiglu_backward(d_out: Tensor, x: PackedGates) -> Tensor:
    """The gradient of gate_up; 0 in the padding."""
    d_gate_up = torch.empty_like(x.gate_up, memory_format=torch.contiguous_format)
    packed, rows, grid = _sizes(x)
    launch(
        swiglu_backward_kernel, grid, TILE,
        d_out=d_out.contiguous(), gate_up=x.gate_up.contiguous(), d_gate_up=d_gate_up, rows=rows,
        WIDTH=x.width, PACKED=packed, PAD=next_power_of_2(max(1, packed - 2 * x.width)),
        ROWS=TILE.rows, COLS=TILE.keys,
    )  # fmt: skip
    return d_gate_up


def _sizes(x: PackedGates) -> tuple[int, int, tuple[int, int]]:
    """Columns of gate_up, its rows, and a grid."""
    packed = x.gate_up.shape[-1]
    rows = x.gate_up.numel() // packed
    return packed, rows, (cdiv(rows, TILE.rows), cdiv(x.width, TILE.keys))


def _output(x: PackedGates) -> Tensor:
    return x.gate_up.new_empty(*x.gate_up.shape[:-1], x.width)


triton_swiglu = register(
    "nsa::triton_swiglu",
    PackedGates,
    swiglu_forward,
    fake=_output,
    gradient=Gradient(swiglu_backward, inputs=1, outputs=1, saved=slice(0)),
)
