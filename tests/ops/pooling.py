"""Inputs for tests of `pool`, and its definition token by token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from nsa.ops.pooling import pool
from tests.ops.projections import Documents

Parameters = tuple[Tensor, Tensor, Tensor]  # weight, position, scale


def inputs(
    documents: Documents, heads: int, size: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """x, weight, position and scale; scores differ much between tokens and between channels."""
    draw = torch.Generator().manual_seed(documents.tokens)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(shape, generator=draw, dtype=torch.float64)).to(dtype)

    x = normal(documents.batch, documents.tokens, heads, size)
    weight = normal(heads, size, size, std=2 * size**-0.5)
    return [x, weight, normal(heads, documents.l, size), 1 + normal(heads * size, std=0.3)]


def angles(documents: Documents, size: int) -> tuple[Tensor, Tensor]:
    """cos and sin at the last position of each block, float32 [N, 1, D / 2]."""
    position = [t for n in documents.lengths for t in range(n)]
    last = torch.tensor([float(position[block[-1]]) for block in documents.blocks()])
    angle = last[:, None] * torch.arange(1, size // 2 + 1) / size
    return angle.cos()[:, None], angle.sin()[:, None]


def pooled(documents: Documents, rotates: bool, backend: str = "auto") -> Callable[..., Tensor]:
    """`pool` as a function of x and its parameters."""

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        tables = (table.to(x.device) for table in documents.tables())
        rotary = angles(documents, x.shape[3]) if rotates else None
        if rotary is not None:
            rotary = (rotary[0].to(x.device), rotary[1].to(x.device))
        return pool(x, *parameters, rotary, *tables, backend=backend)

    return run


def defined(documents: Documents, rotates: bool) -> Callable[..., Tensor]:
    """The same by its definition: block by block, head by head."""

    def run(x: Tensor, weight: Tensor, position: Tensor, scale: Tensor) -> Tensor:
        heads, size = x.shape[2:]
        one = partial(_one_head, documents, rotates)
        columns = zip(x.unbind(2), weight, position, scale.view(heads, size), strict=True)
        return torch.stack([one(*column) for column in columns], 2)

    return run


def _one_head(
    documents: Documents, rotates: bool, x: Tensor, weight: Tensor, position: Tensor, scale: Tensor
) -> Tensor:
    cos, sin = (table[:, 0].to(x) for table in angles(documents, x.shape[-1]))
    outputs = []
    for number, block in enumerate(documents.blocks()):
        scores = torch.stack([x[:, t] @ weight + position[i] for i, t in enumerate(block)])
        weights = scores.exp() / scores.exp().sum(0)
        mean = sum((weights[i] * x[:, t] for i, t in enumerate(block)), x.new_zeros(()))
        y = mean * scale
        if rotates:
            a, b = y.chunk(2, -1)
            c, s = cos[number], sin[number]
            y = torch.cat([a * c - b * s, b * c + a * s], -1)
        outputs.append(y)
    if outputs:
        return torch.stack(outputs, 1)
    return x[:, :0] * (weight.sum() + position.sum() + scale.sum())  # gradients of zeros
