"""Tile sizes: at most four candidates for each kernel, and the choice that a launch takes.

Nothing is tuned during a run. A launch takes the first candidate, or the one that
`python -m nsa.bench tune` measured to be the fastest on this GPU and stored on disk. Where an
operation has several implementations, the one to take is chosen in the same way, by name.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from nsa.atomic_io import atomic_write_text


@dataclass(frozen=True)
class Config:
    """Rows are queries times heads of a group; keys are those of one step of a kernel's loop."""

    rows: int
    keys: int
    warps: int
    stages: int


Option = TypeVar("Option", Config, str)
Choice = Callable[[str, list[Any]], Any]
_override: Choice | None = None


def choose_config(operation: str, sizes: tuple[int, int], dtype: torch.dtype) -> Config:
    """The tile sizes of an operation at these key and value sizes (each a power of two)."""
    return choose(operation, candidates(operation, sizes, dtype), sizes, dtype)


def choose(
    operation: str, options: list[Option], sizes: tuple[int, int], dtype: torch.dtype
) -> Option:
    """The option that was measured to be the fastest, or the first."""
    if _override is not None:
        return _override(operation, options)
    tuned = _tuned().get(tuning_key(operation, sizes, dtype))
    return next((option for option in options if _as_json(option) == tuned), options[0])


# The window and the compressed branch are `band_*`. A row `band_forward` would change theirs alone;
# `forward` serves several kernels.
# By kind of kernel, then by the larger head size: (rows, keys, warps, stages), the likeliest first.
# 192 is for keys of up to 256 with values of up to 128, as in the paper.
# All of them compile within the limits of sm_80, sm_90 and sm_100 (python -m nsa.bench aot --full).
# The rows of `select` are queries alone, and its keys are selection blocks. A step over one block
# has no more keys than the block.
_NARROW: dict[str, dict[int, list[tuple[int, int, int, int]]]] = {  # bf16, fp16
    "forward": {
        64: [(128, 64, 8, 3), (64, 64, 4, 3), (128, 32, 4, 3)],
        128: [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3)],
        192: [(128, 32, 8, 2), (64, 32, 8, 2)],
        256: [(64, 32, 8, 2)],
    },
    "queries": {
        64: [(128, 64, 8, 3), (64, 64, 4, 3), (128, 64, 8, 2)],
        128: [(128, 64, 8, 3), (64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 3)],
        192: [(64, 16, 4, 2), (64, 32, 8, 2)],
        256: [(64, 32, 8, 2)],
    },
    "keys": {
        64: [(64, 128, 8, 3), (64, 64, 4, 3), (32, 64, 4, 3)],
        128: [(32, 128, 8, 3), (64, 128, 8, 2), (32, 64, 4, 2)],
        192: [(32, 64, 8, 2), (32, 32, 8, 2)],
        256: [(32, 32, 8, 2)],
    },
    "selected_keys": {
        64: [(64, 64, 4, 3), (32, 64, 4, 3)],
        128: [(32, 64, 4, 3), (64, 64, 8, 3), (32, 64, 4, 2)],
        192: [(32, 64, 8, 2), (32, 32, 8, 2)],
        256: [(32, 32, 8, 2)],
    },
    "gathered": {
        64: [(32, 64, 2, 3), (64, 64, 4, 3), (16, 64, 2, 3), (128, 64, 8, 3)],
        128: [(32, 64, 4, 3), (64, 64, 4, 3), (16, 64, 2, 3), (128, 64, 8, 2)],
        256: [(16, 32, 4, 2)],
    },
    "gathered_decode": {
        128: [(16, 64, 2, 3), (16, 64, 4, 3)],
        256: [(16, 32, 4, 2)],
    },
    "select": {
        64: [(64, 128, 8, 3), (64, 64, 8, 3), (32, 64, 4, 3), (32, 32, 4, 3)],
        128: [(64, 128, 8, 3), (64, 64, 8, 3), (32, 64, 4, 3)],
        256: [(32, 32, 4, 2)],
    },
}
_WIDE: dict[str, dict[int, list[tuple[int, int, int, int]]]] = {  # fp32, in three passes
    "forward": {
        64: [(64, 32, 8, 2), (32, 32, 4, 2)],
        128: [(16, 64, 8, 1), (16, 32, 4, 1)],
        256: [(16, 16, 8, 1)],
    },
    "queries": {64: [(32, 32, 4, 2)], 128: [(16, 64, 8, 1)], 256: [(16, 16, 8, 1)]},
    "keys": {64: [(32, 32, 4, 2)], 128: [(16, 16, 8, 1)], 256: [(16, 16, 8, 1)]},
    "gathered": {128: [(16, 64, 8, 1)], 256: [(16, 16, 8, 1)]},
    "select": {64: [(32, 32, 8, 2)], 128: [(16, 64, 8, 1)], 256: [(16, 32, 8, 1)]},
}


def candidates(operation: str, sizes: tuple[int, int], dtype: torch.dtype) -> list[Config]:
    """At most four; `operation` is a branch and a kernel: `band_forward`."""
    table = _WIDE if dtype.itemsize > 2 else _NARROW
    branch, _, kernel = operation.partition("_")
    by_size = next(table[name] for name in (operation, branch, kernel) if name in table)
    size = 192 if max(sizes) > 128 >= sizes[1] > 0 else max(sizes)
    size = min(limit for limit in by_size if limit >= size)
    return [Config(*numbers) for numbers in by_size[size]]


def tuning_key(operation: str, sizes: tuple[int, int], dtype: torch.dtype) -> str:
    """The key that a measured choice is stored under."""
    return f"{operation} {sizes[0]}x{sizes[1]} {str(dtype).removeprefix('torch.')}"


@contextmanager
def override_choices(choice: Choice) -> Iterator[None]:
    """Let `choice(operation, options)` decide for a while, for tuning and compile checks."""
    global _override
    before, _override = _override, choice
    try:
        yield
    finally:
        _override = before


def tuned_path() -> Path:
    """The file of measured choices for this GPU and this Triton."""
    import triton

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return cache / "nsa-m7c" / f"{device} triton {triton.__version__}.json".replace("/", "-")


def save_tuned(choices: Mapping[str, Config | str]) -> Path:
    """Add measured choices to the file; returns its path."""
    path = tuned_path()
    stored = _read(path) | {key: _as_json(option) for key, option in choices.items()}
    atomic_write_text(path, json.dumps(stored, indent=1, sort_keys=True) + "\n")
    _tuned.cache_clear()
    return path


def _as_json(option: Config | str) -> list[int] | str:
    return option if isinstance(option, str) else list(astuple(option))


@lru_cache(maxsize=1)
def _tuned() -> dict[str, list[int] | str]:
    return _read(tuned_path())


def _read(path: Path) -> dict[str, list[int] | str]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        warnings.warn(f"{path} is ignored: {error}; tune again or delete it", stacklevel=2)
        return {}
