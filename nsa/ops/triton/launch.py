"""How every kernel is started: one place that runs a launch, or only records it.

Recording is how the ahead-of-time compile gate knows what the library can launch: it calls the
real launchers with tensors on the `meta` device, so what it compiles is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from nsa.ops.triton.configs import Config


@dataclass(frozen=True)
class Launch:
    """One start of a kernel: its run-time arguments by name, and what it is compiled for."""

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
    """Run `kernel` over `grid`; an empty grid runs nothing."""
    if _recorded is not None:
        _recorded.append(Launch(kernel, tuple(grid), arguments, constants, config))
        return
    if 0 in grid:
        return
    tensor = next(x for x in arguments.values() if isinstance(x, torch.Tensor))
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


def strides(**tensors: torch.Tensor) -> dict[str, int]:
    """`q` gives `q_b`, `q_t` and `q_h`: a [B, T, H, ...] tensor's first three strides by name."""
    return {
        f"{name}_{axis}": stride
        for name, x in tensors.items()
        for axis, stride in zip("bth", x.stride(), strict=False)
    }


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x [B, T, H, ...] as the kernels ask for it.

    The last dimension is contiguous, and the distance between two heads of a group fits 32 bits.
    """
    near = x.shape[2] * x.stride(2) < 2**31
    return x if x.stride(-1) == 1 and near else x.contiguous()
