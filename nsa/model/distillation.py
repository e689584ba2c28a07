"""Distillation: KL(teacher ‖ model) of next-token distributions, without the logits of all tokens.

    per chunk of tokens:   both models' logits, float32 log-softmax
                           KL of each token;  d_logits = p_model - p_teacher
                           d_hidden, d_weight from that gradient; the logits are freed

As in `loss`, the forward pass computes the gradients and the backward pass scales them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.constants import IGNORE_INDEX
from nsa.model.loss import add_part, chunk_rows, mean_over_labels, scaled
from nsa.model.sequence_parallel import SequenceParallel

Head = tuple[Tensor, Tensor]  # a head's input [N, width] and weight [V, width]
LOG_PROBABILITIES = 4  # a chunk has 1/4 of the tokens: two models in float32, and temporaries


def distillation_loss(
    model: Head, teacher: Head, labels: Tensor, sequence: SequenceParallel | None = None
) -> Tensor:
    """Return the mean of KL(teacher ‖ model) in nats over the labels [N] that are not -100.

    The gradient reaches the model's tensors only. 0 without labels; with `sequence`, the mean is
    over all ranks that split the sequence.
    """
    total = _SummedKL.apply(*model, *(x.detach() for x in teacher), labels)
    return mean_over_labels(total, labels, sequence)


@torch.no_grad()
def token_divergence(model: Head, teacher: Head, labels: Tensor) -> Tensor:
    """Return [N, 4]: both losses, KL(teacher ‖ model), and 1 where both predict the same token.

    0 for label -100; in at least float32.
    """
    rows = []
    for part, log_p, log_t in _log_probabilities(model, teacher):
        counted = labels[part] != IGNORE_INDEX
        index = labels[part].where(counted, 0)[:, None]
        losses = (-x.gather(-1, index)[:, 0] for x in (log_p, log_t))
        same = log_p.argmax(-1) == log_t.argmax(-1)
        kl = (log_t.exp() * (log_t - log_p)).sum(-1)
        rows.append(torch.stack([*losses, kl, same.to(kl.dtype)], -1) * counted[:, None])
    return torch.cat(rows)


def _log_probabilities(model: Head, teacher: Head) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield each chunk of tokens with both models' log-probabilities, [rows, V]."""
    rows = max(1, chunk_rows(*model) // LOG_PROBABILITIES)
    dtype = torch.promote_types(model[0].dtype, torch.float32)
    for start in range(0, len(model[0]), rows):
        part = slice(start, start + rows)
        logits = (F.linear(hidden[part], weight) for hidden, weight in (model, teacher))
        log_p, log_t = (F.log_softmax(x, -1, dtype=dtype) for x in logits)
        yield part, log_p, log_t


class _SummedKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        labels: Tensor,
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        # torch.autocast refuses `meta`, on which nsa plan counts tensors.
        device = hidden.device.type
        with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            pairs = _log_probabilities((hidden, weight), (teacher_hidden, teacher_weight))
            for part, log_p, log_t in pairs:
                counted = (labels[part] != IGNORE_INDEX)[:, None]
                p_t = log_t.exp()
                total += (p_t * (log_t - log_p)).where(counted, 0).sum()
                if not any(ctx.needs_input_grad):
                    continue
                d_logits = (log_p.exp_() - p_t).where(counted, 0).to(hidden.dtype)
                torch.mm(d_logits, weight, out=d_hidden[part])
                last = part.stop >= len(hidden)
                gradient = d_logits.T @ hidden[part]
                d_weight = gradient if part.start == 0 else add_part(d_weight, gradient, last)
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return *(scaled(gradient, scale) for gradient in ctx.saved_tensors), None, None, None
