"""Command-line flags shared by several benchmarks, their value types, and named head shapes."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa.dtypes import DTYPES
from nsa.validation import words

if TYPE_CHECKING:
    from nsa.model import ModelConfig


@dataclass(frozen=True)
class Shape:
    """Query heads, key/value heads, key size, value size."""

    name: str
    heads: int
    kv_heads: int
    key: int
    value: int

    @classmethod
    def of(cls, config: ModelConfig) -> Shape:
        """Return the shape of a model's heads."""
        value = config.value_dim or config.head_dim
        return cls("", config.heads, config.kv_heads, config.head_dim, value)

    def __str__(self) -> str:
        return self.name

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.heads, self.kv_heads, self.key, self.value


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("m7c", 12, 2, 64, 64),
        Shape("16x4x64", 16, 4, 64, 64),
        Shape("64x4x128", 64, 4, 128, 128),
        Shape("paper", 64, 4, 192, 128),
    )
}


def shapes(text: str) -> list[Shape]:
    """Parse "m7c,64x4x128": names, or heads x KV heads x key size [x value size]."""
    return [_shape(name) for name in words(text)]


def _shape(name: str) -> Shape:
    if name in SHAPES:
        return SHAPES[name]
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2,3}", name):
        heads, kv_heads, key, *value = map(int, name.split("x"))
        if heads % kv_heads == 0:
            return Shape(name, heads, kv_heads, key, *(value or [key]))
    raise argparse.ArgumentTypeError(
        f"{name!r} is not a shape; use one of {', '.join(SHAPES)}, or heads x KV heads x key size "
        "[x value size], for example 12x2x64, heads a multiple of KV heads"
    )


def lengths(text: str) -> list[int]:
    """Parse "1k,2k,500": token counts, k = 1,024."""
    for name in words(text):
        if re.fullmatch(r"[1-9]\d*k?", name) is None:
            raise argparse.ArgumentTypeError(f"{name!r} is not a length; use 500, or 8k for 8,192")
    return [int(n.rstrip("k")) * (1024 if n.endswith("k") else 1) for n in words(text)]


def add_gpu_flags(
    parser: argparse.ArgumentParser,
    lengths_default: str,
    *,
    shapes_default: str = "",
    tokens: int = 65_536,
    tokens_help: str = "tokens per batch, about (%(default)s)",
    backend: bool = True,
) -> None:
    """Add a GPU benchmark's flags: head shapes if they have a default, else a model's size."""
    add = parser.add_argument
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU if present")
    add("--dtype", choices=tuple(DTYPES), help="default: bf16, on a CPU fp32")
    about = "time per figure, about, but three rounds or more (%(default)s)"
    add("--seconds", type=float, default=0.5, help=about)
    add("--rounds", type=int, default=30, help="rounds per figure, at most (%(default)s)")
    add("--limit", type=float, help="start no new case after this many seconds")
    if shapes_default:
        about = "m7c, 16x4x64, 64x4x128, paper, or heads x KV heads x sizes (%(default)s)"
        add("--shapes", type=shapes, default=shapes_default, help=about)
    else:
        add("--layers", type=int, default=12, help="transformer blocks")
        add("--vocab", type=int, default=50_304, help="rows of the embedding")
    add("--lengths", type=lengths, default=lengths_default, help="sequence lengths (%(default)s)")
    add("--tokens", type=int, default=tokens, help=tokens_help)
    if backend:
        about = "NSA's backend; default: triton on a GPU, blockwise on a CPU"
        add("--backend", choices=("auto", "triton", "blockwise", "reference"), help=about)
