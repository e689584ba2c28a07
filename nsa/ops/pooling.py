"""Learned pooling of compressed blocks (φ = `pool`): a weighted mean in each channel.

    scores   x_i · weight + position[i]         of a block's token i, one per channel
    p        softmax over the block's l tokens, in each channel
    pooled   Σ_i p_i · x_i
    y        scale · pooled, and for keys RoPE at the block's last position

With weight and position 0 and scale 1, y is the mean (before RoPE). Blocks overlap, so a token's
gradient is a sum over the few blocks that cover the token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.ops import triton
from nsa.ops.backend import dispatch
from nsa.ops.custom_op import Gradient, register
from nsa.ops.inputs import PoolInputs
from nsa.ops.rotary import rotate


def pool(
    x: Tensor,
    weight: Tensor,
    position: Tensor,
    scale: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    block_tokens: Tensor,
    token_blocks: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """Pool x [B, T, K, D] to [B, N, K, D]; `rotary` is (cos, sin) at the blocks' last positions."""
    cos, sin = (None, None) if rotary is None else rotary
    inputs = PoolInputs(x, weight, position, scale, cos, sin, block_tokens, token_blocks)
    limit = triton.pool_limit(block_tokens.shape[1], x.shape[3])
    if dispatch(backend, "pool", x, limit=limit) is triton:
        from nsa.ops.triton.pooling import triton_pool

        return triton_pool(inputs)[0]
    return torch_pool(inputs)


def sum_covering(blocks: Tensor, block_tokens: Tensor, token_blocks: Tensor) -> Tensor:
    """Sum each token's entries in the blocks that cover it: [B, N, l, K, D] to [B, T, K, D]."""
    first = F.pad(block_tokens[:, 0], (0, 1))  # the last entry is for token_blocks = -1
    token = torch.arange(len(token_blocks), device=first.device)[:, None]
    number_in_block = token - first[token_blocks]  # [T, ⌈l/d⌉]
    row = token_blocks * block_tokens.shape[1] + number_in_block
    row = row.where(token_blocks >= 0, -1)
    rows = F.pad(blocks.flatten(1, 2), (0, 0, 0, 0, 0, 1))  # [B, N · l + 1, K, D]; the last is 0
    return rows[:, row].sum(2)


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [.., K, D] by each KV head's weight [K, D, E]; return [.., K, E]."""
    return torch.einsum("...kd,kde->...ke", x, weight.to(x.dtype))


def _blocks_and_weights(inputs: PoolInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [B, T, K, D], its blocks and their weights p [B, N, l, K, D], at least float32."""
    x = inputs.x.to(torch.promote_types(inputs.x.dtype, torch.float32))
    scores = _matmul(x, inputs.weight)[:, inputs.block_tokens] + inputs.position.transpose(0, 1)
    return x, x[:, inputs.block_tokens], scores.softmax(2)


def _forward(inputs: PoolInputs) -> Tensor:
    _, blocks, p = _blocks_and_weights(inputs)
    y = (p * blocks).sum(2) * inputs.scale.view(blocks.shape[3:])
    if inputs.cos is not None and inputs.sin is not None:
        y = rotate(y, inputs.cos, inputs.sin)
    return y.to(inputs.x.dtype)


def _backward(dy: Tensor, inputs: PoolInputs) -> tuple[Tensor, ...]:
    """Return the gradients of x, weight, position and scale."""
    x, blocks, p = _blocks_and_weights(inputs)
    dy = dy.to(x.dtype)
    if inputs.cos is not None and inputs.sin is not None:
        dy = rotate(dy, inputs.cos, -inputs.sin)
    pooled = (p * blocks).sum(2)
    d_scale = (dy * pooled).sum((0, 1)).flatten()
    d_pooled = dy * inputs.scale.view(dy.shape[2:])
    weighted = p * d_pooled[:, :, None]  # [B, N, l, K, D]
    d_scores = weighted * (blocks - pooled[:, :, None])
    d_position = d_scores.sum((0, 1)).transpose(0, 1)
    tables = inputs.block_tokens, inputs.token_blocks
    by_token = sum_covering(d_scores, *tables)  # [B, T, K, D]
    d_weight = torch.einsum("btkd,btke->kde", x, by_token)
    dx = sum_covering(weighted, *tables) + _matmul(by_token, inputs.weight.mT)
    gradients = dx, d_weight, d_position, d_scale
    pairs = zip(gradients, inputs[:4], strict=True)
    return tuple(gradient.to(value.dtype).contiguous() for gradient, value in pairs)


torch_pool = register(
    "nsa::pool",
    PoolInputs,
    _forward,
    PoolInputs.empty_output,
    gradient=Gradient(_backward, inputs=4, outputs=1, saved=slice(0)),
)
