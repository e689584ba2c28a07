"""Record the launches of kernels, with or without running them.

Under `recording` the library's launchers run on `meta` tensors, so the compile check compiles what
a GPU would run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from nsa.ops.triton import launch
from nsa.ops.triton.configs import Config


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: run-time arguments by name, and compile-time constants."""

    kernel: Any  # the @triton.jit function
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    config: Config


@contextmanager
def recording(dry: bool = True) -> Iterator[list[Launch]]:
    """Collect launches; with `dry` nothing runs, and tensors may be on the `meta` device."""
    launches, run = list[Launch](), launch._run

    def record(
        kernel: Any, grid: Sequence[int], values: tuple, runtime: int, config: Config
    ) -> None:
        items = list(zip(kernel.arg_names, values, strict=True))
        named, constants = dict(items[:runtime]), dict(items[runtime:])
        launches.append(Launch(kernel, tuple(grid), named, constants, config))
        if not dry:
            run(kernel, grid, values, runtime, config)

    with mock.patch.object(launch, "_run", record):
        yield launches
