"""In-place cross-entropy: the gradient overwrites the logits.

One kernel on a GPU, PyTorch elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.constants import IGNORE_INDEX
from nsa.ops import triton
from nsa.ops.backend import dispatch

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
        from nsa.ops.triton import cross_entropy as kernels

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
            p_minus_1 = log_p.exp_().scatter_(1, index, label_log_p.expm1())
            part.copy_(p_minus_1.masked_fill_(~keep[:, None], 0))
    return torch.cat(losses)
