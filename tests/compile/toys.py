"""Toy attention kernels, each good or bad in one way, launched as the library launches its own.

Import it only without TRITON_INTERPRET: interpreted kernels cannot be compiled.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import launch


@triton.jit
def attend(
    q, k, o, keys, row, scale,
    SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.arange(0, ROWS), tl.arange(0, SIZE)
    q_tile = tl.load(q + rows[:, None] * row + columns)
    total = tl.zeros((ROWS, SIZE), tl.float32)
    for start in range(0, keys, KEYS):
        at = start + tl.arange(0, KEYS)
        k_tile = tl.load(k + at[:, None] * row + columns, mask=at[:, None] < keys, other=0.0)
        weights = tl.exp(tl.dot(q_tile, k_tile.T, input_precision=PRECISION) * scale)
        total = tl.dot(weights.to(k_tile.dtype), k_tile, total, input_precision=PRECISION)
    tl.store(o + rows[:, None] * row + columns, total)


@triton.jit
def multiply_and_print(
    x, y, o, inner, row,
    SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.arange(0, ROWS), tl.arange(0, SIZE)
    total = tl.zeros((ROWS, SIZE), tl.float32)
    for start in range(0, inner, KEYS):
        at = start + tl.arange(0, KEYS)
        x_tile = tl.load(x + rows[:, None] * inner + at).to(tl.bfloat16)
        y_tile = tl.load(y + at[:, None] * row + columns)
        total = tl.dot(x_tile, y_tile, total)
        tl.device_print("row", start)
    tl.store(o + rows[:, None] * row + columns, total)


@triton.jit
def take_all(
    x, y, integers, single, one, sixteens, odd, large, scale, nothing, flag, WIDTH: tl.constexpr
):
    pass


def attention(
    config: Config,
    dtype: torch.dtype = torch.bfloat16,
    size: int = 64,
    precision: str | None = None,
) -> None:
    """Launch one tile of attention over 1,000 keys."""
    keys = 1000
    q, k = (torch.empty(length, size, dtype=dtype, device="meta") for length in (config.rows, keys))
    o = torch.empty(config.rows, size, device="meta")
    arguments = {"q": q, "k": k, "o": o, "keys": keys, "row": size, "scale": 0.125}
    constants = {"SIZE": size, "ROWS": config.rows, "KEYS": config.keys, "PRECISION": precision}
    launch(attend, (1,), config, **arguments, **constants)


def serialised() -> None:
    """Products with a call between them, for which Hopper must end each."""
    x = torch.empty(64, 1024, dtype=torch.int8, device="meta")
    y = torch.empty(1024, 64, dtype=torch.bfloat16, device="meta")
    arguments = {"x": x, "y": y, "o": torch.empty(64, 64, device="meta"), "inner": 1024, "row": 64}
    constants = {"SIZE": 64, "ROWS": 64, "KEYS": 64}
    launch(multiply_and_print, (1,), Config(64, 64, 4, 3), **arguments, **constants)


def too_deep() -> None:
    """Four stages of 128 keys of 256 two-byte numbers: 192 KB, too much for sm_80 only."""
    attention(Config(16, 128, 4, 4), size=256)


def every_kind_of_argument(device: str) -> dict[str, Any]:
    """Arguments of `take_all`: everything that Triton distinguishes when it compiles."""
    x = torch.empty(64, dtype=torch.bfloat16, device=device)
    return {
        "x": x,
        "y": x[1:],
        "integers": torch.empty(8, dtype=torch.int64, device=device),
        "single": torch.empty(8, dtype=torch.float32, device=device),
        "one": 1,
        "sixteens": 48,
        "odd": 1000,
        "large": 2**31,
        "scale": 0.125,
        "nothing": None,
        "flag": True,
    }
