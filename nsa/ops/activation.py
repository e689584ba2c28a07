"""SwiGLU: one kernel each way on a GPU, four passes of PyTorch elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.ops import triton
from nsa.ops.backend import dispatch


def swiglu(gate_up: Tensor, width: int | None = None, *, backend: str = "auto") -> Tensor:
    """Return silu(gate) · up, [.., width], of gate_up [.., gate | up | padding].

    `width` is the columns of gate and of up, by default half of gate_up's. Kernels compute in
    float32 and round once. There is no second derivative. The backends "blockwise" and
    "reference" both run PyTorch.
    """
    columns = gate_up.shape[-1]
    if width is None and columns % 2 == 0:
        width = columns // 2
    if width is None or not 0 < 2 * width <= columns:
        raise ValueError(
            f"width = {width}: gate_up has {columns} columns; pass a width of at most half of them"
        )
    if dispatch(backend, "swiglu", gate_up, attention=False) is triton:
        from nsa.ops.triton.activation import triton_swiglu

        return triton_swiglu(gate_up, width)
    if torch.compiler.is_compiling():  # it plans its own backward pass
        return _swiglu(gate_up, width)
    return _SwiGLU.apply(gate_up, width)


def _swiglu(gate_up: Tensor, width: int) -> Tensor:
    return F.silu(gate_up[..., :width]) * gate_up[..., width : 2 * width]


class _SwiGLU(torch.autograd.Function):
    """Saves only gate_up: autograd would also save silu(gate), and concatenate two gradients."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, width: int) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.width = width
        return _swiglu(gate_up, width)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        (gate_up,), width = ctx.saved_tensors, ctx.width
        gate, up = gate_up[..., :width], gate_up[..., width : 2 * width]
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up[..., :width], d_gate_up[..., width : 2 * width]
        if 2 * width < gate_up.shape[-1]:
            d_gate_up[..., 2 * width :] = 0
        torch.mul(d_out, up, out=d_up)  # the gradient of silu(gate)
        torch.ops.aten.silu_backward.grad_input(d_up, gate, grad_input=d_gate)
        torch.mul(d_out, F.silu(gate), out=d_up)
        return d_gate_up, None
