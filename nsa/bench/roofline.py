"""`python -m nsa.bench roofline`: least FLOPs and bytes of each kernel, and their time floor.

Counts, not measurements: matrix products, exponentials and bytes that no kernel for the job could
save. The floor is the slowest of the three on a chip. With --token: the bytes that one decoded
token must read.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nsa.bench.options import Shape, lengths, shapes
from nsa.bench.results import print_table
from nsa.spec import NSASpec

TOKENS = 65_536  # of a batch, about
BF16, FP32 = 2, 4  # bytes; int32 takes as many as float32


@dataclass(frozen=True)
class Chip:
    """Peak rates per second: bf16 FLOPs, memory bytes, exponentials."""

    flops: float
    bytes: float
    exps: float  # 16 per clock and multiprocessor


# A100: data sheet (80 GB). H200: products and memory as measured with large matrices and copies.
# H100: the H200's processor with the memory of the data sheet (SXM, 80 GB).
CHIPS = {
    "A100": Chip(312e12, 2.0e12, 16 * 108 * 1.41e9),
    "H100": Chip(790e12, 3.35e12, 16 * 132 * 1.785e9),
    "H200": Chip(790e12, 4.3e12, 16 * 132 * 1.785e9),
}


@dataclass(frozen=True)
class Work:
    """The least that one launch must compute and move."""

    kernel: str
    flops: float
    exps: float
    bytes: float

    def floor(self, chip: Chip) -> tuple[float, str]:
        """Seconds, and what they are spent on."""
        return max(
            (self.flops / chip.flops, "products"),
            (self.exps / chip.exps, "exponentials"),
            (self.bytes / chip.bytes, "memory"),
        )


def work(shape: Shape, batch: int, seq_len: int, spec: NSASpec) -> list[Work]:
    """Every kernel of one layer's attention, forward and backward, bf16, without packing."""
    tokens = batch * seq_len
    rows = tokens * shape.heads
    q, o = rows * shape.key * BF16, rows * shape.value * BF16
    row = rows * FP32  # an lse, or a row sum
    pair = tokens * shape.kv_heads * (shape.key + shape.value) * BF16
    compressed = pair * spec.compressed_len(seq_len) / seq_len
    index = tokens * shape.kv_heads * spec.select_top * FP32
    visible = [spec.visible_compressed(t) for t in range(seq_len)]
    keys = {
        "compressed": sum(visible),
        "window": sum(map(spec.visible_window, range(seq_len))),
        "selected": sum(map(spec.visible_selected, range(seq_len))),
    }
    memory = {"compressed": compressed, "window": pair, "selected": pair + index}
    # Selection needs each visible block's score once, except while all candidates are selected.
    ranked = sum(n for t, n in enumerate(visible) if t // spec.select_len >= spec.select_top)
    scores = batch * shape.heads * ranked
    result = [Work("select", 2 * scores * shape.key, scores, q + compressed / 2 + row + index)]
    for branch, count in keys.items():
        pairs = batch * shape.heads * count
        key, value, kv = 2 * pairs * shape.key, 2 * pairs * shape.value, memory[branch]
        result += [
            Work(f"{branch} forward", key + value, pairs, q + kv + o + row),
            Work(f"{branch} queries", 2 * key + value, pairs, 2 * q + o + kv + 2 * row),
            Work(f"{branch} keys", 2 * key + 2 * value, pairs, q + o + 2 * kv + 2 * row),
        ]
    gates = 3 * rows * BF16
    return [
        *result,
        Work("mix", 0, 0, 4 * o + gates),
        Work("gate rows", 0, 0, 4 * o + 2 * gates + 9 * row),
    ]


@dataclass(frozen=True)
class Token:
    """Bytes of one layer's attention for one decoded token of one sequence, bf16."""

    compressed: int
    selected: int
    window: int
    dense: int  # what dense attention reads
    splitting: int  # scores, partial outputs and importances: written and read again
    programs: tuple[int, int]  # before and after blocks are selected

    @property
    def read(self) -> int:
        """What NSA must read of the cache."""
        return self.compressed + self.selected + self.window


def token(shape: Shape, seq_len: int, spec: NSASpec) -> Token:
    """The newest of `seq_len` tokens."""
    from nsa.ops.triton.decode import PART

    pair = shape.kv_heads * (shape.key + shape.value) * BF16
    last = seq_len - 1
    keys, blocks = spec.visible_compressed(last), spec.select_blocks_len(seq_len)
    window = spec.visible_window(last)
    before, after = -(-keys // PART), min(blocks, spec.select_top) + -(-window // PART)
    parts = (before + after) * shape.heads * (shape.value + 1)
    ranked = blocks > spec.select_top
    scores = keys * shape.heads + blocks * shape.kv_heads if ranked else 0
    return Token(
        compressed=keys * pair,
        selected=spec.visible_selected(last) * pair,
        window=window * pair,
        dense=seq_len * pair,
        splitting=2 * FP32 * (parts + scores),
        programs=(before * shape.kv_heads, after * shape.kv_heads),
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    about = "head shapes (%(default)s)"
    parser.add_argument("--shapes", type=shapes, default="m7c,64x4x128", help=about)
    about = "sequence lengths (%(default)s)"
    parser.add_argument("--lengths", type=lengths, default="2k,64k", help=about)
    parser.add_argument("--token", action="store_true", help="of one decoded token instead")


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Print a table per shape and length; with --token, per shape."""
    rows: list[dict[str, Any]] = []
    for shape in flags.shapes:
        title = f"\n{shape}: {shape.heads} query heads, {shape.kv_heads} key/value heads, "
        title += f"sizes {shape.key}/{shape.value}, "
        if flags.token:
            print(f"{title}one token of one sequence")
            rows += _print_tokens(shape, flags.lengths)
            continue
        for seq_len in flags.lengths:
            batch = max(1, TOKENS // seq_len)
            print(f"{title}{batch} × {seq_len:,} tokens")
            rows += _print_kernels(shape, batch, seq_len)
    return {"estimate": "floors from counts, not measurements", "rows": rows}


def _print_kernels(shape: Shape, batch: int, seq_len: int) -> list[dict[str, Any]]:
    lines = [["kernel", "GFLOP", "Gexp", "MB"]]
    lines[0] += [head for name in CHIPS for head in (f"{name} ms", "spent on")]
    rows = []
    for item in work(shape, batch, seq_len, NSASpec()):
        row = {"shape": shape.name, "batch": batch, "seq_len": seq_len, **asdict(item)}
        cells = [item.kernel, f"{item.flops / 1e9:.1f}", f"{item.exps / 1e9:.2f}"]
        cells.append(f"{item.bytes / 1e6:.1f}")
        for name, chip in CHIPS.items():
            seconds, bound = item.floor(chip)
            row |= {f"{name} seconds": seconds, f"{name} bound": bound}
            cells += [f"{seconds * 1e3:.3f}", bound]
        rows.append(row)
        lines.append(cells)
    print_table(lines)
    return rows


def _print_tokens(shape: Shape, lengths: Sequence[int]) -> list[dict[str, Any]]:
    heads = ["tokens", "cmp KB", "sel KB", "win KB", "all KB", "dense KB", "split KB", "dense/all"]
    lines = [[*heads, "programs", *(f"{name} us" for name in CHIPS)]]
    rows = []
    for seq_len in lengths:
        x = token(shape, seq_len, NSASpec())
        floors = {name: x.read / chip.bytes for name, chip in CHIPS.items()}
        kb = (x.compressed, x.selected, x.window, x.read, x.dense, x.splitting)
        cells = [f"{seq_len:,}", *(f"{n / 1e3:.0f}" for n in kb), f"{x.dense / x.read:.1f}"]
        programs = "+".join(map(str, x.programs))
        lines.append([*cells, programs, *(f"{s * 1e6:.2f}" for s in floors.values())])
        seconds = {f"{name} seconds": floor for name, floor in floors.items()}
        rows.append(
            {"shape": shape.name, "seq_len": seq_len, **asdict(x), "read": x.read, **seconds}
        )
    print_table(lines)
    return rows
