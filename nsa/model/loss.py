"""The loss over the vocabulary, from hidden states: logits of all tokens never exist at once.

    for some tokens:      logits = hidden @ weightᵀ              in the model's dtype
        for a few rows:   softmax in float32, −log p[label];     logits become their own gradient
        d_hidden, d_weight from that gradient; the logits are dropped

Gradients are made on the way forward, so that no logit is computed twice, and scaled on the way
back. torch.nn.functional.linear_cross_entropy (torch 2.13) does so too, but rounds the loss and the
sums of d_weight to bf16. Liger's kernel makes the host wait each step and divides M7C's 2,048
tokens into 64 products, each of which reads and writes all of d_weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from nsa.constants import IGNORE_INDEX
from nsa.model.sequence_parallel import SequenceParallel

# Logits of one product: 2,668 tokens of M7C's vocabulary, 256 MiB in bf16. Smaller products would
# spend their time on the sum of d_weight.
CHUNK_LOGITS = 2**27
# Of these, how many are in float32 at a time: 32 MiB, enough to keep a GPU busy for a launch.
SOFTMAX_LOGITS = 2**23
SOFTMAX_LOGITS_CPU = 2**20  # on a CPU


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, sequence: SequenceParallel | None = None
) -> Tensor:
    """The mean of −log softmax(hidden @ weightᵀ)[label] over the labels that are not −100, or 0.

    hidden [N, width], weight [vocabulary, width], labels [N]; 0-dim, in float32 or float64. With
    `sequence` over the labels of all ranks that share it, each of which gets the same mean.
    """
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    total, _, _ = loss_and_gradients(hidden, weight, labels, learns)
    count = (labels != IGNORE_INDEX).sum()
    return total / count.clamp(min=1) if sequence is None else sequence.mean(total, count)


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """−log softmax(hidden @ weightᵀ)[label] of each label, [N] in at least float32; 0 for −100."""
    kept = labels != IGNORE_INDEX
    target = labels.where(kept, 0)[:, None]
    rows = max(1, CHUNK_LOGITS // len(weight))
    log_p = [
        _log_softmax(F.linear(some, weight), index, learns=False)[:, 0]
        for some, index in zip(hidden.split(rows), target.split(rows), strict=True)
    ]
    return -torch.cat(log_p).where(kept, 0)


@torch.library.custom_op("nsa::linear_cross_entropy", mutates_args=())
def loss_and_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, learns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses and its gradients for hidden and weight; both empty unless `learns`."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    products = -(-len(hidden) * len(weight) // CHUNK_LOGITS)
    tokens = -(-len(hidden) // products)
    kept = (labels != IGNORE_INDEX)[:, None]
    target = labels[:, None].where(kept, 0)
    log_p = torch.empty_like(target, dtype=dtype)
    d_hidden = hidden.new_empty(hidden.shape if learns else 0)
    d_weight = weight.new_empty(0)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), tokens):
            some = slice(start, start + tokens)
            logits = F.linear(hidden[some], weight)
            log_p[some] = _log_softmax(logits, target[some], learns)
            if learns:
                torch.mul(logits @ weight, kept[some], out=d_hidden[some])
                part = logits.T @ (hidden[some] * kept[some])
                d_weight = part if start == 0 else d_weight.to(dtype).add_(part)
            del logits  # before there are the next
    return -(log_p * kept).sum(), d_hidden, d_weight.to(weight.dtype)


@loss_and_gradients.register_fake
def _(
    hidden: Tensor, weight: Tensor, labels: Tensor, learns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    total = hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    if not learns:
        return total, hidden.new_empty(0), weight.new_empty(0)
    return total, hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


@register_flop_formula(torch.ops.nsa.linear_cross_entropy)
def _operations(
    hidden: torch.Size, weight: torch.Size, labels: torch.Size, learns: bool, **_: object
) -> int:
    """What FlopCounterMode counts: a product forward, two for the gradients."""
    return 2 * hidden.numel() * weight[0] * (3 if learns else 1)


def _log_softmax(logits: Tensor, target: Tensor, learns: bool) -> Tensor:
    """Its value at each row's target, [tokens, 1], in float32 for a few rows at a time.

    Where the model learns, logits become the gradient of its negative: p, less one at the target.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    rows = max(1, (SOFTMAX_LOGITS_CPU if logits.is_cpu else SOFTMAX_LOGITS) // logits.shape[1])
    chosen = []
    for some, index in zip(logits.split(rows), target.split(rows), strict=True):
        log_p = F.log_softmax(some, -1, dtype=dtype)
        chosen.append(log_p.gather(1, index))
        if learns:
            some.copy_(log_p.exp_().scatter_(1, index, chosen[-1].expm1()))
    return torch.cat(chosen)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # would make zeros for them all the same
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, scale: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    return *(_scaled(gradient, scale) for gradient in ctx.saved_tensors), None, None


def _scaled(gradient: Tensor, scale: Tensor | None) -> Tensor | None:
    """gradient · scale, rounded once: a 0-dim scale would first be rounded to bf16 or fp16."""
    if scale is None:
        return None
    return torch.mul(gradient, scale.view(1, 1), out=torch.empty_like(gradient))


loss_and_gradients.register_autograd(_backward, setup_context=_setup_context)
