"""`python -m nsa.bench roofline`: least FLOPs and bytes of each kernel, and their time floor.

Counts, not measurements: matrix products, exponentials and bytes that no kernel for the job could
save. The floor is the slowest of the three on a chip. With --token: the bytes that one decoded
token must read.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from nsa.bench.options import Shape, lengths, shapes
from nsa.bench.results import Report, print_table
from nsa.gpus import GPUS
from nsa.spec import NSASpec

TOKENS = 65_536  # per batch, about
BF16, FP32 = 2, 4  # bytes; int32 takes as many as float32
Row = dict[str, Any]


class PeakRates(NamedTuple):
    """What a chip does per second at most."""

    flops: float
    exps: float
    bytes: float


class Work(NamedTuple):
    """What a launch must compute and move at least; the fields of `PeakRates`."""

    flops: float
    exps: float
    bytes: float

    def floor(self, chip: PeakRates) -> tuple[float, str]:
        """Return the least seconds, and what they are spent on."""
        seconds = (amount / rate for amount, rate in zip(self, chip, strict=True))
        return max(zip(seconds, ("products", "exponentials", "memory"), strict=True))


CARDS = {"A100": GPUS["A100 80GB PCIe"], "H100": GPUS["H100 80GB HBM3"], "H200": GPUS["H200"]}
# Exponentials: 16 per clock and multiprocessor.
PEAKS = {
    name: PeakRates(
        flops=1e12 * (x.sustained or x.bf16),
        exps=1e9 * 16 * x.multiprocessors * x.clock,
        bytes=1e12 * x.bandwidth,
    )
    for name, x in CARDS.items()
}


def pairs(shape: Shape, batch: int, seq_len: int, spec: NSASpec) -> dict[str, int]:
    """Count visible (query, key) pairs of each branch, over the batch and all query heads."""
    names = {"cmp": "compressed", "win": "window", "sel": "selected"}
    rows = batch * shape.heads
    return {names[branch]: rows * count for branch, count in spec.visible_pairs(seq_len).items()}


def work(shape: Shape, batch: int, seq_len: int, spec: NSASpec) -> dict[str, Work]:
    """Count every kernel's work in one layer's attention, forward and backward, bf16, not packed.

    A "gated" kernel computes the compressed branch and the window. "gated queries" includes the row
    sums of the branches, and "selected forward" the gated sum. Where one tile holds all compressed
    keys, "gated keys" computes everything of the compressed branch's backward pass.
    """
    from nsa.ops.triton.configs import one_tile

    tokens = batch * seq_len
    rows = tokens * shape.heads
    q, o = rows * shape.key * BF16, rows * shape.value * BF16
    row = rows * FP32  # an lse, or a row sum
    gates = 3 * rows * BF16
    pair = tokens * shape.kv_heads * (shape.key + shape.value) * BF16
    compressed = pair * spec.compressed_len(seq_len) / seq_len
    index = tokens * shape.kv_heads * spec.select_top * FP32
    # Selection needs each visible block's score once, except while all candidates are selected.
    ranked = range(spec.select_len * spec.select_top, seq_len)
    scores = batch * shape.heads * sum(map(spec.visible_compressed, ranked))
    read = (q + row) * len(ranked) / seq_len
    visible = pairs(shape, batch, seq_len, spec)
    visible["gated"] = visible["compressed"] + visible["window"]
    head = max(shape.key, shape.value)

    def kernel(branch: str, keys: int, values: int, moved: float) -> Work:
        """Count `keys` products with keys and `values` with values, for each visible pair."""
        exps = visible[branch]
        return Work(2 * exps * (keys * shape.key + values * shape.value), exps, moved)

    both, mixing = compressed + pair, 3 * o + gates
    if one_tile(spec.compressed_len(seq_len), head, BF16):
        queries = kernel("window", 2, 1, 2 * q + pair + 3 * o + 2 * gates + 6 * row)
        compressed_keys = kernel("compressed", 3, 2, 2 * q + 2 * compressed + row + gates)
    else:
        queries = kernel("gated", 2, 1, 2 * q + both + 4 * o + 2 * gates + 9 * row)
        compressed_keys = kernel("compressed", 2, 2, 2 * compressed + 2 * row)
    window_keys = kernel("window", 2, 2, q + o + 2 * pair + 2 * row)
    return {
        "gated forward": kernel("gated", 1, 1, q + both + 2 * o + 2 * row),
        "select": Work(2 * scores * shape.key, scores, read + compressed / 2 + index),
        "selected forward": kernel("selected", 1, 1, q + pair + index + o + row + mixing),
        "gated queries": queries,
        "gated keys": Work(*map(sum, zip(window_keys, compressed_keys, strict=True))),
        "selected queries": kernel("selected", 2, 1, 3 * q + o + pair + index + 2 * row),
        "selected keys": kernel("selected", 2, 2, q + o + 2 * (pair + index) + 2 * row),
    }


def token_bytes(shape: Shape, seq_len: int, spec: NSASpec) -> dict[str, int]:
    """Count the bytes of one layer's attention for the last of a sequence's tokens, bf16.

    `read`: by the three branches; `dense`: by dense attention; `split`: partial results, written
    and read again. `before`, `after`: kernel programs before and after blocks are selected.
    """
    from nsa.ops.triton.decode import PART

    pair = shape.kv_heads * (shape.key + shape.value) * BF16
    last = seq_len - 1
    keys, blocks = spec.visible_compressed(last), spec.select_blocks_len(seq_len)
    window = spec.visible_window(last)
    branches = {"cmp": keys * pair, "sel": spec.visible_selected(last) * pair, "win": window * pair}
    before, after = -(-keys // PART), min(blocks, spec.select_top) + -(-window // PART)
    parts = (before + after) * shape.heads * (shape.value + 1)
    scores = keys * shape.heads + blocks * shape.kv_heads if blocks > spec.select_top else 0
    return branches | {
        "read": sum(branches.values()),
        "dense": seq_len * pair,
        "split": 2 * FP32 * (parts + scores),
        "before": before * shape.kv_heads,
        "after": after * shape.kv_heads,
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    about = "head shapes (%(default)s)"
    parser.add_argument("--shapes", type=shapes, default="m7c,64x4x128", help=about)
    about = "sequence lengths (%(default)s)"
    parser.add_argument("--lengths", type=lengths, default="2k,64k", help=about)
    parser.add_argument("--token", action="store_true", help="bytes of one decoded token instead")


def run(report: Report) -> dict[str, Any]:
    """Print a table per shape and length; with --token, per shape."""
    flags, rows = report.flags, list[Row]()
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


def _print_kernels(shape: Shape, batch: int, seq_len: int) -> list[Row]:
    lines = [["kernel", "GFLOP", "Gexp", "MB"]]
    lines[0] += [head for name in PEAKS for head in (f"{name} ms", "spent on")]
    rows = []
    for kernel, item in work(shape, batch, seq_len, NSASpec()).items():
        floors = {name: item.floor(chip) for name, chip in PEAKS.items()}
        row = {"shape": shape.name, "batch": batch, "seq_len": seq_len, "kernel": kernel}
        rows.append(row | item._asdict() | {"floors": floors})
        cells = [kernel, f"{item.flops / 1e9:.1f}", f"{item.exps / 1e9:.2f}"]
        cells.append(f"{item.bytes / 1e6:.1f}")
        lines.append(cells + [x for s, bound in floors.values() for x in (f"{s * 1e3:.3f}", bound)])
    print_table(lines)
    return rows


def _print_tokens(shape: Shape, lengths: list[int]) -> list[Row]:
    heads = ["tokens", "cmp KB", "sel KB", "win KB", "all KB", "dense KB", "split KB", "dense/all"]
    lines = [[*heads, "programs", *(f"{name} us" for name in PEAKS)]]
    rows = []
    for seq_len in lengths:
        x = token_bytes(shape, seq_len, NSASpec())
        rows.append({"shape": shape.name, "seq_len": seq_len, **x})
        columns = ("cmp", "sel", "win", "read", "dense", "split")
        cells = [f"{seq_len:,}", *(f"{x[name] / 1e3:.0f}" for name in columns)]
        cells += [f"{x['dense'] / x['read']:.1f}", f"{x['before']}+{x['after']}"]
        lines.append(cells + [f"{x['read'] / chip.bytes * 1e6:.2f}" for chip in PEAKS.values()])
    print_table(lines)
    return rows
