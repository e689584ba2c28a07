"""Gradient check before training starts: one gradient for each parameter on every rank.

DDP crashed if a gradient arrived twice (parameter in two reentrant checkpoint segments) and hung if
a rank had no gradient for a parameter.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn

TWICE = "gets its gradient more than once in one backward pass"
FIX_TWICE = (
    "use model.activation_checkpointing=non_reentrant (or none, selective), or move the parameter "
    "out of the checkpointed segments"
)
MISSING = "gets no gradient on some rank"
FIX_MISSING = "make the loss depend on every parameter for any input"


def inspect_gradients(model: nn.Module, input_ids: torch.Tensor) -> tuple[list[str], list[str]]:
    """Run one backward pass on `input_ids` [B, T] and count the gradients of each parameter.

    Return the names of those with more than one on some rank, and of those with none on some rank.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    fired: Counter[str] = Counter()
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name]))
        for name, parameter in parameters.items()
    ]
    try:
        model(input_ids, labels=input_ids).backward()
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    most = torch.tensor([fired[name] for name in parameters], device=input_ids.device)
    least = most.clone()
    if dist.is_initialized():
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return (
        [name for name, times in zip(parameters, most.tolist(), strict=True) if times > 1],
        [name for name, times in zip(parameters, least.tolist(), strict=True) if times < 1],
    )


def check_gradients(model: nn.Module, input_ids: torch.Tensor) -> None:
    """Raise a ValueError that names a parameter with several gradients, or none on some rank."""
    twice, missing = inspect_gradients(model, input_ids)
    for names, problem, fix in ((twice, TWICE, FIX_TWICE), (missing, MISSING, FIX_MISSING)):
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(f"parameter {names[0]}{others} {problem}; {fix}")
