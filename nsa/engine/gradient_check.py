"""Gradient check: every parameter gets exactly one gradient per backward pass, on every rank.

DDP crashed if a gradient arrived twice (parameter in two reentrant checkpoint segments) and hung if
a rank had no gradient for a parameter. This check finds both before training starts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from nsa.engine.ds_config import Tolerance

TWICE = "gets its gradient more than once in one backward pass"
FIX_TWICE = (
    "use model.activation_checkpointing=non_reentrant (or none, selective), move the parameter out "
    "of the checkpointed segments, or use ds_configs/zero1_pcie.json, which tolerates it"
)
MISSING = "gets no gradient on some rank"
FIX_MISSING = (
    "make the loss depend on every parameter for any input, or use ds_configs/zero0_debug.json, "
    "which tolerates it"
)


@dataclass(frozen=True)
class GradientReport:
    """Names of parameters, over all ranks."""

    twice: list[str]  # gradient arrives more than once on some rank
    missing: list[str]  # no gradient on some rank


def inspect_gradients(model: nn.Module, input_ids: torch.Tensor) -> GradientReport:
    """Run one backward pass on `input_ids` [B, T] and count the gradients of each parameter."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    fired = torch.zeros(len(parameters), dtype=torch.int64)

    def count(index: int) -> None:
        fired[index] += 1

    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: count(index))
        for index, parameter in enumerate(parameters.values())
    ]
    try:
        model(input_ids, labels=input_ids).backward()
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    most = fired.to(input_ids.device, copy=True)
    least = most.clone()
    if dist.is_initialized():
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return GradientReport(
        twice=[name for name, times in zip(parameters, most.tolist(), strict=True) if times > 1],
        missing=[name for name, times in zip(parameters, least.tolist(), strict=True) if times < 1],
    )


def check_gradients(report: GradientReport, tolerance: Tolerance) -> list[str]:
    """Raise a ValueError for irregular gradients that are not tolerated; return notes on others."""
    notes = []
    for names, tolerated, problem, fix in (
        (report.twice, tolerance.double_fire, TWICE, FIX_TWICE),
        (report.missing, tolerance.missing_on_some_ranks, MISSING, FIX_MISSING),
    ):
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            message = f"parameter {names[0]}{others} {problem}"
            if not tolerated:
                raise ValueError(f"{message}; {fix}")
            notes.append(f"{message}; the DeepSpeed config tolerates it")
    return notes
