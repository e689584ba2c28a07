"""Learned pooling of compressed blocks (φ = `pool`): kernels and launchers.

A forward program pools one block of one KV head. A backward program takes a segment of tokens of
one head: it writes their gradient, and its part of the parameters' gradients to one row. A second
kernel adds these rows in ascending order, so gradients are the same from run to run.

The two halves of a head that RoPE rotates are padded separately: columns [0, HALF_P) are the first
half, [HALF_P, 2 · HALF_P) the second. Values, which are not rotated, have HALF = 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.inputs import PoolInputs
from nsa.ops.triton.common import dot, kernel, sum_parts
from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import cdiv, launch, padded_size

TOKENS_PER_SEGMENT = 128


@triton.jit
def _columns(SIZE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr):
    """Return a head's columns and whether they exist, [PADDED]; half 2 of keys is at PADDED/2."""
    c = tl.arange(0, PADDED)
    if HALF > 0:
        HALF_P: tl.constexpr = PADDED // 2
        return (c // HALF_P) * HALF + c % HALF_P, c % HALF_P < HALF
    else:
        return c, c < SIZE


@triton.jit
def _load_weight(weight, col, inside, SIZE: tl.constexpr):
    """Load the weight of one head, [PADDED, PADDED]."""
    at = col[:, None] * SIZE + col[None, :]
    return tl.load(weight + at, mask=inside[:, None] & inside[None, :], other=0.0)


@triton.jit
def _load(base, row, col, mask):
    """Load columns of the rows that begin at base + row: float32 [ROWS, PADDED]."""
    return tl.load(base + row[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)


@kernel
def pool_forward_kernel(
    x, weight, position, scale, cos, sin, block_tokens, y, pooled, lse, seq_len, key_len,
    HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    LEN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store one block's y; for the backward pass also `pooled`, before scale and RoPE, and lse."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    col, inside = _columns(SIZE, HALF, PADDED)
    w = _load_weight(weight + head * SIZE * SIZE, col, inside, SIZE).to(x.dtype.element_ty)
    top = tl.full([PADDED], float("-inf"), tl.float32)
    total, acc = tl.zeros([PADDED], tl.float32), tl.zeros([PADDED], tl.float32)
    for first in range(0, LEN, ROWS):
        i = first + tl.arange(0, ROWS)
        valid = i < LEN
        mask = valid[:, None] & inside[None, :]
        t = tl.load(block_tokens + block * LEN + i, mask=valid, other=0)
        row = ((batch * seq_len + t) * HEADS + head) * SIZE
        k = tl.load(x + row[:, None] + col[None, :], mask=mask, other=0.0)  # [ROWS, PADDED]
        s = dot(k, w) + _load(position, (head * LEN + i) * SIZE, col, mask)
        s = tl.where(valid[:, None], s, float("-inf"))
        top_new = tl.maximum(top, tl.max(s, 0))  # finite: a step has at least one token
        p, old = tl.exp(s - top_new[None, :]), tl.exp(top - top_new)
        total = total * old + tl.sum(p, 0)
        acc = acc * old + tl.sum(p * k.to(tl.float32), 0)
        top = top_new
    acc /= total
    out = ((batch * key_len + block) * HEADS + head) * SIZE
    tl.store(pooled + out + col, acc, mask=inside)
    tl.store(lse + out + col, top + tl.log(total), mask=inside)
    acc *= tl.load(scale + head * SIZE + col, mask=inside, other=0.0).to(tl.float32)
    if HALF > 0:
        HALF_P: tl.constexpr = PADDED // 2
        d = tl.arange(0, HALF_P)
        a, b = tl.split(tl.trans(tl.reshape(acc, [2, HALF_P])))  # [HALF_P]
        cosine = tl.load(cos + block * HALF + d, mask=d < HALF, other=0.0)
        sine = tl.load(sin + block * HALF + d, mask=d < HALF, other=0.0)
        low, high = a * cosine - b * sine, b * cosine + a * sine
        tl.store(y + out + d, low.to(y.dtype.element_ty), mask=d < HALF)
        tl.store(y + out + HALF + d, high.to(y.dtype.element_ty), mask=d < HALF)
    else:
        tl.store(y + out + col, acc.to(y.dtype.element_ty), mask=inside)


@kernel
def pool_backward_kernel(
    dy, x, weight, position, scale, cos, sin, block_tokens, token_blocks, pooled, lse,
    dx, parts, seq_len, key_len,
    HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    LEN: tl.constexpr, LEN_P: tl.constexpr, COVER: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Store dx of a segment, and its part of d_weight, d_position and d_scale."""
    segment, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    parts += (batch * tl.num_programs(0) + segment) * (HEADS * SIZE * (SIZE + LEN + 1))
    col, inside = _columns(SIZE, HALF, PADDED)
    w = _load_weight(weight + head * SIZE * SIZE, col, inside, SIZE).to(x.dtype.element_ty)
    factor = tl.load(scale + head * SIZE + col, mask=inside, other=0.0).to(tl.float32)[None, :]
    d_weight = tl.zeros([PADDED, PADDED], tl.float32)
    d_position = tl.zeros([LEN_P, PADDED], tl.float32)
    d_scale = tl.zeros([PADDED], tl.float32)
    for first in range(0, TOKENS, ROWS):
        t = segment * TOKENS + first + tl.arange(0, ROWS)
        valid = t < seq_len
        row = ((batch * seq_len + t) * HEADS + head) * SIZE
        mask = valid[:, None] & inside[None, :]
        k = tl.load(x + row[:, None] + col[None, :], mask=mask, other=0.0)  # [ROWS, PADDED]
        s = dot(k, w)
        dk, ds = tl.zeros([ROWS, PADDED], tl.float32), tl.zeros([ROWS, PADDED], tl.float32)
        for c in range(COVER):
            block = tl.load(token_blocks + t.to(tl.int64) * COVER + c, mask=valid, other=-1)
            covered = block >= 0
            mask = covered[:, None] & inside[None, :]
            i = t - tl.load(block_tokens + block * LEN, mask=covered, other=0)  # index in the block
            at = ((batch * key_len + block) * HEADS + head) * SIZE
            g = _load(dy, at, col, mask)
            if HALF > 0:  # rotate back
                HALF_P: tl.constexpr = PADDED // 2
                n = tl.arange(0, PADDED)
                half, d = n // HALF_P, n % HALF_P
                sign = tl.where(half == 0, 1.0, -1.0)[None, :]
                partner = (1 - half) * HALF + d  # the column that RoPE pairs with this one
                angles = block * HALF  # the row of cos and sin
                g *= _load(cos, angles, d, mask)
                g += sign * _load(dy, at, partner, mask) * _load(sin, angles, d, mask)
            mean = _load(pooled, at, col, mask)
            # A block counts once, with its first token.
            d_scale += tl.sum(tl.where((covered & (i == 0))[:, None], g * mean, 0.0), 0)
            g *= factor
            score = s + _load(position, (head * LEN + i) * SIZE, col, mask)
            p = tl.where(mask, tl.exp(score - _load(lse, at, col, mask)), 0.0)
            d_score = p * (k.to(tl.float32) - mean) * g
            dk += p * g
            ds += d_score
            # [LEN_P, ROWS]: one-hot, so that the product adds each row's d_score at its index i.
            is_i = (tl.arange(0, LEN_P)[:, None] == i[None, :]) & covered[None, :]
            d_position = dot(is_i.to(k.dtype), d_score.to(k.dtype), d_position)
        d_weight = dot(tl.trans(k), ds.to(k.dtype), d_weight)
        dk = dot(ds.to(k.dtype), tl.trans(w), dk)
        mask = valid[:, None] & inside[None, :]
        tl.store(dx + row[:, None] + col[None, :], dk.to(dx.dtype.element_ty), mask=mask)
    POSITIONS: tl.constexpr = HEADS * SIZE * SIZE  # of a part: weight, position, scale
    SCALES: tl.constexpr = POSITIONS + HEADS * LEN * SIZE
    at = head * SIZE * SIZE + col[:, None] * SIZE + col[None, :]
    tl.store(parts + at, d_weight, mask=inside[:, None] & inside[None, :])
    i = tl.arange(0, LEN_P)
    at = POSITIONS + ((head * LEN + i) * SIZE)[:, None] + col[None, :]
    tl.store(parts + at, d_position, mask=(i < LEN)[:, None] & inside[None, :])
    tl.store(parts + SCALES + head * SIZE + col, d_scale, mask=inside)


def pool_forward(x: PoolInputs) -> tuple[Tensor, ...]:
    """Return (y, pooled, lse); the last two are float32, for the backward pass."""
    y, pooled, lse = _empty_outputs(x)
    batch, _, heads, size = x.x.shape
    config = Config(32, 0, 8 if size > 64 else 4, 1)
    launch(
        pool_forward_kernel, (len(x.block_tokens), heads, batch), config,
        **_inputs(x, config), y=y, pooled=pooled, lse=lse,
    )  # fmt: skip
    return y, pooled, lse


def pool_backward(dy: Tensor, x: PoolInputs, pooled: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of x, weight, position and scale."""
    batch, seq_len, heads, size = x.x.shape
    segments = cdiv(seq_len, TOKENS_PER_SEGMENT)
    sizes = [parameter.numel() for parameter in x[1:4]]
    dx = torch.empty_like(x.x, memory_format=torch.contiguous_format)
    parts = x.x.new_empty(batch * segments, sum(sizes), dtype=torch.float32)
    # The gradient of `weight` stays in registers; with 32 rows they spill.
    config = Config(16, 0, 8 if size > 64 else 4, 1)
    launch(
        pool_backward_kernel, (segments, heads, batch), config, **_inputs(x, config),
        dy=dy.contiguous(), token_blocks=x.token_blocks.contiguous(), pooled=pooled, lse=lse,
        dx=dx, parts=parts, LEN_P=padded_size(x.block_tokens.shape[1]),
        COVER=x.token_blocks.shape[1], TOKENS=TOKENS_PER_SEGMENT,
    )  # fmt: skip
    return dx, *sum_parts(parts, x[1:4])


def _inputs(x: PoolInputs, config: Config) -> dict[str, Any]:
    """Return the arguments that both kernels take."""
    (_, seq_len, heads, size), (blocks, length) = x.x.shape, x.block_tokens.shape
    half, padded = 0, padded_size(size)  # of values, which RoPE does not rotate
    if x.cos is not None:
        half, padded = size // 2, 2 * padded_size(size // 2)
    tensors = zip(x._fields[:-1], x, strict=False)  # without token_blocks
    return {
        **{name: None if y is None else y.contiguous() for name, y in tensors},
        "seq_len": seq_len, "key_len": blocks,
        "HEADS": heads, "SIZE": size, "HALF": half, "PADDED": padded, "LEN": length,
        "ROWS": config.rows,
    }  # fmt: skip


def _empty_outputs(x: PoolInputs) -> tuple[Tensor, ...]:
    y = x.empty_output()
    pooled, lse = (y.new_empty(y.shape, dtype=torch.float32) for _ in range(2))
    return y, pooled, lse


triton_pool = register(
    "nsa::triton_pool",
    PoolInputs,
    pool_forward,
    _empty_outputs,
    outputs=3,
    gradient=Gradient(pool_backward, inputs=4, outputs=1, saved=slice(1, 3)),
)
