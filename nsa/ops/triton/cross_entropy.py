"""Cross-entropy of logits, and its gradient in their place: one program per row, two passes.

The first pass keeps a running maximum and sum, the second overwrites the logits. So few rows are
in progress at a time that the second pass reads most of them from L2.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from nsa.constants import IGNORE_INDEX
from nsa.ops.triton.common import kernel
from nsa.ops.triton.configs import Config, warp_size
from nsa.ops.triton.launch import launch, next_power_of_2

COLUMNS = 8192  # logits of a row per step: 16 bytes of bf16 per thread of 32 warps


@kernel
def cross_entropy_kernel(
    logits, labels, losses, vocabulary,
    GRADIENT: tl.constexpr, IGNORE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """-log p[label] of one row, and with GRADIENT p - 1 at the label and p elsewhere."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    label = tl.load(labels + row)
    i = tl.arange(0, COLUMNS)
    if label == IGNORE:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for first in range(0, vocabulary, COLUMNS):
                zeros = tl.zeros([COLUMNS], logits.dtype.element_ty)
                tl.store(logits + first + i, zeros, mask=first + i < vocabulary)
    else:
        # Read before the second pass overwrites it. A label outside the vocabulary gives NaN: an
        # error would have to wait for the device.
        known = (label >= 0) & (label < vocabulary)
        at_label = tl.load(logits + label, mask=known, other=float("nan")).to(tl.float32)
        m = -3.4e38  # finite, so that m - m is 0 where all logits so far are -inf
        total = 0.0
        for first in range(0, vocabulary, COLUMNS):
            inside = first + i < vocabulary
            x = tl.load(logits + first + i, mask=inside, other=float("-inf"))
            x = x.to(tl.float32)  # [COLUMNS]
            m_new = tl.maximum(m, tl.max(x, 0))
            total = total * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), 0)
            m = m_new
        tl.store(losses + row, m - at_label + tl.log(total))
        if GRADIENT:
            scale = 1.0 / total
            for first in range(0, vocabulary, COLUMNS):
                inside = first + i < vocabulary
                x = tl.load(logits + first + i, mask=inside, other=float("-inf")).to(tl.float32)
                p = tl.exp(x - m) * scale  # [COLUMNS]
                p = tl.where(first + i == label, p - 1.0, p)
                tl.store(logits + first + i, p.to(logits.dtype.element_ty), mask=inside)


def cross_entropy_(logits: Tensor, labels: Tensor, with_gradients: bool) -> Tensor:
    """-log softmax(logits)[label] in float32, [rows]; `with_gradients` overwrites the logits."""
    rows, vocabulary = logits.shape
    assert logits.is_contiguous()
    losses = logits.new_empty(rows, dtype=torch.float32)
    columns = min(COLUMNS, next_power_of_2(vocabulary))
    warps = max(1, columns // (8 * warp_size(logits.device)))
    launch(
        cross_entropy_kernel, (rows,), Config(1, columns, warps, 1),
        logits=logits, labels=labels.contiguous(), losses=losses, vocabulary=vocabulary,
        GRADIENT=with_gradients, IGNORE=IGNORE_INDEX, COLUMNS=columns,
    )  # fmt: skip
    return losses
