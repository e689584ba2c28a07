"""Before training: does every parameter get one gradient per backward pass, on every rank?

A parameter that fires twice (used by two reentrant segments) or that some rank leaves without a
gradient is what made earlier runs crash or hang in their first backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from nsa.engine.ds_config import Tolerance

MEND_TWICE = (
    "use model.activation_checkpointing=non_reentrant (or none, selective), keep what is shared "
    "outside the segments, or choose a DeepSpeed config that tolerates it: "
    "ds_configs/zero1_pcie.json"
)
MEND_MISSING = (
    "every parameter must take part in the loss whatever the input; or choose a DeepSpeed config "
    "that tolerates it: ds_configs/zero0_debug.json"
)


@dataclass(frozen=True)
class GradientReport:
    """What one backward pass did, over all ranks."""

    twice: list[str]  # parameters that fired more than once on some rank
    missing: list[str]  # parameters that some rank left without a gradient


def inspect_gradients(model: nn.Module, input_ids: torch.Tensor) -> GradientReport:
    """Run one backward pass on `input_ids` [B, T] and count how often each parameter fires."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    fired = torch.zeros(len(names), dtype=torch.int64)
    hooks = []

    def count(index: int) -> None:
        fired[index] += 1

    parameters = dict(model.named_parameters())
    for index, name in enumerate(names):
        hooks.append(
            parameters[name].register_post_accumulate_grad_hook(lambda _, index=index: count(index))
        )
    try:
        model(input_ids, labels=input_ids).backward()
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    most, least = fired.to(input_ids.device), fired.to(input_ids.device)
    if dist.is_initialized():
        most, least = most.clone(), least.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return GradientReport(
        twice=[name for name, times in zip(names, most.tolist(), strict=True) if times > 1],
        missing=[name for name, times in zip(names, least.tolist(), strict=True) if times < 1],
    )


def check_gradients(report: GradientReport, tolerance: Tolerance) -> list[str]:
    """Refuse what the chosen DeepSpeed config cannot live with; return what it only tolerates."""
    notes = []
    for found, tolerated, what, fix in (
        (
            report.twice,
            tolerance.double_fire,
            "gets its gradient more than once in one backward pass",
            MEND_TWICE,
        ),
        (
            report.missing,
            tolerance.missing_on_some_ranks,
            "gets no gradient on some rank",
            MEND_MISSING,
        ),
    ):
        if not found:
            continue
        others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        message = f"parameter {found[0]}{others} {what}"
        if not tolerated:
            raise ValueError(f"{message}; {fix}")
        notes.append(f"{message}; the DeepSpeed config tolerates it")
    return notes
