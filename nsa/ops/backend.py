"""Backend dispatch: `auto` takes Triton if it supports a call, else falls back to blockwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from nsa.ops import blockwise, reference, triton

BACKENDS = ("auto", "triton", "blockwise", "reference")
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_fallbacks: Counter[tuple[str, str, str]] = Counter()
_disabled: dict[str, str] = {}  # operations whose kernels must not run here, and why


class UnsupportedCall(ValueError):
    """A backend that was requested by name cannot run a call."""


def dispatch(
    backend: str,
    operation: str,
    x: Tensor,
    *others: Tensor,
    attention: bool = True,
    limit: str | None = None,
) -> ModuleType:
    """Return the backend module for a call; raise if a backend requested by name cannot run.

    Device and dtype of `x` decide, and with `attention` also its shape and the head sizes of
    `others`. `limit` is a reason why this operation's kernels cannot run, or None. An operation
    with a single PyTorch implementation runs it whenever the result is not `triton`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: choose one of {', '.join(BACKENDS)}")
    if x.dtype not in SUPPORTED_DTYPES:
        name = "q" if attention else "the input"
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUPPORTED_DTYPES)
        raise ValueError(f"{operation}: {name} has dtype {x.dtype}; it must be one of {dtypes}")
    if backend == "reference":
        return reference
    if backend == "blockwise":
        return blockwise
    by_name = backend == "triton"
    reason = triton.unsupported_reason(x, *others, by_name=by_name, attention=attention)
    reason = reason or limit or _disabled.get(operation)
    if reason is None:
        return triton
    if by_name:
        raise UnsupportedCall(
            f"backend = 'triton' does not support {operation}: {reason}; use 'auto'"
        )
    _count_fallback(operation, reason)
    return blockwise


@triton.constant_result
def _count_fallback(operation: str, reason: str) -> None:
    _fallbacks[operation, "triton", reason] += 1


def disable(reasons: Mapping[str, str]) -> None:
    """From now on let `auto` take PyTorch for these operations, and `triton` refuse them."""
    _disabled.clear()
    _disabled.update(reasons)


def fallback_counts() -> dict[tuple[str, str, str], int]:
    """Return how often `auto` fell back, by (operation, skipped backend, reason).

    Compiled code counts once, when it is compiled.
    """
    return dict(_fallbacks)


def reset_fallback_counts() -> None:
    _fallbacks.clear()
