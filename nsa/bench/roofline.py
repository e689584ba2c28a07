"""`python -m nsa.bench roofline`: what each kernel must do at least, and the time that takes.

Counts, not measurements: matrix-product operations, exponentials and bytes that no kernel for the
job could save. The floor is the slowest of the three on a chip. A kernel's distance from it is
what a measurement shows. With --token: what one token behind a cache must read, which is its floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nsa.bench.shapes import SHAPES, Shape
from nsa.spec import NSASpec

HALF = 2  # bytes of bf16
SINGLE = 4  # of float32 and int32


@dataclass(frozen=True)
class Speeds:
    """A chip's bf16 products, memory and exponentials a second."""

    flops: float
    bytes: float
    exps: float  # 16 a clock and multiprocessor


# A100: data sheet (80 GB). H200: products and memory as measured with large matrices and copies.
SPEEDS = {
    "A100": Speeds(312e12, 2.0e12, 16 * 108 * 1.41e9),
    "H200": Speeds(790e12, 4.3e12, 16 * 132 * 1.785e9),
}


@dataclass(frozen=True)
class Work:
    """What one launch must do."""

    kernel: str
    flops: float
    exps: float
    bytes: float

    def floor(self, chip: Speeds) -> tuple[float, str]:
        """Seconds, and what they are spent on."""
        return max(
            (self.flops / chip.flops, "products"),
            (self.exps / chip.exps, "exponentials"),
            (self.bytes / chip.bytes, "memory"),
        )


def work(shape: Shape, batch: int, seq_len: int, spec: NSASpec) -> list[Work]:
    """Every kernel of one layer's attention, forward and backward, in bf16 without packing."""
    tokens = batch * seq_len
    rows = tokens * shape.heads
    q, o = rows * shape.key * HALF, rows * shape.value * HALF
    row = rows * SINGLE  # an lse, or a row sum
    pair = tokens * shape.kv_heads * (shape.key + shape.value) * HALF
    compressed = pair * spec.compressed_len(seq_len) / seq_len
    index = tokens * shape.kv_heads * spec.select_top * SINGLE
    seen = [spec.visible_compressed(t) for t in range(seq_len)]
    keys = {
        "compressed": sum(seen),
        "window": sum(map(spec.visible_window, range(seq_len))),
        "selected": sum(map(spec.visible_selected, range(seq_len))),
    }
    memory = {"compressed": compressed, "window": pair, "selected": pair + index}
    # The choice needs each visible block's score once; what is chosen anyway needs none.
    ranked = sum(n for t, n in enumerate(seen) if t // spec.select_len >= spec.select_top)
    scores = batch * shape.heads * ranked
    result = [
        Work("select", 2 * scores * shape.key, scores, q + compressed / 2 + row + index),
    ]
    for branch, count in keys.items():
        pairs = batch * shape.heads * count
        key, value, moved = 2 * pairs * shape.key, 2 * pairs * shape.value, memory[branch]
        result += [
            Work(f"{branch} forward", key + value, pairs, q + moved + o + row),
            Work(f"{branch} queries", 2 * key + value, pairs, 2 * q + o + moved + 2 * row),
            Work(f"{branch} keys", 2 * key + 2 * value, pairs, q + o + 2 * moved + 2 * row),
        ]
    gates = 3 * rows * HALF
    return [
        *result,
        Work("mix", 0, 0, 4 * o + gates),
        Work("gate rows", 0, 0, 4 * o + 2 * gates + 9 * row),
    ]


@dataclass(frozen=True)
class Token:
    """Bytes of one layer's attention for one token of one sequence, forward, in bf16."""

    compressed: int
    chosen: int
    window: int
    dense: int  # what plain attention over all keys reads
    splitting: int  # scores, parts and importances, which are written and read again
    programs: tuple[int, int]  # before blocks are chosen, and after

    @property
    def keys(self) -> int:
        """All that is read of the cache: what no kernel could save."""
        return self.compressed + self.chosen + self.window


def token(shape: Shape, seq_len: int, spec: NSASpec) -> Token:
    """The newest of `seq_len` tokens."""
    from nsa.ops.triton.decode import PART

    pair = shape.kv_heads * (shape.key + shape.value) * HALF
    last = seq_len - 1
    keys, blocks = spec.visible_compressed(last), spec.select_blocks_len(seq_len)
    window = spec.visible_window(last)
    before, after = -(-keys // PART), min(blocks, spec.select_top) + -(-window // PART)
    parts = (before + after) * shape.heads * (shape.value + 1)
    ranked = blocks > spec.select_top
    scores = keys * shape.heads + blocks * shape.kv_heads if ranked else 0
    return Token(
        compressed=keys * pair,
        chosen=spec.visible_selected(last) * pair,
        window=window * pair,
        dense=seq_len * pair,
        splitting=2 * SINGLE * (parts + scores),
        programs=(before * shape.kv_heads, after * shape.kv_heads),
    )


def run_token(names: Sequence[str], lengths: Sequence[int]) -> dict[str, Any]:
    """Print what a token reads, as a table a shape, and return it."""
    rows = []
    for name in names:
        shape = SHAPES[name]
        print(f"\n{name}: {shape.heads} query heads, {shape.kv_heads} key/value heads, ", end="")
        print(f"sizes {shape.key}/{shape.value}, one token of one sequence")
        print(f"{'tokens':>8}{'cmp KB':>9}{'sel KB':>8}{'win KB':>8}{'all KB':>9}", end="")
        print(f"{'dense KB':>10}{'dense/all':>10}{'split KB':>9}{'programs':>11}", end="")
        print("".join(f"{chip + ' us':>9}" for chip in SPEEDS))
        for seq_len in lengths:
            found = token(shape, seq_len, NSASpec())
            sizes = found.compressed, found.chosen, found.window, found.keys, found.dense
            kb = [f"{size / 1e3:.0f}" for size in (*sizes, found.splitting)]
            floors = {chip: found.keys / speeds.bytes for chip, speeds in SPEEDS.items()}
            times = f"{found.dense / found.keys:.1f}"
            programs = "+".join(map(str, found.programs))
            print(
                f"{seq_len:8,}{kb[0]:>9}{kb[1]:>8}{kb[2]:>8}{kb[3]:>9}{kb[4]:>10}{times:>10}"
                f"{kb[5]:>9}{programs:>11}" + "".join(f"{s * 1e6:9.2f}" for s in floors.values())
            )
            rows.append(
                {"shape": name, "seq_len": seq_len, **asdict(found), "keys": found.keys}
                | {f"{chip} seconds": seconds for chip, seconds in floors.items()}
            )
    return {"estimate": "floors from counts, not measurements", "rows": rows}


def run(names: Sequence[str], lengths: Sequence[int], tokens: int) -> dict[str, Any]:
    """Print the floors as a table a shape and length, and return them."""
    rows = []
    for name in names:
        shape = SHAPES[name]
        for seq_len in lengths:
            batch = max(1, tokens // seq_len)
            print(
                f"\n{name}: {shape.heads} query heads, {shape.kv_heads} key/value heads, ", end=""
            )
            print(f"sizes {shape.key}/{shape.value}, {batch} × {seq_len:,} tokens")
            print(f"{'kernel':20}{'GFLOP':>9}{'Gexp':>8}{'MB':>8}", end="")
            print("".join(f"{chip + ' ms':>10}  {'spent on':14}" for chip in SPEEDS))
            for item in work(shape, batch, seq_len, NSASpec()):
                floors = {chip: item.floor(speeds) for chip, speeds in SPEEDS.items()}
                print(
                    f"{item.kernel:20}{item.flops / 1e9:9.1f}{item.exps / 1e9:8.2f}"
                    f"{item.bytes / 1e6:8.1f}"
                    + "".join(f"{s * 1e3:10.3f}  {what:14}" for s, what in floors.values())
                )
                rows.append(
                    {"shape": name, "batch": batch, "seq_len": seq_len, "kernel": item.kernel}
                    | {"flops": item.flops, "exps": item.exps, "bytes": item.bytes}
                    | {f"{chip} seconds": seconds for chip, (seconds, _) in floors.items()}
                    | {f"{chip} bound": what for chip, (_, what) in floors.items()}
                )
    return {"estimate": "floors from counts, not measurements", "rows": rows}
