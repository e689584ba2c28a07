"""Kernel launches through a cache of compiled kernels that is faster than Triton's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from inspect import signature
from operator import itemgetter
from typing import Any

import torch

from nsa.ops.custom_op import TileTooLarge
from nsa.ops.triton.configs import Config, exclude

_compiled: dict[tuple[Any, ...], Any] = {}
MAX_COMPILED = 4096  # entries; keys contain integers that differ from batch to batch
SCALARS = {int, float, bool, type(None)}  # `isinstance(x, Tensor)` takes several times as long


def launch(kernel: Any, grid: Sequence[int], config: Config, /, **arguments: Any) -> None:
    """Run `kernel` over `grid` with the arguments and constants of its signature.

    An empty grid is skipped.
    """
    get_values, runtime = _signature(kernel.fn)
    values = get_values(arguments)
    assert len(values) == len(arguments), f"{kernel.fn.__name__} does not take all of {arguments}"
    if 0 in grid:
        return
    device = values[0].device  # every kernel's first argument is a tensor
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _run(kernel, grid, values, runtime, config)
    else:
        _run(kernel, grid, values, runtime, config)


@cache
def _signature(function: Any) -> tuple[Callable[[dict[str, Any]], tuple[Any, ...]], int]:
    """Return a function that orders a kernel's arguments, and how many are not constants."""
    names = list(signature(function).parameters)
    constants = ["constexpr" in str(function.__annotations__.get(name)) for name in names]
    assert constants == sorted(constants), f"{function.__name__}: constants must come last"
    return itemgetter(*names), constants.count(False)


def _run(kernel: Any, grid: Sequence[int], values: tuple, runtime: int, config: Config) -> None:
    """Run the compiled kernel that is cached for these values; on a miss, let Triton get it.

    Triton's own look-up takes 10 us, more than the rest of a launch. The key here is finer than
    Triton's, which only distinguishes integers that are 1, a multiple of 16, or neither.
    """
    traits: list[Any] = []
    for x in values[:runtime]:
        if type(x) in SCALARS:
            traits.append(x)
        else:
            aligned = x.data_ptr() % 16 == 0
            traits.append(x.dtype if aligned else (x.dtype, "unaligned"))
    if torch.version.hip:  # AMD's compiler takes 32-bit offsets into tensors of less than 2 GB
        tensors = (x for x in values[:runtime] if type(x) not in SCALARS)
        traits += [x.untyped_storage().nbytes() < 2**31 for x in tensors]
    key = kernel.fn, values[0].device, config, values[runtime:], *traits
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*values)  # it takes a grid of three sizes
        return
    compiled = _compile_and_run(kernel, grid, values, config)
    if compiled is not None:  # Triton's interpreter compiles nothing
        if len(_compiled) >= MAX_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled


def _compile_and_run(kernel: Any, grid: Sequence[int], values: tuple, config: Config) -> Any:
    """Run `kernel`; raise TileTooLarge if the GPU or the compiler refuses this tile.

    Both refuse before the kernel runs: shared memory and registers are checked as it is loaded.
    """
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        return kernel[tuple(grid)](*values, **config.options())
    except (OutOfResources, PTXASError, CompilationError) as error:
        if not exclude(config, kernel.fn.__name__, _cause(error)):
            raise
        raise TileTooLarge from error


def _cause(error: BaseException) -> str:
    """Return the line that says why the GPU or the compiler refused a kernel.

    An error in a function that the kernel calls is the cause of another error, whose
    `error_message` is None: its text is source code and a caret. The first lines of an error of
    ptxas do not name the reason.
    """
    while getattr(error, "error_message", "") is None and error.__cause__ is not None:
        error = error.__cause__
    message = getattr(error, "error_message", "")
    lines = [line.strip() for line in (message or str(error)).splitlines() if line.strip(" ^")]
    reasons = [x for x in lines if x.startswith("ptxas") and "ptxas info" not in x] or lines
    if not reasons:
        return type(error).__name__
    return reasons[-1 if message is None else 0]  # -1: of the source code, above the caret


def cdiv(total: int, size: int) -> int:
    """`triton.cdiv`, which takes 1 us when called from the host."""
    return -(-total // size)


def next_power_of_2(n: int) -> int:
    """`triton.next_power_of_2`, which is as slow to call from the host."""
    return 1 << (n - 1).bit_length()


@lru_cache(maxsize=256)
def padded_size(size: int) -> int:
    """Return the padded head size that a matrix product takes: a power of two, 16 or more."""
    return max(16, next_power_of_2(size))
