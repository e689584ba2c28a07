"""The gated sum of the three branches' outputs, one pass forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import launch

ELEMENTS = 4096  # of one output that a program takes in


@triton.jit
def _share(x, gates, row, at, valid, inside, BRANCH: tl.constexpr):
    """One branch's part: its gate times its output, float32."""
    gate = tl.load(gates + row * 3 + BRANCH, mask=valid, other=0.0).to(tl.float32)
    return gate[:, None] * tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def mix_kernel(
    a, b, c, gates, out, rows,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, PADDED)
    valid = row < rows
    inside = valid[:, None] & (d < SIZE)[None, :]
    at = (row * SIZE)[:, None] + d[None, :]
    total = _share(a, gates, row, at, valid, inside, 0)
    total += _share(b, gates, row, at, valid, inside, 1)
    total += _share(c, gates, row, at, valid, inside, 2)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _unmix_one(
    do, x, gates, dx, dgates, row, at, valid, inside, BRANCH: tl.constexpr
):  # fmt: skip
    gate = tl.load(gates + row * 3 + BRANCH, mask=valid, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + at, (gate[:, None] * do).to(dx.dtype.element_ty), mask=inside)
    total = tl.sum(value * do, 1)
    tl.store(dgates + row * 3 + BRANCH, total.to(dgates.dtype.element_ty), mask=valid)


@triton.jit
def unmix_kernel(
    do, a, b, c, gates, da, db, dc, dgates, rows,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, PADDED)
    valid = row < rows
    inside = valid[:, None] & (d < SIZE)[None, :]
    at = (row * SIZE)[:, None] + d[None, :]
    do_tile = tl.load(do + at, mask=inside, other=0.0).to(tl.float32)
    _unmix_one(do_tile, a, gates, da, dgates, row, at, valid, inside, 0)
    _unmix_one(do_tile, b, gates, db, dgates, row, at, valid, inside, 1)
    _unmix_one(do_tile, c, gates, dc, dgates, row, at, valid, inside, 2)


def mix_forward(a: Tensor, b: Tensor, c: Tensor, gates: Tensor) -> Tensor:
    """Σ gates_c · o_c over [B, T, H, D] and gates [B, T, H, 3]."""
    a, b, c, gates = (x.contiguous() for x in (a, b, c, gates))
    out = torch.empty_like(a)
    _launch(mix_kernel, {"a": a, "b": b, "c": c, "gates": gates, "out": out}, a)
    return out


def mix_backward(
    do: Tensor, a: Tensor, b: Tensor, c: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the three outputs and of the gates (row sums)."""
    do, a, b, c, gates = (x.contiguous() for x in (do, a, b, c, gates))
    da, db, dc, dgates = (torch.empty_like(x) for x in (a, b, c, gates))
    inputs = {"do": do, "a": a, "b": b, "c": c, "gates": gates}
    _launch(unmix_kernel, inputs | {"da": da, "db": db, "dc": dc, "dgates": dgates}, a)
    return da, db, dc, dgates


def _launch(kernel: Any, tensors: dict[str, Tensor], like: Tensor) -> None:
    size = like.shape[-1]
    padded = triton.next_power_of_2(size)
    rows, step = like.numel() // size, max(1, ELEMENTS // padded)
    launch(
        kernel,
        (triton.cdiv(rows, step),),
        tensors | {"rows": rows},
        {"SIZE": size, "PADDED": padded, "ROWS": step},
        Config(step, 0, 4, 1),
    )


@torch.library.custom_op("nsa::triton_mix", mutates_args=())
def triton_mix(a: Tensor, b: Tensor, c: Tensor, gates: Tensor) -> Tensor:
    """Σ gates_c · o_c."""
    return mix_forward(a, b, c, gates)


@triton_mix.register_fake
def _(a: Tensor, b: Tensor, c: Tensor, gates: Tensor) -> Tensor:
    return a.new_empty(a.shape)


@torch.library.custom_op("nsa::triton_mix_backward", mutates_args=())
def triton_mix_backward(
    do: Tensor, a: Tensor, b: Tensor, c: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the three outputs and of the gates."""
    return mix_backward(do, a, b, c, gates)


@triton_mix_backward.register_fake
def _(
    do: Tensor, a: Tensor, b: Tensor, c: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    da, db, dc = (x.new_empty(x.shape) for x in (a, b, c))
    return da, db, dc, gates.new_empty(gates.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:
    return triton_mix_backward(do, *ctx.saved_tensors)


triton_mix.register_autograd(_backward, setup_context=_setup_context)
