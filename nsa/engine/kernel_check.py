"""Kernel check on all ranks: an operation that fails on one runs in PyTorch on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from nsa.doctor.node import OK, SKIP, WARN, Check
from nsa.dtypes import DTYPES
from nsa.engine.config import RunConfig
from nsa.engine.cpu_collectives import CpuCollectives
from nsa.model.kernel_check import KernelResult, check_kernels, problems_of
from nsa.monitor.artifacts import finite_number
from nsa.ops.backend import disable

NAME = "kernels"


def check_on_all_ranks(
    config: RunConfig, device: torch.device, collectives: CpuCollectives
) -> tuple[Check, list[dict[str, Any]]]:
    """Compare the run's kernels with PyTorch; return the result, and a row per operation."""
    backend = config.model.attention.backend
    skipped = {
        "no GPU here": device.type != "cuda",
        f"model.attention.backend={backend}": backend not in ("auto", "triton"),
        "monitor.kernel_check=false": not config.monitor.kernel_check,
    }
    for reason, applies in skipped.items():
        if applies:
            return Check(NAME, SKIP, reason), []
    packed, dtype = config.data.packing == "documents", DTYPES[config.train.precision]
    results = check_kernels(config.model, dtype, device, packed, config.data.seq_len)
    check = fall_back(collectives.gather(results, list[KernelResult]), backend)
    rows = [asdict(result) for result in results]
    # JSON has neither NaN, of a wrong kernel, nor infinity, where a kernel raised.
    finite = ({name: finite_number(row[name]) for name in ("error", "allowed")} for row in rows)
    return check, [row | figures for row, figures in zip(rows, finite, strict=True)]


def fall_back(results: Sequence[Sequence[KernelResult]], backend: str) -> Check:
    """Disable each operation that failed on any rank; with backend `triton`, refuse the run."""
    problems = problems_of(results)
    if not problems:
        slowest = max(sum(result.seconds for result in of_rank) for of_rank in results)
        return Check(NAME, OK, f"{len(results[0])} operations equal PyTorch's, {slowest:.1f} s")
    detail = "; ".join(f"{operation}: {reason}" for operation, reason in problems.items())
    if backend == "triton":
        raise ValueError(
            f"model.attention.backend = 'triton': {detail}; set it to auto, which takes "
            "PyTorch for these operations"
        )
    disable(problems)
    fix = "they run in PyTorch, correct but slower; report this line and env.json"
    return Check(NAME, WARN, detail, fix)
