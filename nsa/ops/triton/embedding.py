"""Add the gradients of embedded tokens to the gradient of the head's weight, in place.

Tokens are sorted, so that equal tokens are adjacent. The program of a token's first position sums
all of its rows in float32 and rounds once; the other programs do nothing. No atomics: gradients are
the same from run to run.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from nsa.ops.custom_op import IMPLEMENTATIONS
from nsa.ops.triton.common import kernel
from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import cdiv, launch, next_power_of_2

TILE = Config(16, 256, 4, 1)  # positions of a token, and columns, that a program adds at a time


@kernel
def add_token_gradients_kernel(
    d_weight, d_x, tokens, order, rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`tokens` ascend; `order` holds each one's row in d_x."""
    first = tl.program_id(0)
    token = tl.load(tokens + first)
    if (first == 0) | (tl.load(tokens + tl.maximum(first - 1, 0)) != token):
        col = tl.program_id(1) * COLS + tl.arange(0, COLS)
        inside = col < WIDTH
        total = tl.zeros([COLS], tl.float32)
        count = ROWS
        while count == ROWS:
            at = first + tl.arange(0, ROWS)
            same = (at < rows) & (tl.load(tokens + at, mask=at < rows, other=0) == token)
            row = tl.load(order + at, mask=same, other=0)
            mask = same[:, None] & inside[None, :]
            part = tl.load(d_x + (row * WIDTH)[:, None] + col[None, :], mask=mask, other=0.0)
            total += tl.sum(part.to(tl.float32), 0)
            count = tl.sum(same.to(tl.int32), 0)
            first += ROWS
        out = d_weight + token.to(tl.int64) * WIDTH + col
        total += tl.load(out, mask=inside, other=0.0).to(tl.float32)
        tl.store(out, total.to(d_weight.dtype.element_ty), mask=inside)


def add_token_gradients_(d_weight: Tensor, d_x: Tensor, tokens: Tensor) -> None:
    """d_weight[tokens] += d_x, where d_weight [vocabulary, width] is contiguous."""
    width = d_weight.shape[1]
    ascending, order = tokens.flatten().sort(stable=True)
    launch(
        add_token_gradients_kernel, (len(order), cdiv(width, TILE.keys)), TILE,
        d_weight=d_weight, d_x=d_x.contiguous(), tokens=ascending, order=order, rows=len(order),
        WIDTH=width, ROWS=TILE.rows, COLS=min(TILE.keys, next_power_of_2(width)),
    )  # fmt: skip


triton_add_token_gradients_ = torch.library.custom_op(
    "nsa::triton_add_token_gradients_", add_token_gradients_, mutates_args={"d_weight"}
)
IMPLEMENTATIONS["nsa::triton_add_token_gradients_"] = add_token_gradients_


@triton_add_token_gradients_.register_fake
def _(d_weight: Tensor, d_x: Tensor, tokens: Tensor) -> None:
    return None
