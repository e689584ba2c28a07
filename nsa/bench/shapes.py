"""What the GPU benchmarks run over: functions, head shapes, lengths, as their flags spell them."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

PARTS = ("compressed_attention", "select_blocks", "selected_attention", "window_attention")
FUNCTIONS = (*PARTS, "nsa_attention")
KINDS = ("module", "same-pattern", "selected", "parts")
SELECTIONS = ("random", "local")


@dataclass(frozen=True)
class Shape:
    """Query heads, key/value heads, key size, value size."""

    name: str
    heads: int
    kv_heads: int
    key: int
    value: int

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.heads // self.kv_heads


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
    """ "m7c,64x4x128": known names, or heads x KV heads x key size [x value size]."""
    return [_shape(name) for name in names(text)]


def _shape(name: str) -> Shape:
    if name in SHAPES:
        return SHAPES[name]
    numbers = [int(number) for number in name.split("x") if number.isdigit()]
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2,3}", name) is None or numbers[0] % numbers[1]:
        raise argparse.ArgumentTypeError(
            f"{name!r} is no shape; give one of {', '.join(SHAPES)}, or heads x KV heads x key "
            "size [x value size] such as 12x2x64, heads a multiple of KV heads"
        )
    return Shape(name, numbers[0], numbers[1], numbers[2], numbers[-1])


def lengths(text: str) -> list[int]:
    """ "1k,2k,500": tokens, k for 1,024."""
    found = []
    for name in names(text):
        if re.fullmatch(r"[1-9]\d*k?", name) is None:
            raise argparse.ArgumentTypeError(f"{name!r} is no length; give 500, or 8k for 8,192")
        found.append(int(name.rstrip("k")) * (1024 if name.endswith("k") else 1))
    return found


def names(text: str) -> list[str]:
    """Words with commas between, each once."""
    return list(dict.fromkeys(name for name in text.split(",") if name))
