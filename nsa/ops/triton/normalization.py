"""RMSNorm kernels with the residual add, launchers and custom op: one kernel each way.

The backward kernel leaves the weight's gradient in one float32 row per program; a second, small
kernel adds these rows in ascending order. So results are the same in every run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.triton.common import kernel, load_rows, store_rows
from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import cdiv, launch, next_power_of_2
from nsa.ops.triton.sum_parts import sum_parts

ELEMENTS = 2048  # that a program holds at a time: 16 per thread of four warps
ROWS_PER_PART = 32  # rows that one program of the backward kernel sums over


@triton.jit
def _load(base, at, mask, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows [ROWS, PADDED] in float32."""
    return load_rows(base, at, WIDTH, WIDTH, PADDED, mask).to(tl.float32)


@triton.jit
def _load_weight(weight, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """[1, PADDED] in float32."""
    d = tl.arange(0, PADDED)
    return tl.load(weight + d, mask=d < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _inverse_rms(h, valid, eps, WIDTH: tl.constexpr):
    """[ROWS, 1]; 0 for rows past the end, also if eps is 0."""
    inverse = tl.rsqrt(tl.sum(h * h, 1) / WIDTH + eps)
    return tl.where(valid, inverse, 0.0)[:, None]


@kernel
def add_rms_norm_kernel(
    x, delta, weight, total, normed, rows, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """total = x, or x + delta, and its norm times weight."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    h = _load(x, row, valid, WIDTH, PADDED)  # [ROWS, PADDED]
    if delta is not None:
        h += _load(delta, row, valid, WIDTH, PADDED)
        h = h.to(total.dtype.element_ty).to(tl.float32)  # the norm of what is stored
    store_rows(total, row, WIDTH, h, WIDTH, PADDED, valid)
    y = h * _inverse_rms(h, valid, eps, WIDTH) * _load_weight(weight, WIDTH, PADDED)
    store_rows(normed, row, WIDTH, y, WIDTH, PADDED, valid)


@kernel
def rms_norm_backward_kernel(
    d_normed, d_total, total, weight, dx, parts, rows, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, PER_PART: tl.constexpr,
):  # fmt: skip
    """dx = (w*dy - unit * mean(w*dy*unit)) / rms, plus d_total; one row of dw per program."""
    w = _load_weight(weight, WIDTH, PADDED)  # [1, PADDED]
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


class AddNorm(NamedTuple):
    """Inputs of the op."""

    x: Tensor  # [.., width]
    delta: Tensor | None  # [.., width]
    weight: Tensor  # [width]
    eps: float


def add_rms_norm_forward(x: AddNorm) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm times weight).

    Without a delta, the first is a copy of x: a custom op cannot return its input, and an x outside
    of the op would get its two gradients from another kernel.
    """
    total, normed = (torch.empty_like(x.x, memory_format=torch.contiguous_format) for _ in range(2))
    rows, width = normed.numel() // normed.shape[-1], normed.shape[-1]
    padded, held, config = _tile(width)
    launch(
        add_rms_norm_kernel, (cdiv(rows, held),), config,
        x=x.x.contiguous(), delta=None if x.delta is None else x.delta.contiguous(),
        weight=x.weight.contiguous(), total=total, normed=normed,
        rows=rows, eps=x.eps, WIDTH=width, PADDED=padded, ROWS=held,
    )  # fmt: skip
    return total, normed


@lru_cache(maxsize=64)
def _tile(width: int) -> tuple[int, int, Config]:
    """The padded width, the rows that a program holds at a time, and a config."""
    padded = next_power_of_2(width)
    held = min(max(1, ELEMENTS // padded), ROWS_PER_PART)
    return padded, held, Config(held, 0, min(16, max(4, held * padded // 512)), 1)


def add_rms_norm_backward(
    d_total: Tensor | None, d_normed: Tensor | None, x: AddNorm, total: Tensor
) -> tuple[Tensor, ...]:
    """The gradient of x, which is also that of delta, and of weight."""
    if d_normed is None:
        d_normed = torch.zeros_like(total)
    rows, width = total.numel() // total.shape[-1], total.shape[-1]
    padded, held, config = _tile(width)
    count = cdiv(rows, ROWS_PER_PART)
    parts = total.new_empty(count, width, dtype=torch.float32)
    dx = torch.empty_like(total, memory_format=torch.contiguous_format)
    launch(
        rms_norm_backward_kernel, (count,), config,
        d_normed=d_normed.contiguous(), d_total=None if d_total is None else d_total.contiguous(),
        total=total.contiguous(), weight=x.weight.contiguous(), dx=dx, parts=parts,
        rows=rows, eps=x.eps, WIDTH=width, PADDED=padded, ROWS=held, PER_PART=ROWS_PER_PART,
    )  # fmt: skip
    return dx, *sum_parts(parts, [x.weight])


triton_add_rms_norm = register(
    "nsa::triton_add_rms_norm",
    AddNorm,
    add_rms_norm_forward,
    fake=lambda x: (x.x.new_empty(x.x.shape), x.x.new_empty(x.x.shape)),
    outputs=2,
    gradient=Gradient(
        add_rms_norm_backward,
        inputs=3,
        outputs=2,
        saved=slice(1),
        result_of=(0, 0, 1),
        zeros=False,
        unread=2,
    ),
)
