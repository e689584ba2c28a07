"""Losses of the head, chunked so that the logits of all tokens never exist at once.

    cross-entropy, per chunk of tokens:
        logits = hidden @ weightᵀ             in the model's dtype
        float32 softmax, −log p[label];       the gradient overwrites the logits
        d_hidden, d_weight from that gradient; the logits are freed

    distillation, per chunk of tokens:
        both models' logits, float32 log-softmax
        KL(teacher ‖ model) of each token;    d_logits = p_model − p_teacher
        d_hidden, d_weight from that gradient; the logits are freed

The forward pass computes the gradients, so no logit is computed twice; the backward pass scales
them. torch.nn.functional.linear_cross_entropy (torch 2.13) works likewise, but rounds the loss and
the sums of d_weight to bf16. Liger's kernel synchronizes with the host each step and splits M7C's
16,384 tokens into 64 products, each of which reads and writes all of d_weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.constants import IGNORE_INDEX
from nsa.ops.per_token import cross_entropy_

Head = tuple[Tensor, Tensor]  # a head's input [N, width] and weight [V, width]

# Logits per chunk: 1 GiB in bf16, so two chunks for M7C's 16,384 tokens. Fewer chunks are faster:
# adding a chunk to d_weight moves 10 to 16 bytes per element of d_weight. M7C has only the last
# addition, which moves 6 (0.2 GB); after an earlier one the last moves 8.
CHUNK_LOGITS = 2**29
CHUNK_LOGITS_CPU = 2**27
# Distillation cuts a chunk into this many parts: it holds the logits of two models in float32.
DISTILLATION_PARTS = 4
FIRST_BUCKET = 64  # positions; each later bucket has as many as all earlier ones together


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of −log softmax(hidden @ weightᵀ)[label] over the labels that are not −100.

    hidden [N, width], weight [vocabulary, width], labels [N]. The mean is 0-dim, in float32 or
    float64, and 0 if all labels are −100.
    """
    with_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    total, _, _ = loss_and_gradients(hidden, weight, labels, with_gradients)
    return mean_over_labels(total, labels)


def mean_over_labels(total: Tensor, labels: Tensor) -> Tensor:
    """Divide a sum by the number of labels that are not −100; 0 without any."""
    return total / (labels != IGNORE_INDEX).sum().clamp(min=1)


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return −log softmax(hidden @ weightᵀ)[label], [N] in at least float32; 0 for label −100."""
    rows = chunk_rows(hidden, weight)
    losses = [
        cross_entropy_(F.linear(chunk, weight), target, with_gradients=False)
        for chunk, target in zip(hidden.split(rows), labels.split(rows), strict=True)
    ]
    return torch.cat(losses)


def bucket_edges(seq_len: int) -> list[int]:
    """Return where buckets of positions begin, and the end: 0, 64, 128, 256, …, seq_len."""
    doublings = max(0, math.ceil(math.log2(seq_len / FIRST_BUCKET)))
    return [0, *(FIRST_BUCKET << number for number in range(doublings)), seq_len]


def bucket_of(position: Tensor, edges: list[int]) -> Tensor:
    """Return the number of each position's bucket; `edges` is from `bucket_edges`."""
    return torch.bucketize(position, torch.tensor(edges[1:-1], device=position.device), right=True)


@torch.library.custom_op("nsa::linear_cross_entropy", mutates_args=())
def loss_and_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, with_gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss and its gradients, empty unless `with_gradients`."""
    losses = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
    d_hidden = hidden.new_empty(hidden.shape if with_gradients else 0)
    d_weight = weight.new_empty(0)  # the first chunk sets it
    if with_gradients and not len(hidden):  # there is no chunk
        d_weight = torch.zeros_like(weight)
    rows = chunk_rows(hidden, weight)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            logits = F.linear(hidden[chunk], weight)
            losses[chunk] = cross_entropy_(logits, labels[chunk], with_gradients)
            if with_gradients:
                torch.mm(logits, weight, out=d_hidden[chunk])
                part = logits.T @ hidden[chunk]
                last = start + rows >= len(hidden)
                d_weight = part if start == 0 else add_part(d_weight, part, last)
            del logits  # frees them before the next chunk's are allocated
    return losses.sum(), d_hidden, d_weight


def add_part(total: Tensor, part: Tensor, last: bool) -> Tensor:
    """Return total + part: in float32, or after the last chunk in the part's dtype."""
    if last:  # one operation, which adds in float32 and rounds once
        return torch.add(total, part, out=part)
    return total.to(torch.promote_types(part.dtype, torch.float32)).add_(part)


def chunk_rows(hidden: Tensor, weight: Tensor) -> int:
    """Return the tokens per chunk, so that chunks are as equal as possible."""
    limit = CHUNK_LOGITS_CPU if hidden.is_cpu else CHUNK_LOGITS
    chunks = max(1, -(-len(hidden) * len(weight) // limit))
    return max(1, -(-len(hidden) // chunks))


@loss_and_gradients.register_fake
def _(
    hidden: Tensor, weight: Tensor, labels: Tensor, with_gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    total = hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    d_hidden = hidden.new_empty(hidden.shape if with_gradients else 0)
    return total, d_hidden, weight.new_empty(weight.shape if with_gradients else 0)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for the non-differentiable outputs
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, scale: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    return *(scaled(gradient, scale) for gradient in ctx.saved_tensors), None, None


def scaled(gradient: Tensor, scale: Tensor | None) -> Tensor | None:
    """Return gradient · scale, rounded once; a 0-dim scale would first be rounded to 16 bits."""
    if scale is None:
        return None
    return torch.mul(gradient, scale.view(1, 1), out=torch.empty_like(gradient))


loss_and_gradients.register_autograd(_backward, setup_context=_setup_context)


def distillation_loss(model: Head, teacher: Head, labels: Tensor) -> Tensor:
    """Return the mean of KL(teacher ‖ model) in nats over the labels [N] that are not -100.

    Only the model's tensors get a gradient. The mean is 0 if all labels are -100.
    """
    total = _SummedKL.apply(*model, *(x.detach() for x in teacher), labels)
    return mean_over_labels(total, labels)


@torch.no_grad()
def token_divergence(model: Head, teacher: Head, labels: Tensor) -> Tensor:
    """Return [N, 4]: both losses, KL(teacher ‖ model), and 1 where both predict the same token.

    The numbers are in at least float32, and 0 for label -100.
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
    rows = max(1, chunk_rows(*model) // DISTILLATION_PARTS)
    dtype = torch.promote_types(model[0].dtype, torch.float32)
    for start in range(0, len(model[0]), rows):
        part = slice(start, start + rows)
        logits = (F.linear(hidden[part], weight) for hidden, weight in (model, teacher))
        log_p, log_t = (F.log_softmax(x, -1, dtype=dtype) for x in logits)
        yield part, log_p, log_t


class _SummedKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        hidden, weight, teacher_hidden, teacher_weight, labels = tensors
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
