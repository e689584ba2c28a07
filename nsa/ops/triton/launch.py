"""Kernel launches: run one, or only record it; and the memory layouts that kernels read.

Under `recording` the real launchers run on `meta` tensors, so what the ahead-of-time compile gate
compiles is what a GPU would be given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa.ops.triton.configs import Config


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: run-time arguments by name, and compile-time constants."""

    kernel: Any  # the @triton.jit function
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    config: Config


_recorded: list[Launch] | None = None


def launch(
    kernel: Any,
    grid: Sequence[int],
    arguments: dict[str, Any],
    constants: dict[str, Any],
    config: Config,
) -> None:
    """Run `kernel` over `grid` with what its signature names; an empty grid runs nothing."""
    arguments, constants = (
        {name: x for name, x in given.items() if name in kernel.arg_names}
        for given in (arguments, constants)
    )
    if _recorded is not None:
        _recorded.append(Launch(kernel, tuple(grid), arguments, constants, config))
        return
    if 0 in grid:
        return
    tensor = next(x for x in arguments.values() if isinstance(x, Tensor))
    options = {"num_warps": config.warps, "num_stages": config.stages}
    with torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext():
        kernel[tuple(grid)](**arguments, **constants, **options)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches instead of running them; tensors may be on the `meta` device."""
    global _recorded
    assert _recorded is None
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


def token_rows(x: Tensor) -> tuple[Tensor, int]:
    """x [B, T, H, D] with each token's heads side by side, and the distance between two tokens.

    Only values need it: a projection to the values of three branches is split between them, and
    a copy of each would add 3% to the branches' memory traffic. All else is contiguous where it
    comes from (RoPE, pooling, our own outputs), so `contiguous()` copies nothing in training.
    """
    batch, seq_len, heads, size = x.shape
    side_by_side = x.stride(3) == 1 and x.stride(2) == size and x.stride(1) >= heads * size
    if side_by_side and (batch == 1 or x.stride(0) == seq_len * x.stride(1)):
        return x, x.stride(1)
    return x.contiguous(), heads * size
