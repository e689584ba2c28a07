"""Learned pooling of compressed blocks (φ = `pool`): a weighted mean in each channel.

    scores   x_i · weight + position[i]         of a block's token i, one per channel
    p        softmax over the block's l tokens, in each channel
    pooled   Σ_i p_i · x_i
    y        scale · pooled, and for keys RoPE at the block's last position

With weight and position 0 and scale 1 it is the mean. Blocks overlap, so gradients of tokens are
gathered: a token reads the few blocks that cover it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

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
    port: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Pool x [B, T, K, D] to y [B, N, K, D]; `rotary` are cos and sin at blocks' last positions.

    With `port` [B, T, K, D] also return a port of y, a tensor of y's shape without values. Its
    gradient reaches the parameters as y's would, but `port` instead of x. One backward pass serves
    both. Without `port` it has no elements.
    """
    (kv_heads, size), block_len = x.shape[2:], block_tokens.shape[1]
    for name, parameter, shape in (
        ("weight", weight, (kv_heads, size, size)),
        ("position", position, (kv_heads, block_len, size)),
        ("scale", scale, (kv_heads * size,)),
    ):
        if parameter.shape != shape:
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}; it must be {shape}")
    op = torch_pool
    if dispatch(backend, "pool", x, limit=triton.pool_limit(block_len, size)) is triton:
        from nsa.ops.triton.pooling import triton_pool as op
    cos, sin = (None, None) if rotary is None else rotary
    y, port_of_y, *_ = op(x, weight, position, scale, port, cos, sin, block_tokens, token_blocks)
    return y, port_of_y


def pool_blocks(blocks: Tensor, weight: Tensor, position: Tensor, scale: Tensor) -> Tensor:
    """The definition, without RoPE: pool blocks [B, N, l, K, D] to [B, N, K, D]."""
    x = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
    scores = _scores(x, weight) + position.transpose(0, 1)
    return _scaled_mean(x, scores.softmax(2), scale).to(blocks.dtype)


def sum_covering(blocks: Tensor, block_tokens: Tensor, token_blocks: Tensor) -> Tensor:
    """[B, N, l, K, D] to [B, T, K, D]: each token's sum over the blocks that cover it."""
    first = F.pad(block_tokens[:, 0], (0, 1))  # index -1 reads the last entry
    token = torch.arange(len(token_blocks), device=first.device)[:, None]
    row = token_blocks * block_tokens.shape[1] + token - first[token_blocks]  # [T, ⌈l/d⌉]
    row = row.where(token_blocks >= 0, -1)
    padded = F.pad(blocks.flatten(1, 2), (0, 0, 0, 0, 0, 1))
    return padded[:, row].sum(2)


def _scores(x: Tensor, weight: Tensor) -> Tensor:
    """x [.., K, D] times weight, [.., K, D]."""
    return torch.einsum("...kd,kde->...ke", x, weight.to(x.dtype))


def _scaled_mean(blocks: Tensor, p: Tensor, scale: Tensor) -> Tensor:
    """Sum blocks [B, N, l, K, D] with weights p of that shape, and scale: [B, N, K, D]."""
    pooled = (p * blocks).sum(2)
    return pooled * scale.view(pooled.shape[2:])


def _weights(inputs: PoolInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(x [B, T, K, D], its blocks, their weights [B, N, l, K, D]), in at least float32."""
    x = inputs.x.to(torch.promote_types(inputs.x.dtype, torch.float32))
    scores = _scores(x, inputs.weight)[:, inputs.block_tokens] + inputs.position.transpose(0, 1)
    return x, x[:, inputs.block_tokens], scores.softmax(2)


def _forward(inputs: PoolInputs) -> tuple[Tensor, Tensor]:
    _, blocks, p = _weights(inputs)
    y = _scaled_mean(blocks, p, inputs.scale)
    if inputs.cos is not None:
        assert inputs.sin is not None
        y = rotate(y, inputs.cos, inputs.sin)
    return y.to(inputs.x.dtype), inputs.port_of_y()


def _backward(dy: Tensor | None, dy_port: Tensor | None, inputs: PoolInputs) -> tuple[Tensor, ...]:
    """The gradients of x, weight, position, scale and port."""
    weights, x_and_port, sums = _weights(inputs), list[Tensor](), list[Tensor]()
    for gradient, target in ((dy, inputs.x), (dy_port, inputs.port)):
        if gradient is None:
            x_and_port.append(inputs.x.new_zeros(0 if target is None else inputs.x.shape))
            continue
        of_x, *others = _gradients(gradient, inputs, *weights)
        x_and_port.append(of_x.to(inputs.x.dtype).contiguous())
        sums = [a + b for a, b in zip(sums, others, strict=True)] if sums else others
    of = [g.to(x.dtype).contiguous() for g, x in zip(sums, inputs[1:4], strict=True)]
    return x_and_port[0], *of, x_and_port[1]


def _gradients(
    dy: Tensor, inputs: PoolInputs, x: Tensor, blocks: Tensor, p: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of x, weight, position and scale from dy, in the dtype of `_weights`."""
    dy = dy.to(x.dtype)
    if inputs.cos is not None:
        assert inputs.sin is not None
        dy = rotate(dy, inputs.cos, -inputs.sin)
    pooled = (p * blocks).sum(2)
    d_scale = (dy * pooled).sum((0, 1)).flatten()
    weighted = p * (dy * inputs.scale.view(dy.shape[2:]))[:, :, None]  # [B, N, l, K, D]
    d_scores = weighted * (blocks - pooled[:, :, None])
    d_position = d_scores.sum((0, 1)).transpose(0, 1)
    tables = inputs.block_tokens, inputs.token_blocks
    by_token = sum_covering(d_scores, *tables)  # [B, T, K, D]
    d_weight = torch.einsum("btkd,btke->kde", x, by_token)
    dx = sum_covering(weighted, *tables) + _scores(by_token, inputs.weight.mT)
    return dx, d_weight, d_position, d_scale


torch_pool = register(
    "nsa::pool",
    PoolInputs,
    _forward,
    lambda x: (x.empty_output(), x.port_of_y()),
    outputs=2,
    gradient=Gradient(_backward, inputs=5, outputs=2, saved=slice(0), zeros=False),
)


@register_flop_formula(torch.ops.nsa.pool)
def _forward_flops(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    return 2 * x.numel() * weight[-1]


@register_flop_formula(torch.ops.nsa.pool_backward)
def _backward_flops(
    dy: torch.Size | None,
    dy_port: torch.Size | None,
    x: torch.Size,
    weight: torch.Size,
    *_: object,
    **__: object,
) -> int:
    """Two products per gradient; the scores that it computes again do not count."""
    return 4 * x.numel() * weight[-1] * sum(shape is not None for shape in (dy, dy_port))
