"""`python -m nsa.bench schedule`: how evenly attention kernels fill a GPU, counted without one.

A kernel takes as long as its unluckiest multiprocessor. The multiply-adds of each program follow
from the grid and the loop bounds of its launch, masked pairs and padding included; in the selected
branch also from the blocks that queries select. A simulated block scheduler starts programs in the
grid's order. A multiprocessor holds as many as its registers, shared memory and warps allow, and
they share its speed. Counts and estimates, not measurements.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nsa.bench.results import Report, print_table, ratio
from nsa.spec import NSASpec

MULTIPROCESSORS = {"A100": 108, "H100": 132}
CHIPS = {"A100": "sm_80", "H100": "sm_90"}
SELECTIONS = ("random", "local", "alike")


def selections(kind: str, offsets: Any, spec: NSASpec, count: int) -> list[Any]:
    """The blocks that queries of `count` heads select, bool [T, blocks of the longest document].

    Forced blocks, and at random, the last or (alike) the first ones. Documents begin at `offsets`.
    """
    lengths, draw = np.diff(offsets), np.random.default_rng(0)
    own = np.concatenate([np.arange(n) for n in lengths])[:, None] // spec.select_len
    block = np.arange(spec.select_blocks_len(int(lengths.max())))
    forced = (block < spec.init_blocks) | (block > own - spec.local_blocks)
    result = []
    for _ in range(count if kind == "random" else 1):
        score = {"local": block, "alike": -block}.get(kind, draw.random((len(own), len(block))))
        score = np.where(block > own, -np.inf, np.where(forced, np.inf, score))
        best = np.argpartition(-score, min(spec.select_top, len(block)) - 1, 1)
        mask = np.zeros(score.shape, bool)
        np.put_along_axis(mask, best[:, : spec.select_top], True, 1)
        result.append(mask & (block <= own))
    return result * (count // len(result))


def program_costs(x: Any, offsets: Any, selected: Sequence[Any]) -> Any:
    """The multiply-adds of each program of a launch in the grid's order; None without products.

    `selected`: the selections of each batch row and KV head, as `selections` returns them.
    """
    count = _COSTS.get(x.kernel.fn.__name__)
    return None if count is None else count(x, offsets, selected)


def _locate(offsets: Any, slot: Any, mul: int, tile: int) -> tuple[Any, Any, Any]:
    """`locate` of common.py: the run that each slot is in, its tile of the run, the run's length."""
    first = offsets[:-1] * mul // tile + np.arange(len(offsets) - 1)
    run = np.searchsorted(first, slot, side="right") - 1
    return run, slot - first[run], np.diff(offsets)[run]


def _steps(*bounds: tuple[Any, Any], size: int) -> Any:
    """The steps of loops from one bound to the other, `size` apart."""
    return sum(np.maximum(-((begin - end) // size), 0) for begin, end in bounds)


def _visible(t: Any, c: Any) -> Any:
    return np.maximum(t + 1 - c.LEN + c.STRIDE, 0) // c.STRIDE


def _band_rows(x: Any, offsets: Any, _: Any, keys: int, values: int) -> Any:
    """Tiles of rows: `keys` and `values` products over the size of a key and of a value."""
    win, cmp = x.constants["WIN"], x.constants["CMP"]
    c = win or cmp
    _, tile, length = _locate(offsets, np.arange(x.grid[0])[::-1], c.GROUP, c.ROWS)
    begin, end = tile * c.ROWS // c.GROUP, (np.minimum((tile + 1) * c.ROWS, length * c.GROUP) - 1) // c.GROUP
    cost = 0
    for b in filter(None, (win, cmp)):
        low = np.maximum(begin + 1 - b.WINDOW, 0) // b.KEYS * b.KEYS if b.WINDOW else 0
        far = _steps((0, end + 1 - b.WINDOW), size=b.KEYS) * b.KEYS if b.WINDOW else 0
        high = _visible(end, b)
        near = np.maximum(_visible(begin, b) // b.KEYS * b.KEYS, far)
        steps = _steps((low, np.minimum(far, high)), (far, near), (near, high), size=b.KEYS)
        cost += steps * b.ROWS * b.KEYS * (keys * b.KEY_P + values * b.VALUE_P)
    return np.tile(np.where(tile * c.ROWS < length * c.GROUP, cost, 0), x.grid[1] * x.grid[2])


def _band_keys(x: Any, offsets: Any, _: Any) -> Any:
    a, costs = x.arguments, []
    win, cmp = x.constants["WIN"], x.constants["CMP"]
    count, tiles = a["cmp_programs"], a["cmp_tiles"]
    rows = a["batches"] * (win or cmp).HEADS
    i = np.arange(x.grid[0] // rows)
    of_cmp = i[:count] % tiles, (count - 1 - i[:count]) // tiles, a["split_len"]
    for c, (slot, split, split_len) in ((cmp, of_cmp), (win, (i[count:] - count, 0, a["seq_len"]))):
        if c is not None:
            one_tile = c is cmp and a["dq"] is not None
            _, tile, length = _locate(offsets, slot, 1, c.KEYS * c.STRIDE)
            keys, first = _visible(length - 1, c), tile * c.KEYS
            last = np.minimum(first + c.KEYS, keys) - 1
            seen, all_seen = (n * c.STRIDE + c.LEN - 1 for n in (first, last))
            begin = np.maximum(split * split_len, 0 if one_tile else seen)
            end = np.minimum(length, (split + 1) * split_len)
            until = np.minimum(end, last + c.WINDOW) if c.WINDOW else end
            all_until = np.minimum(until, first + c.WINDOW) if c.WINDOW else end
            r0, r3 = begin * c.GROUP, until * c.GROUP
            r1 = r0 + _steps((r0, all_seen * c.GROUP), size=c.ROWS) * c.ROWS
            r2 = r1 + np.maximum(all_until * c.GROUP - r1, 0) // c.ROWS * c.ROWS
            steps = _steps((r0, np.minimum(r1, r3)), (r1, r2), (r2, r3), size=c.ROWS)
            steps = _steps((r0, r3), size=c.ROWS) if one_tile else steps
            exists = tile == 0 if one_tile else first < keys
            size = (3 if one_tile else 2) * c.KEY_P + 2 * c.VALUE_P
            costs.append(np.where(exists, steps * c.ROWS * c.KEYS * size, 0))
    return np.repeat(np.concatenate(costs), rows)


def _select(x: Any, offsets: Any, _: Any) -> Any:
    c = x.constants["C"]
    _, tile, length = _locate(offsets, np.arange(x.grid[0])[::-1], 1, c.QUERIES)
    begin, end = tile * c.QUERIES, np.minimum((tile + 1) * c.QUERIES, length)
    blocks = (end - 1) // c.SELECT + 1
    low = -(-(-((c.STRIDE - c.LEN) // c.SELECT)) // c.BLOCKS) * c.BLOCKS
    high = np.maximum(_visible(begin, c) - 1, 0) * c.STRIDE // c.SELECT // c.BLOCKS * c.BLOCKS
    high = np.maximum(high, low)
    steps = _steps((0, np.minimum(low, blocks)), (low, high), (high, blocks), size=c.BLOCKS)
    cost = steps * c.COUNT * c.GROUP * c.QUERIES * c.BLOCKS * c.KEY_P
    return np.tile(np.where((begin < end) & (blocks > c.TOP), cost, 0), x.grid[1] * x.grid[2])


def _selected_rows(x: Any, offsets: Any, selected: Any, keys: int, values: int) -> Any:
    c = x.constants["C"]
    run, tile, length = _locate(offsets, np.arange(x.grid[0])[::-1], 1, c.QUERIES)
    query = np.minimum(tile[:, None] * c.QUERIES + np.arange(c.QUERIES), length[:, None] - 1)
    query, exists = offsets[run][:, None] + query, tile * c.QUERIES < length
    size = c.ROWS * c.KEYS * _steps((0, c.SELECT), size=c.KEYS)
    size *= keys * c.KEY_P + values * c.VALUE_P
    return np.concatenate([mask[query].any(1).sum(1) * exists * size for mask in selected])


def _selected_keys(x: Any, offsets: Any, selected: Any) -> Any:
    c, costs = x.constants["C"], []
    document, block, length = _locate(offsets, np.arange(x.arguments["total_blocks"]), 1, c.SELECT)
    parts = _steps((0, c.SELECT), size=c.KEYS)
    slot = np.arange(x.arguments["programs"] // parts)
    for mask in selected:
        sums = np.concatenate([np.zeros_like(mask[:1], int), np.cumsum(mask, 0)])[offsets]
        queries = np.diff(sums, axis=0)[document, np.minimum(block, mask.shape[1] - 1)]
        lists = np.cumsum([0, *np.where(block * c.SELECT < length, queries, 0)])
        run, chunk, total = _locate(lists, slot, 1, c.CHUNK)
        rows = np.clip(total - chunk * c.CHUNK, 0, c.CHUNK) * c.GROUP
        own = _steps((chunk * c.CHUNK, c.SELECT), size=1) * c.GROUP
        own = np.minimum(_steps((0, own), size=c.ROWS) * c.ROWS, rows)
        steps = _steps((0, own), (own, rows), size=c.ROWS)
        costs.append(np.repeat(steps * c.ROWS * c.KEYS * 2 * (c.KEY_P + c.VALUE_P), parts))
    return np.concatenate(costs) if x.arguments["interleaved"] == 1 else np.stack(costs, 1).ravel()


_COSTS: dict[str, Any] = {
    "band_forward_kernel": partial(_band_rows, keys=1, values=1),
    "band_queries_kernel": partial(_band_rows, keys=2, values=1),
    "band_keys_kernel": _band_keys,
    "select_kernel": _select,
    "selected_forward_kernel": partial(_selected_rows, keys=1, values=1),
    "selected_queries_kernel": partial(_selected_rows, keys=2, values=1),
    "selected_keys_kernel": _selected_keys,
}


def simulated_time(costs: Any, multiprocessors: int, blocks: int) -> float:
    """The time until all programs ended, in multiply-adds of a multiprocessor."""
    slots = [(0.0, i) for i in range(multiprocessors * blocks)]  # when each is free
    now = 0.0
    for cost in costs.tolist():
        now, i = slots[0]
        heapq.heapreplace(slots, (now + cost * blocks, i))
    left = np.zeros(multiprocessors)  # after the last program started
    for end, i in slots:
        left[i % multiprocessors] += max(end - now, 0.0) / blocks
    return now + float(left.max())
