"""Tile sizes: at most four candidates for each kernel, of which a launch takes the first that runs.

`python -m tests.bench module --tile N` measures the others; nothing is tuned during a run.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Config(NamedTuple):
    """A kernel's tile sizes and compile options."""

    rows: int  # queries times query heads per KV head
    keys: int  # of one step of the kernel's loop
    warps: int
    stages: int
    maxnreg: int | None = None  # registers per thread, at most: more programs run at a time

    def options(self) -> dict[str, int]:
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}

    def __str__(self) -> str:
        return "/".join(str(number) for number in self if number is not None)


Key = tuple[str, tuple[int, int], torch.dtype, str]  # operation, padded head sizes, dtype, chip


class Tile(Config):
    """A config, and the key for which it was chosen."""

    key: Key | None = None


MAX_CANDIDATES = 4
_too_large: dict[Key, set[Config]] = {}  # candidates that could not launch in this process


def choose_config(operation: str, sizes: tuple[int, int], like: Tensor) -> Config:
    """Return an operation's tile sizes for these key and value sizes (each a power of two).

    `like` gives dtype and device. `operation` names a branch and a kernel: `window_keys`.
    """
    return _first_that_runs((operation, sizes, like.dtype, chip_of(like.device)))


@lru_cache(maxsize=1024)
def _first_that_runs(key: Key) -> Config:
    excluded = _too_large.get(key, ())
    tile = Tile(*next(config for config in candidates(*key) if config not in excluded))
    tile.key = key
    return tile


def exclude(tile: Config, kernel: str, reason: str) -> bool:
    """From now on take the operation's next candidate, because this tile cannot launch here.

    Return False if `choose_config` did not choose the tile. Raise a ValueError if no candidate is
    left; the tile is then not excluded, so that a later call raises the same error.
    """
    key = tile.key if isinstance(tile, Tile) else None
    if key is None:
        return False
    excluded = _too_large.setdefault(key, set())
    left = [c for c in candidates(*key) if c != tile and c not in excluded]
    if not left:
        raise ValueError(
            f"{kernel}: none of its tile sizes runs on this GPU ({reason}); set "
            "model.attention.backend=blockwise"
        )
    excluded.add(Config(*tile))
    _first_that_runs.cache_clear()
    warnings.warn(
        f"{kernel}: tile {tile} does not run on this GPU ({reason}); taking {left[0]}", stacklevel=2
    )
    return True


# By kind of kernel, then by the larger head size: (rows, keys, warps, stages), the one expected to
# be fastest first. Several branches share `forward`, `queries` and `keys`; an entry
# `window_forward` would override `forward` for the window. `gathered` is the selected branch on
# long sequences, with small tiles (selected.py), and `gathered_decode` is decoding. Size 192 stands
# for keys of 129 to 256 with values of up to 128; the paper has 192 and 128. In `select`, rows are
# queries and keys are selection blocks; `select_summed` ranks a block by several keys of an index.
_HALF_PRECISION: dict[str, dict[int, list[tuple[int, int, int, int]]]] = {  # bf16, fp16
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
    "selector": {64: [(32, 64, 4, 2)], 128: [(32, 32, 4, 2)], 256: [(16, 32, 4, 2)]},
}
_FLOAT32: dict[str, dict[int, list[tuple[int, int, int, int]]]] = {  # fp32, in three passes
    "forward": {
        64: [(64, 32, 8, 2), (32, 32, 4, 2)],
        128: [(16, 64, 8, 1), (16, 32, 4, 1)],
        256: [(16, 16, 8, 1)],
    },
    "queries": {64: [(32, 32, 4, 2)], 128: [(16, 64, 8, 1)], 256: [(16, 16, 8, 1)]},
    "keys": {64: [(32, 32, 4, 2)], 128: [(16, 16, 8, 1)], 256: [(16, 16, 8, 1)]},
    "gathered": {128: [(16, 64, 8, 1)], 256: [(16, 16, 8, 1)]},
    "select": {64: [(32, 32, 8, 2)], 128: [(16, 64, 8, 1)], 256: [(16, 32, 8, 1)]},
    "selector": {64: [(16, 32, 4, 2)], 128: [(16, 32, 4, 1)], 256: [(16, 32, 8, 1)]},
}

_HALF_PRECISION["gated_keys"] = _HALF_PRECISION["keys"] | {64: [(64, 128, 8, 3), (64, 64, 8, 3)]}

# A chip's own candidates, tried before the general ones: by operation or kind of kernel, and head
# size. The table of sm_90 is measured (docs/benchmarks/gpu.md), the table of sm_80 estimated from
# counts (traffic.md), and `small` is for chips with 64 to 100 KB of shared memory for a program.
_BY_CHIP: dict[str, dict[tuple[str, int], list[tuple[int, ...]]]] = {
    "sm_80": {
        ("window_forward", 64): [(128, 32, 4, 2), (128, 32, 4, 3)],
        ("gated_forward", 64): [(128, 32, 4, 2)],
        ("selected_forward", 64): [(128, 32, 4, 3)],
        ("window_queries", 64): [(128, 32, 4, 3)],
        ("gated_queries", 64): [(128, 32, 4, 3)],
        ("queries", 128): [(128, 32, 8, 3)],
        ("keys", 128): [(64, 64, 8, 3)],
        ("gated_keys", 64): [(64, 64, 4, 3)],
        ("gated_keys", 128): [(64, 64, 8, 3)],
        ("selected_queries", 64): [(128, 32, 4, 3)],
        ("selected_keys", 64): [(32, 64, 4, 3)],
        ("selected_keys", 128): [(64, 64, 8, 3)],
        ("select", 64): [(32, 128, 8, 3)],
        ("select", 128): [(64, 128, 8, 2)],
    },
    "sm_90": {
        ("forward", 64): [(128, 64, 8, 3, 128)],
        ("gated_forward", 64): [(128, 64, 8, 2, 128), (128, 64, 8, 3, 128)],
        ("queries", 64): [(64, 64, 4, 3, 168), (128, 64, 8, 3, 128)],
        ("gathered", 64): [(64, 64, 4, 3)],
        ("gathered_queries", 64): [(64, 64, 4, 3, 168)],
        ("gated_keys", 64): [(64, 64, 4, 3)],
        ("select", 64): [(64, 128, 4, 3)],
        ("select_summed", 64): [(32, 64, 4, 3)],
        ("select_summed", 128): [(64, 64, 8, 3)],
        ("gated_forward", 128): [(128, 64, 8, 2)],
        ("selected_forward", 128): [(64, 64, 4, 2)],
        ("queries", 128): [(64, 64, 4, 2)],
        ("gathered", 128): [(64, 64, 4, 2), (64, 64, 4, 3)],
    },
    "small": {
        ("forward", 64): [(64, 64, 4, 2), (128, 32, 4, 2)],
        ("forward", 128): [(64, 64, 4, 2), (64, 32, 4, 2)],
        ("queries", 64): [(64, 64, 4, 2)],
        ("queries", 128): [(64, 32, 4, 2), (32, 64, 4, 2)],
        ("keys", 64): [(32, 64, 4, 2)],
        ("keys", 128): [(32, 64, 4, 2), (32, 64, 8, 2)],
        ("gated_keys", 64): [(32, 64, 4, 2)],
        ("gated_keys", 128): [(32, 64, 4, 2), (32, 64, 8, 2)],
        ("selected_keys", 64): [(32, 64, 4, 2)],
        ("selected_keys", 128): [(32, 64, 4, 2), (32, 64, 8, 2)],
        ("gathered", 64): [(64, 64, 4, 2)],
        ("gathered", 128): [(64, 64, 4, 2), (64, 32, 4, 2)],
        ("select", 64): [(32, 64, 4, 2)],
        ("select", 128): [(32, 64, 4, 2), (32, 32, 4, 2)],
    },
}
CHIPS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")  # tests compile for them
LARGE = ("sm_100", "sm_103", "sm_110")  # as much shared memory as sm_90
AMD = {"gfx942": "gfx942", "gfx950": "gfx942"}  # AMD's chips -> the chip whose tiles they take


def candidates(
    operation: str, sizes: tuple[int, int], dtype: torch.dtype, chip: str = "sm_80"
) -> list[Config]:
    """Return at most four tile sizes, the one expected to be fastest on this chip first."""
    branch, _, kernel = operation.partition("_")
    similar_chip = chip
    if chip not in _BY_CHIP:
        similar_chip = "sm_90" if chip in LARGE else "small"
    half = dtype.itemsize <= 2
    table, by_chip = (_HALF_PRECISION, _BY_CHIP[similar_chip]) if half else (_FLOAT32, {})
    kind = next(name for name in (operation, branch, kernel) if name in table)
    key_size, value_size = sizes
    size = max(sizes)
    if key_size > 128 and 0 < value_size <= 128:  # 0: a kernel without values
        size = 192
    size = min(limit for limit in table[kind] if limit >= size)
    own = by_chip.get((operation, size)) or by_chip.get((kind, size), [])
    if chip != similar_chip:  # a limit on registers holds only for the chip that it is measured on
        own = [numbers[:4] for numbers in own]
    general = table[kind][size]
    # AMD's chips take `small`, and if it has nothing (`own`) the general candidates, which are for
    # larger chips: with two stages, which fit, and four warps, which leave a thread 512 registers.
    if chip in AMD:
        general = [] if own else [(r, k, min(w, 4), min(s, 2)) for r, k, w, s in general]
    return [Config(*numbers) for numbers in dict.fromkeys([*own, *general])][:MAX_CANDIDATES]


@lru_cache
def chip_of(device: torch.device) -> str:
    """Return this device's chip as the tables name it; sm_80 without a GPU."""
    if device.type != "cuda":
        return "sm_80"
    major, minor = torch.cuda.get_device_capability(device)
    name = amd_chip(device)
    return f"sm_{10 * major + minor}" if name is None else AMD[name]


def amd_chip(device: torch.device) -> str | None:
    """Return the chip of an AMD GPU, such as gfx942; None on other devices.

    A ROCm build of torch calls its devices `cuda`, and gives gfx942 the compute capability 9.4.
    """
    if device.type != "cuda" or torch.version.hip is None:
        return None
    return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]


def warp_size(device: torch.device) -> int:
    return 64 if chip_of(device) in AMD else 32
