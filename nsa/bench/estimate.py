"""`python -m nsa.bench estimate`: what the compiled kernels could take at best. No measurement.

A kernel's steps are counted from its tile sizes, masked parts included; what a step costs is read
from the instructions of its loop (sass.py), as if the busiest unit never waited for the others.
Between that and the floor (roofline.py) lies what tiles and instructions cost; what a GPU will take
beyond it is waiting.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch
import triton

from nsa.bench.aot import OPERATIONS, Case
from nsa.bench.compiled import Variant, binary
from nsa.bench.roofline import SPEEDS, Work, work
from nsa.bench.sass import UNITS, Loop, loops
from nsa.bench.shapes import SHAPES
from nsa.ops.triton.launch import Launch, recording
from nsa.spec import NSASpec

GPUS = {"sm_80": ("A100", 108), "sm_90": ("H200", 132)}
SAMPLED = 256  # tiles whose union of random choices is counted


@dataclass(frozen=True)
class Steps:
    """Turns of each loop of a kernel, in the code's order, and the multiply-adds of one turn."""

    turns: Sequence[float]
    multiply_adds: int


def run(
    names: Sequence[str], lengths: Sequence[int], tokens: int, chips: Sequence[str]
) -> dict[str, Any]:
    """Print an estimate a kernel, as a table a shape and length, and return them."""
    for chip in chips:
        if chip not in UNITS:
            raise ValueError(
                f"--arch {chip}: choose from {', '.join(UNITS)}, whose units are known"
            )
    rows = []
    for name in names:
        shape = SHAPES[name]
        for seq_len in lengths:
            batch = max(1, tokens // seq_len)
            floors = {item.kernel: item for item in work(shape, batch, seq_len, NSASpec())}
            sizes = shape.heads, shape.kv_heads, shape.key, shape.value, seq_len
            launches = _launches(Case("nsa_attention", *sizes, "bf16", False))
            case = [
                {"shape": name, "batch": batch, "seq_len": seq_len}
                | _estimate(launch, floors[kernel], batch * shape.kv_heads, seq_len, chip)
                for kernel, launch in launches.items()
                for chip in chips
            ]
            print(table(case), flush=True)
            rows += case
    return {
        "estimate": "from compiled code and counts, not measurements",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m nsa.bench", *sys.argv[1:]]),
        "triton": triton.__version__,
        "rows": rows,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One case's rows as text."""
    one = rows[0]
    shape = SHAPES[one["shape"]]
    lines = [
        f"{shape.name}: {shape.heads} query heads, {shape.kv_heads} key/value heads, sizes "
        f"{shape.key}/{shape.value}, {one['batch']} × {one['seq_len']:,} tokens, random choices",
        f"{'kernel':20}{'GPU':>6}{'tiles':>13}{'floor ms':>10}{'computed':>10}{'tensor cores':>14}"
        f"  {'busiest':9}{'best ms':>9}",
    ]
    for row in rows:
        lines.append(
            f"{row['kernel']:20}{row['gpu']:>6}{row['tiles']:>13}{row['floor_ms']:10.3f}"
            f"{row['computed']:9.2f}x{row['tensor_share']:14.0%}  {row['busiest']:9}"
            f"{row['ms']:9.3f}"
        )
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        mine = [row for row in rows if row["gpu"] == gpu]
        floor, best = (sum(row[key] for row in mine) for key in ("floor_ms", "ms"))
        lines.append(f"{'all of them':20}{gpu:>6}{floor:23.3f}{best:44.3f}")
    return "\n".join(lines) + "\n"


def _launches(case: Case) -> dict[str, Launch]:
    """The kernels of a call that multiply matrices, by the names that floors have."""
    with recording() as started:
        OPERATIONS[case.operation](case)
    found = {}
    for launch in started:
        kernel = launch.kernel.fn.__name__.removesuffix("_kernel")
        branch, _, part = kernel.partition("_")
        if branch == "band":
            branch = "window" if launch.constants["WINDOW"] else "compressed"
        if kernel == "select" or part in ("forward", "queries", "keys"):
            found[f"{branch} {part}".strip()] = launch
    return found


def _estimate(launch: Launch, floor: Work, rows_of: int, seq_len: int, chip: str) -> dict[str, Any]:
    """Of one launch for one sequence, times `rows_of` sequences' key/value heads."""
    gpu, multiprocessors = GPUS[chip]
    rate, speeds = UNITS[chip]["products"], SPEEDS[gpu]
    clock = speeds.exps / (UNITS[chip]["exp"] * multiprocessors)
    # Large products run at a lower clock than everything else, for want of power.
    slower = clock * 2 * rate * multiprocessors / speeds.flops
    variant = Variant.of(launch, chip)
    code = [loop.with_products(slower) for loop in loops(binary(variant), chip, variant.warps)]
    steps = STEPS[launch.kernel.fn.__name__](launch, seq_len)
    if len(code) != len(steps.turns):  # the compiler has merged some: the dearest stands for all
        code = [max(code, key=lambda loop: loop.least / loop.cycles["products"])] * len(steps.turns)
    turn = steps.multiply_adds / rate * slower
    clocks = sum(
        turns * turn * _dearer(loop, turn) for turns, loop in zip(steps.turns, code, strict=True)
    )
    config = launch.config
    busiest = max(zip(steps.turns, code, strict=True), key=lambda pair: pair[0])[1]
    computed = 2 * sum(steps.turns) * steps.multiply_adds * rows_of
    seconds = max(clocks * rows_of / multiprocessors / clock, floor.bytes / speeds.bytes)
    return {
        "kernel": floor.kernel,
        "gpu": gpu,
        "tiles": f"{config.rows}/{config.keys}/{config.warps}/{config.stages}",
        "floor_ms": floor.floor(speeds)[0] * 1e3,
        "computed": computed / floor.flops,
        "tensor_share": turn * sum(steps.turns) / clocks,
        "busiest": busiest.bound,
        "ms": seconds * 1e3,
    }


def _dearer(loop: Loop, turn: float) -> float:
    """By what a turn takes longer than its products would: other units, and products done twice."""
    products = loop.cycles["products"]
    unrolled = max(1, int(products / turn + 1e-6))
    return loop.least / unrolled / turn


def band(launch: Launch, seq_len: int) -> Steps:
    """A tile of rows over its keys: those at the window's far end, those all see, the newest."""
    c = launch.constants
    rows, keys, group, window = c["ROWS"], c["KEYS"], c["GROUP"], c["WINDOW"]
    far = whole = newest = 0
    for first in range(0, seq_len * group, rows):
        t_first = first // group
        t_last = (min(first + rows, seq_len * group) - 1) // group
        high, all_see = (_visible(t, c["LEN"], c["STRIDE"]) for t in (t_last, t_first))
        low = a = 0
        if window:
            low = max(t_first + 1 - window, 0) // keys * keys
            a = -(-max(t_last + 1 - window, 0) // keys) * keys
        b = max(all_see // keys * keys, a)
        far += -(-(min(a, high) - low) // keys)
        whole += (b - a) // keys
        newest += max(-(-(high - b) // keys), 0)
    per_key = c["KEY"] + c["VALUE"] + (c["KEY"] if "ADD" in c else 0)
    return Steps([far, whole, newest][0 if window else 1 :], rows * keys * per_key)


def band_keys(launch: Launch, seq_len: int) -> Steps:
    """A tile of keys over the rows that see it: the first few, those that see all, the last."""
    c = launch.constants
    rows, keys, group, window = c["ROWS"], c["KEYS"], c["GROUP"], c["WINDOW"]
    splits, count = launch.grid[1], _visible(seq_len - 1, c["LEN"], c["STRIDE"])
    split_len = -(-seq_len // splits)
    turns = [0, 0, 0]
    for first in range(0, count, keys):
        last = min(first + keys, count) - 1
        for split in range(splits):
            begin = max(first * c["STRIDE"] + c["LEN"] - 1, split * split_len)
            end = all_end = min(seq_len, (split + 1) * split_len)
            if window:
                end = min(end, last + window)
                all_end = min(end, first + window)
            r0, r3 = begin * group, end * group
            if r0 < r3:
                seen_by_all = (last * c["STRIDE"] + c["LEN"] - 1) * group
                r1 = r0 + -(-max(seen_by_all - r0, 0) // rows) * rows
                r2 = r1 + max(all_end * group - r1, 0) // rows * rows
                turns[0] += -(-(min(r1, r3) - r0) // rows)
                turns[1] += (r2 - r1) // rows
                turns[2] += max(-(-(r3 - r2) // rows), 0)
    return Steps(turns, rows * keys * 2 * (c["KEY"] + c["VALUE"]))


def select(launch: Launch, seq_len: int) -> Steps:
    """A tile of queries over tiles of blocks, each for every overlap and head.

    The first tiles are checked against the sequence's beginning, the last against the future.
    """
    c = launch.constants
    queries, blocks = c["QUERIES"], c["BLOCKS"]
    known = triton.cdiv(triton.cdiv(c["LEN"] - c["STRIDE"], c["SELECT"]), blocks) * blocks
    turns = [0, 0, 0]
    for first in range(0, seq_len, queries):
        stop = (min(first + queries, seq_len) - 1) // c["SELECT"] + 1
        if stop > c["TOP"]:
            seen = max(_visible(first, c["LEN"], c["STRIDE"]) - 1, 0) * c["STRIDE"] // c["SELECT"]
            every = max(seen // blocks * blocks, known)
            turns[0] += -(-min(known, stop) // blocks)
            turns[1] += (every - known) // blocks
            turns[2] += max(-(-(stop - every) // blocks), 0)
    each = c["COUNT"] * c["GROUP"]
    return Steps([turn * each for turn in turns], queries * blocks * c["KEY"])


def selected(launch: Launch, seq_len: int) -> Steps:
    """A tile of queries over the union of their blocks, chosen by the toss of a coin."""
    c, spec = launch.constants, NSASpec()
    tiles = range(0, seq_len, c["QUERIES"])
    some = tiles[:: max(1, len(tiles) // SAMPLED)]
    draw = torch.Generator().manual_seed(0)
    union = 0
    for first in some:
        chosen: set[int] = set()
        for t in range(first, min(first + c["QUERIES"], seq_len)):
            own = t // spec.select_len
            forced = {*range(min(spec.init_blocks, own + 1))}
            forced |= {*range(max(own + 1 - spec.local_blocks, 0), own + 1)}
            rest = torch.randperm(own + 1, generator=draw)[: spec.select_top].tolist()
            free = [j for j in rest if j not in forced][: spec.select_top - len(forced)]
            chosen |= forced | set(free)
        union += len(chosen)
    parts = -(-spec.select_len // c["KEYS"])
    turns = union / len(some) * len(tiles) * parts
    per_key = c["KEY"] + c["VALUE"] + (c["KEY"] if "ADD" in c else 0)
    return Steps([turns], c["ROWS"] * c["KEYS"] * per_key)


def selected_keys(launch: Launch, seq_len: int) -> Steps:
    """A block over the rows of those who chose it: its own queries first, then all others."""
    c, spec = launch.constants, NSASpec()
    rows, keys, group = c["ROWS"], c["KEYS"], c["GROUP"]
    blocks = spec.select_blocks_len(seq_len)
    pairs = sum(min(t // spec.select_len + 1, spec.select_top) for t in range(seq_len))
    parts = -(-spec.select_len // keys)
    own = blocks * -(-spec.select_len * group // rows) * parts
    others = max(pairs * group / rows * parts - own, 0) + blocks * parts / 2  # half a step is empty
    return Steps([own, others], rows * keys * 2 * (c["KEY"] + c["VALUE"]))


STEPS: dict[str, Callable[[Launch, int], Steps]] = {
    "band_forward_kernel": band,
    "band_queries_kernel": band,
    "band_keys_kernel": band_keys,
    "select_kernel": select,
    "selected_forward_kernel": selected,
    "selected_queries_kernel": selected,
    "selected_keys_kernel": selected_keys,
}


def _visible(t: int, length: int, stride: int) -> int:
    return max(t + 1 - length + stride, 0) // stride
