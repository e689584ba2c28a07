"""Backend dispatch: `auto` takes the fastest backend that supports a call, and counts fallbacks."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import torch
from torch import Tensor

from nsa.ops import blockwise, reference, triton

BACKENDS = ("auto", "triton", "blockwise", "reference")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_fallbacks: Counter[tuple[str, str, str]] = Counter()


def dispatch(backend: str, operation: str, q: Tensor, *others: Tensor) -> ModuleType:
    """The module that implements `operation`; a backend requested by name is returned or raises."""
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: choose one of {', '.join(BACKENDS)}")
    if q.dtype not in DTYPES:
        raise ValueError(
            f"{operation}: q has dtype {q.dtype}; attention takes "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
        )
    if backend == "reference":
        return reference
    if backend == "blockwise":
        return blockwise
    reason = triton.unsupported_reason(q, *others, by_name=backend == "triton")
    if reason is None:
        return triton
    if backend == "triton":
        raise ValueError(f"backend = 'triton' does not support {operation}: {reason}; use 'auto'")
    _count(operation, "triton", reason)
    return blockwise


@torch.compiler.assume_constant_result
def _count(operation: str, backend: str, reason: str) -> None:
    _fallbacks[operation, backend, reason] += 1


def runs_fused(backend: str, q: Tensor, *others: Tensor) -> bool:
    """Whether the kernels run all branches, so that one operation can also mix them."""
    by_name = backend == "triton"
    return (by_name or backend == "auto") and not triton.unsupported_reason(
        q, *others, by_name=by_name
    )


def fallback_counts() -> dict[tuple[str, str, str], int]:
    """How often `auto` could not take a backend, by (operation, backend, reason).

    Compiled code counts when it is compiled.
    """
    return dict(_fallbacks)


def reset_fallback_counts() -> None:
    """Set all counts to zero."""
    _fallbacks.clear()
