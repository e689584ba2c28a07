"""Gradient check: one gradient for each parameter on every rank, and DeepSpeed averages them.

DDP crashed if a gradient arrived twice (parameter in two reentrant checkpoint segments) and hung if
a rank had no gradient for a parameter. `inspect_gradients` finds both before training starts.

Some releases of DeepSpeed reduced gradients wrongly under ZeRO-2, without an error.
`ReductionCheck` compares the first step's with a plain all-reduce before they reach the weights:

    backward   hooks on a few parameters: sum of this rank's gradients, fp32  ->  all-reduce, mean
    boundary   DeepSpeed's reduced gradient of each  ->  must be equal up to rounding
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from functools import partial
from itertools import accumulate
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import nn

from nsa.engine.cpu_collectives import RunAborted
from nsa.engine.zero_mode import ZeroMode

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
SPACED = 8  # ReductionCheck compares 8 parameters spaced evenly by size, and 8 by index
FIX_REDUCTION = (
    "install the DeepSpeed of launch/constraints.txt, or train with ds_configs/zero1_pcie.json"
)


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


def check_gradients(model: nn.Module, input_ids: torch.Tensor, mode: ZeroMode) -> list[str]:
    """Raise a ValueError for irregular gradients that are not tolerated; return notes on others."""
    twice, missing = inspect_gradients(model, input_ids)
    notes = []
    for names, tolerated, problem, fix in (
        (twice, mode.tolerates_twice, TWICE, FIX_TWICE),
        (missing, mode.tolerates_missing, MISSING, FIX_MISSING),
    ):
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            message = f"parameter {names[0]}{others} {problem}"
            if not tolerated:
                raise ValueError(f"{message}; {fix}")
            notes.append(f"{message}; the DeepSpeed config tolerates it")
    return notes


def _spread(sizes: list[int]) -> list[int]:
    """Return indices of parameters, SPACED of them evenly by size and SPACED by index.

    By size, so that no bucket of a large parameter is missed; by index, so that small ones occur.
    """
    ends = list(accumulate(sizes))
    by_size = {bisect_right(ends, ends[-1] * (2 * k + 1) // (2 * SPACED)) for k in range(SPACED)}
    by_number = {k * (len(sizes) - 1) // (SPACED - 1) for k in range(SPACED)}
    return sorted(by_size | by_number)


class ReductionCheck:
    """Compares DeepSpeed's reduced gradients of one step with a plain fp32 all-reduce.

    It only reads gradients, so the step stays bit-exact. DeepSpeed adds micro-batches and ranks in
    its own dtype. An addition rounds by at most eps/2 of the sum so far, with random sign, so n
    additions are allowed sqrt(n) · eps/2 of the summed norms (measured: a third of that).
    """

    def __init__(self, engine: Any) -> None:
        """Record the gradients of the next step, up to `compare` at its last micro-batch."""
        self._engine = engine
        parameters = [item for item in engine.module.named_parameters() if item[1].requires_grad]
        sizes = [getattr(parameter, "ds_numel", parameter.numel()) for _, parameter in parameters]
        self._checked = dict(parameters[index] for index in _spread(sizes))
        self._hooks = [
            parameter.register_hook(partial(self._add, name))
            for name, parameter in self._checked.items()
        ]
        self._reset()

    def _reset(self) -> None:
        """Set all sums to 0; that of a parameter without a gradient on this rank stays 0."""
        self._sums, self._norms = {}, {}
        for name, p in self._checked.items():
            shape = getattr(p, "ds_shape", p.shape)  # of ZeRO-3's partitioned parameters
            self._sums[name] = torch.zeros(shape, dtype=torch.float32, device=p.device)
            self._norms[name] = torch.zeros((), device=p.device)

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        self._sums[name] += gradient
        self._norms[name] += gradient.norm(dtype=torch.float32)

    @torch.no_grad()
    def compare(self) -> None:
        """Raise RunAborted on all ranks if a gradient differs; call after each backward pass.

        If a gradient is not finite, the next step is compared instead.
        """
        if not self._hooks or not self._engine.is_gradient_accumulation_boundary():
            return
        ranks = dist.get_world_size()
        norms = torch.stack(list(self._norms.values()))  # [checked]
        dist.all_reduce(norms)
        expected, actual, errors = [], [], []
        for name, parameter in self._checked.items():
            plain = self._sums[name]
            dist.all_reduce(plain)
            plain /= ranks
            reduced = safe_get_full_grad(parameter)
            reduced = torch.zeros_like(plain) if reduced is None else reduced.float()
            expected.append(plain.norm())
            actual.append(reduced.norm())
            errors.append((reduced - plain).norm())
        figures = torch.stack([norms / ranks, *map(torch.stack, (expected, actual, errors))])
        figures.nan_to_num_(math.inf, math.inf)  # [4, checked]; MAX may drop NaN
        dist.all_reduce(figures, op=dist.ReduceOp.MAX)  # so that all ranks decide alike
        dtype = self._engine.communication_data_type
        fp16 = torch.float16 in (dtype, *(p.dtype for p in self._checked.values()))
        must_be_finite = figures[: 3 if fp16 else 2]  # in fp16 DeepSpeed's sum may overflow
        if not must_be_finite.isfinite().all():
            self._reset()
            return
        for hook in self._hooks:
            hook.remove()
        roundings = self._engine.gradient_accumulation_steps() + ranks
        for (name, parameter), figure in zip(
            self._checked.items(), figures.T.tolist(), strict=True
        ):
            added, norm, reduced_norm, error = figure
            eps = max(torch.finfo(dtype).eps, torch.finfo(parameter.dtype).eps)
            if not error <= 0.5 * eps * math.sqrt(roundings) * added:
                raise RunAborted(
                    f"DeepSpeed {deepspeed.__version__}: its reduced gradient of {name} differs "
                    f"from a plain fp32 all-reduce by {error:.3g} (norms {reduced_norm:.3g} and "
                    f"{norm:.3g}); the weights are unchanged; {FIX_REDUCTION}"
                )
        self._hooks, self._sums, self._checked = [], {}, {}
