"""Sums of gradients that programs leave in rows of their own: the same in every run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.common import kernel
from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import cdiv, launch

PARTS = Config(32, 32, 4, 1)  # rows and columns that a program adds at a time


@kernel
def sum_parts_kernel(
    parts, first, second, third, rows,
    FIRST: tl.constexpr, SECOND: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Sums of the columns of parts, in ascending order, side by side in up to three tensors."""
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
    """The sums of float32 parts [rows, WIDTH], of which one or three tensors like these consist."""
    sums = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]
    sizes = [x.numel() for x in like]
    first, second, third = (*sums, None, None)[:3]
    launch(
        sum_parts_kernel, (cdiv(parts.shape[1], PARTS.keys),), PARTS,
        parts=parts, first=first, second=second, third=third, rows=parts.shape[0],
        FIRST=sizes[0], SECOND=sum(sizes[1:2]), WIDTH=parts.shape[1],
        ROWS=PARTS.rows, COLS=PARTS.keys,
    )  # fmt: skip
    return sums
