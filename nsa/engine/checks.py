"""Checks on all ranks before step 1: one gradient for each parameter, and kernels equal PyTorch.

DDP crashed if a gradient arrived twice (parameter in two reentrant checkpoint segments) and hung if
a rank had no gradient for a parameter. An operation whose kernel fails on one rank runs in PyTorch
on all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nsa.doctor.node import OK, SKIP, WARN, Check
from nsa.dtypes import DTYPES
from nsa.engine.config import RunConfig
from nsa.engine.process_group import CpuCollectives
from nsa.model.kernel_check import KernelResult, check_kernels, problems_of
from nsa.monitor.artifacts import finite_number
from nsa.ops.backend import disable

TWICE = (
    "gets its gradient more than once in one backward pass; use "
    "model.activation_checkpointing=non_reentrant (or none, selective), or move the parameter out "
    "of the checkpointed segments"
)
MISSING = "gets no gradient on some rank; make the loss depend on every parameter for any input"


def inspect_gradients(model: nn.Module, input_ids: torch.Tensor) -> tuple[list[str], list[str]]:
    """Run one backward pass on `input_ids` [B, T] and count the gradients of each parameter.

    Return the names of those with more than one on some rank, and of those with none on some rank.
    """
    parameters = dict(model.named_parameters())
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
    twice = [name for name, times in zip(parameters, most.tolist(), strict=True) if times > 1]
    missing = [name for name, times in zip(parameters, least.tolist(), strict=True) if times < 1]
    return twice, missing


def check_gradients(model: nn.Module, input_ids: torch.Tensor) -> None:
    """Raise a ValueError that names a parameter with several gradients, or none on some rank."""
    twice, missing = inspect_gradients(model, input_ids)
    for names, problem in ((twice, TWICE), (missing, MISSING)):
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(f"parameter {names[0]}{others} {problem}")


def check_kernels_on_all_ranks(
    config: RunConfig, device: torch.device, collectives: CpuCollectives
) -> tuple[Check, list[dict[str, Any]]]:
    """Compare the run's kernels with PyTorch; return the result, and a row per operation."""
    backend = config.model.attention.backend
    if device.type != "cuda":
        return Check("kernels", SKIP, "no GPU here"), []
    if backend not in ("auto", "triton"):
        return Check("kernels", SKIP, f"model.attention.backend={backend}"), []
    packed, dtype = config.data.packing == "documents", DTYPES[config.train.precision]
    results = check_kernels(config.model, dtype, device, packed, config.data.seq_len)
    check = fall_back(collectives.gather(results, list[KernelResult]), backend)
    rows = [asdict(result) for result in results]
    for row in rows:  # JSON has no NaN (of a wrong kernel) and no infinity (of one that raised)
        row["error"] = finite_number(row["error"])
        row["allowed"] = finite_number(row["allowed"])
    return check, rows


def fall_back(results: Sequence[Sequence[KernelResult]], backend: str) -> Check:
    """Disable each operation that failed on any rank; with backend `triton`, refuse the run."""
    problems = problems_of(results)
    if not problems:
        slowest = max(sum(result.seconds for result in of_rank) for of_rank in results)
        detail = f"{len(results[0])} operations equal PyTorch's, {slowest:.1f} s"
        return Check("kernels", OK, detail)
    detail = "; ".join(f"{operation}: {reason}" for operation, reason in problems.items())
    if backend == "triton":
        raise ValueError(
            f"model.attention.backend = 'triton': {detail}; set it to auto, which takes "
            "PyTorch for these operations"
        )
    disable(problems)
    fix = "they run in PyTorch, correct but slower; report this line and env.json"
    return Check("kernels", WARN, detail, fix)
