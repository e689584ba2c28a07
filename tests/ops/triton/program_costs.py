"""Multiply-adds of each program of the attention kernels, and a simulated block scheduler.

A kernel takes as long as its unluckiest multiprocessor. The multiply-adds of each program follow
from the grid and the loop bounds of its launch, masked pairs and padding included; in the selected
branch also from the blocks that queries select. A simulated block scheduler starts programs in the
grid's order. A multiprocessor holds as many as its registers, shared memory and warps allow, and
they share its speed.
"""

from __future__ import annotations

import heapq
from functools import partial
from typing import Any

import numpy as np

from nsa.spec import NSASpec


def selections(kind: str, offsets: Any, spec: NSASpec, heads: int) -> list[Any]:
    """What each head's queries select, bool [T, blocks of the longest of the documents].

    The forced blocks, and random ones, or the last with the kind "local".
    """
    lengths, draw, masks = np.diff(offsets), np.random.default_rng(0), []
    own = np.concatenate([np.arange(n) for n in lengths])[:, None] // spec.select_len
    block = np.arange(spec.select_blocks_len(int(lengths.max()))) + 0 * own
    forced = (block < spec.init_blocks) | (block > own - spec.local_blocks)
    for _ in range(heads):
        score = block if kind == "local" else draw.random(block.shape)
        order = np.argsort(np.where(block > own, np.inf, -score - block.size * forced), 1)
        masks.append(np.zeros(block.shape, bool))
        np.put_along_axis(masks[-1], order[:, : spec.select_top], True, 1)
        masks[-1] &= block <= own
    return masks


def _locate(offsets: Any, slot: Any, mul: int, tile: int) -> tuple[Any, Any, Any]:
    """`locate` of common.py, with the run's length instead of its bounds."""
    first = offsets[:-1] * mul // tile + np.arange(len(offsets) - 1)
    run = np.searchsorted(first, slot, side="right") - 1
    return run, slot - first[run], np.diff(offsets)[run]


def _steps(size: int, *bounds: tuple[Any, Any]) -> Any:
    """The steps of loops from one bound to the other."""
    return sum(np.maximum(-((begin - end) // size), 0) for begin, end in bounds)


def _visible(t: Any, c: Any) -> Any:
    return np.maximum(t + 1 - c.LEN + c.STRIDE, 0) // c.STRIDE


def _band_rows(x: Any, offsets: Any, _: Any, keys: int, values: int) -> Any:
    """`keys` and `values`: products over the size of a key and of a value."""
    branches = [c for c in (x.constants["WIN"], x.constants["CMP"]) if c is not None]
    c, cost = branches[0], 0
    _, tile, length = _locate(offsets, np.arange(x.grid[0])[::-1], c.GROUP, c.ROWS)
    begin, rows = tile * c.ROWS, length * c.GROUP
    first, last = begin // c.GROUP, (np.minimum(begin + c.ROWS, rows) - 1) // c.GROUP
    for c in branches:
        window = c.WINDOW or 1 << 40
        low = np.maximum(first + 1 - window, 0) // c.KEYS * c.KEYS
        far = _steps(c.KEYS, (0, last + 1 - window)) * c.KEYS
        high = _visible(last, c)
        near = np.maximum(_visible(first, c) // c.KEYS * c.KEYS, far)
        steps = _steps(c.KEYS, (low, np.minimum(far, high)), (far, near), (near, high))
        cost += steps * c.ROWS * c.KEYS * (keys * c.KEY_P + values * c.VALUE_P)
    return np.tile(np.where(begin < rows, cost, 0), x.grid[1] * x.grid[2])


def _band_keys(x: Any, offsets: Any, _: Any) -> Any:
    a, win, cmp, costs = x.arguments, x.constants["WIN"], x.constants["CMP"], []
    i = np.arange(a["cmp_programs"])
    splits = i % a["cmp_tiles"], i[::-1] // a["cmp_tiles"], a["split_len"]
    tiles = np.arange(x.grid[1] * x.grid[2] - len(i)), 0, a["seq_len"]
    for c, (slot, split, split_len) in ((cmp, splits), (win, tiles)):
        if c is not None:
            one_tile = c is cmp and a["dq"] is not None
            _, tile, length = _locate(offsets, slot, 1, c.KEYS * c.STRIDE)
            count, first = _visible(length - 1, c), tile * c.KEYS
            last = np.minimum(first + c.KEYS, count) - 1
            seen, all_seen = (n * c.STRIDE + c.LEN - 1 for n in (first, last))
            r0 = np.maximum(split * split_len, 0 if one_tile else seen) * c.GROUP
            end, window = np.minimum(length, (split + 1) * split_len), c.WINDOW or 1 << 40
            r3 = np.minimum(end, last + window) * c.GROUP
            r1 = r0 + _steps(c.ROWS, (r0, all_seen * c.GROUP)) * c.ROWS
            r2 = np.minimum(end, first + window) * c.GROUP
            r2 = r1 + np.maximum(r2 - r1, 0) // c.ROWS * c.ROWS
            phases = ((r0, r3),) if one_tile else ((r0, np.minimum(r1, r3)), (r1, r2), (r2, r3))
            size = (2 + one_tile) * c.KEY_P + 2 * c.VALUE_P
            exists = (tile == 0) if one_tile else (first < count)
            costs.append(exists * _steps(c.ROWS, *phases) * c.ROWS * c.KEYS * size)
    return np.repeat(np.concatenate(costs), x.grid[0])


def _selected_rows(x: Any, offsets: Any, selected: list[Any], keys: int, values: int) -> Any:
    c = x.constants["C"]
    run, tile, length = _locate(offsets, np.arange(x.grid[0])[::-1], 1, c.QUERIES)
    query = np.minimum(tile[:, None] * c.QUERIES + np.arange(c.QUERIES), length[:, None] - 1)
    size = c.ROWS * c.KEYS * _steps(c.KEYS, (0, c.SELECT)) * (keys * c.KEY_P + values * c.VALUE_P)
    size = size * (tile * c.QUERIES < length)
    query += offsets[run][:, None]
    return np.concatenate([mask[query].any(1).sum(1) * size for mask in selected])


def _selected_keys(x: Any, offsets: Any, selected: list[Any]) -> Any:
    c, costs = x.constants["C"], []
    document, block, length = _locate(offsets, np.arange(x.arguments["total_blocks"]), 1, c.SELECT)
    parts, first = _steps(c.KEYS, (0, c.SELECT)), x.constants["HEADS_FIRST"]
    slot = np.arange(x.grid[first] // parts)
    for mask in selected:
        queries = np.diff(np.pad(np.cumsum(mask, 0), ((1, 0), (0, 0)))[offsets], axis=0)
        queries = queries[document, np.minimum(block, mask.shape[1] - 1)]
        lists = np.cumsum([0, *queries * (block * c.SELECT < length)])
        _, chunk, count = _locate(lists, slot, 1, c.CHUNK)
        rows = np.clip(count - chunk * c.CHUNK, 0, c.CHUNK) * c.GROUP
        own = np.maximum(c.SELECT - chunk * c.CHUNK, 0) * c.GROUP
        own = np.minimum(_steps(c.ROWS, (0, own)) * c.ROWS, rows)
        steps = _steps(c.ROWS, (0, own), (own, rows))
        costs.append(np.repeat(steps * c.ROWS * c.KEYS * 2 * (c.KEY_P + c.VALUE_P), parts))
    return np.stack(costs, first).ravel()


_COSTS: dict[str, Any] = {
    "band_forward_kernel": partial(_band_rows, keys=1, values=1),
    "band_queries_kernel": partial(_band_rows, keys=2, values=1),
    "band_keys_kernel": _band_keys,
    "selected_forward_kernel": partial(_selected_rows, keys=1, values=1),
    "selected_queries_kernel": partial(_selected_rows, keys=2, values=1),
    "selected_keys_kernel": _selected_keys,
}


def program_costs(x: Any, offsets: Any, selected: list[Any]) -> Any:
    """The multiply-adds of each program of a launch in the grid's order; None for other kernels.

    `offsets`: where documents begin, and the end; `selected`: see `selections`. `select_kernel`,
    less than 1% of a step, is left out.
    """
    count = _COSTS.get(x.kernel.fn.__name__)
    return None if count is None else count(x, offsets, selected)


def flash_costs(name: str, rows: int, seq_len: int, head: int) -> Any:
    """The same of flash-attn's causal kernels, in tiles of 128; None for an op of another name."""
    tiles = np.arange(1, -(-seq_len // 128) + 1)
    products = tiles[::-1] * 5 if name.endswith("backward") else tiles * 2
    return np.tile(products * 128 * 128 * head, rows) if "flash_attention" in name else None


def simulated(costs: Any, multiprocessors: int, blocks: int) -> float:
    """The time until all programs ended, in multiply-adds of a multiprocessor."""
    slots, now = [(0.0, i) for i in range(multiprocessors * blocks)], 0.0  # when each is free
    for cost in costs.tolist():
        now, i = slots[0]
        heapq.heapreplace(slots, (now + cost * blocks, i))
    left = np.zeros(multiprocessors)  # after the last program started
    for end, i in slots:
        left[i % multiprocessors] += max(end - now, 0.0) / blocks
    return now + float(left.max())
