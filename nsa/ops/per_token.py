"""Operations on each token alone: SwiGLU, RMSNorm with the residual add, in-place cross-entropy.

On a GPU kernels compute them, elsewhere PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.constants import IGNORE_INDEX
from nsa.ops import triton
from nsa.ops.backend import dispatch


def swiglu(gate_up: Tensor, width: int | None = None, *, backend: str = "auto") -> Tensor:
    """Return silu(gate) · up, [.., width], of gate_up [.., gate | up | padding].

    `width` is the columns of gate and of up, by default half of gate_up's. Kernels compute in
    float32, round once and have no second derivative. The backends "blockwise" and "reference" both
    run PyTorch.
    """
    columns = gate_up.shape[-1]
    if width is None and columns % 2 == 0:
        width = columns // 2
    if width is None or not 0 < 2 * width <= columns:
        raise ValueError(
            f"width = {width}: gate_up has {columns} columns; pass a width of at most half of them"
        )
    if dispatch(backend, "swiglu", gate_up, attention=False) is triton:
        from nsa.ops.triton.per_token import SwiGLUInputs, triton_swiglu

        return triton_swiglu(SwiGLUInputs(gate_up, width))
    return F.silu(gate_up[..., :width]) * gate_up[..., width : 2 * width]


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return (x + delta, rms_norm(x + delta) · weight), both [.., width]; delta None adds nothing.

    The norm of the rounded sum is computed in float32. On a GPU x and delta share one gradient
    tensor, with no second derivative. The backends "blockwise" and "reference" both run PyTorch.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; x requires {tuple(x.shape[-1:])}"
        )
    if delta is not None:
        if delta.shape != x.shape:
            raise ValueError(f"delta has shape {tuple(delta.shape)}; x requires {tuple(x.shape)}")
        dtype = torch.promote_types(x.dtype, delta.dtype)  # they differ under autocast
        x, delta = x.to(dtype), delta.to(dtype)
    if dispatch(backend, "add_rms_norm", x, attention=False) is triton:
        from nsa.ops.triton.per_token import AddRMSNormInputs, triton_add_rms_norm

        return triton_add_rms_norm(AddRMSNormInputs(x, delta, weight, eps))
    total = x if delta is None else x + delta
    return total, F.rms_norm(total, weight.shape, weight, eps)


# Logits per softmax of the PyTorch implementation: 4 MiB in float32, which a CPU's cache holds.
SOFTMAX_LOGITS = 2**20


def cross_entropy_(
    logits: Tensor, labels: Tensor, with_gradients: bool, *, backend: str = "auto"
) -> Tensor:
    """Return −log softmax(logits)[label], [N] in at least float32; 0 for label −100.

    logits [N, vocabulary], contiguous; labels [N]. `with_gradients` overwrites the logits with the
    gradient: p, minus 1 at the label; 0 for label −100. For a label outside the vocabulary PyTorch
    raises (on a GPU a device-side assert); the kernel returns NaN, and p as the gradient.
    """
    if dispatch(backend, "cross_entropy", logits, attention=False) is triton:
        from nsa.ops.triton import per_token as kernels

        return kernels.cross_entropy_(logits, labels, with_gradients)
    counted = labels != IGNORE_INDEX
    target = labels.where(counted, 0)[:, None]
    losses = []
    rows = max(1, SOFTMAX_LOGITS // logits.shape[1])
    for part, index, keep in zip(*(x.split(rows) for x in (logits, target, counted)), strict=True):
        log_p = F.log_softmax(part, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        label_log_p = log_p.gather(1, index)  # [rows, 1]
        losses.append(-label_log_p[:, 0].where(keep, 0))
        if with_gradients:
            gradient = log_p.exp_().scatter_(1, index, label_log_p.expm1())
            part.copy_(gradient.masked_fill_(~keep[:, None], 0))
    return torch.cat(losses)
