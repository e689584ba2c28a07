"""A naive Native Sparse Attention, from its definition alone: one query at a time, in float64.

Slow on purpose, and independent of `nsa.ops`. Arrays are NumPy's, with sizes as in the public
functions; `cu_seqlens` is a list or None.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from nsa.spec import NSASpec

Array = np.ndarray
Documents = Sequence[int] | None
Seen = Callable[[int, int, int], list[int]]  # the keys that (batch, query, KV head) sees


def attend_one(q: Array, keys: Array, values: Array, scale: float) -> tuple[Array, float]:
    """One query over the keys it sees: the softmax-weighted values and the log of the sum."""
    if len(keys) == 0:
        return np.zeros(values.shape[-1]), -math.inf
    score = [scale * float(np.dot(q, key)) for key in keys]
    top = max(score)
    weight = [math.exp(s - top) for s in score]
    total = math.fsum(weight)
    o = np.zeros(values.shape[-1])
    for w, value in zip(weight, values, strict=True):
        o += w / total * value
    return o, top + math.log(total)


def attend(q: Array, k: Array, v: Array, seen: Seen, scale: float) -> tuple[Array, Array]:
    """Every query over what it sees; query head i reads KV head i // G."""
    batch, seq_len, heads, _ = q.shape
    group = heads // k.shape[2]
    o = np.zeros((batch, seq_len, heads, v.shape[-1]))
    lse = np.zeros((batch, seq_len, heads))
    for b in range(batch):
        for t in range(seq_len):
            for i in range(heads):
                h = i // group
                keys = seen(b, t, h)
                o[b, t, i], lse[b, t, i] = attend_one(
                    q[b, t, i], k[b, keys, h], v[b, keys, h], scale
                )
    return o, lse


def spans(seq_len: int, cu_seqlens: Documents) -> list[tuple[int, int]]:
    """(start, stop) of each document."""
    ends = [0, seq_len] if cu_seqlens is None else list(cu_seqlens)
    return [(ends[i], ends[i + 1]) for i in range(len(ends) - 1)]


def document_of(t: int, seq_len: int, cu_seqlens: Documents) -> tuple[int, int]:
    """The span of the document that position t is in."""
    return next(span for span in spans(seq_len, cu_seqlens) if span[0] <= t < span[1])


def compressed_blocks(length: int, spec: NSASpec) -> list[range]:
    """The positions of each compressed block of one document."""
    blocks = []
    start = 0
    while start + spec.block_len <= length:
        blocks.append(range(start, start + spec.block_len))
        start += spec.block_stride
    return blocks


def compressed_seen(t: int, seq_len: int, spec: NSASpec, cu_seqlens: Documents = None) -> list[int]:
    """The compressed keys that end at or before t in its document, as indices of all of them."""
    offset = 0
    for start, stop in spans(seq_len, cu_seqlens):
        blocks = compressed_blocks(stop - start, spec)
        if start <= t < stop:
            return [offset + i for i, block in enumerate(blocks) if block[-1] <= t - start]
        offset += len(blocks)
    raise AssertionError(f"position {t} is in no document")


def window_seen(t: int, seq_len: int, window: int, cu_seqlens: Documents = None) -> list[int]:
    """The positions in (t − w, t] of t's document."""
    start, stop = document_of(t, seq_len, cu_seqlens)
    return [position for position in range(start, stop) if t - window < position <= t]


def selected_seen(
    t: int, seq_len: int, blocks: Sequence[int], spec: NSASpec, cu_seqlens: Documents = None
) -> list[int]:
    """The positions up to t inside the selected blocks of t's document."""
    start, _ = document_of(t, seq_len, cu_seqlens)
    selected = {int(block) for block in blocks}
    return [s for s in range(start, t + 1) if (s - start) // spec.select_len in selected]


def compressed_attention(
    q: Array, k: Array, v: Array, spec: NSASpec, scale: float, cu_seqlens: Documents = None
) -> tuple[Array, Array]:
    return attend(q, k, v, lambda b, t, h: compressed_seen(t, q.shape[1], spec, cu_seqlens), scale)


def window_attention(
    q: Array, k: Array, v: Array, window: int, scale: float, cu_seqlens: Documents = None
) -> Array:
    return attend(q, k, v, lambda b, t, h: window_seen(t, q.shape[1], window, cu_seqlens), scale)[0]


def selected_attention(
    q: Array,
    k: Array,
    v: Array,
    block_index: Array,
    spec: NSASpec,
    scale: float,
    cu_seqlens: Documents = None,
) -> Array:
    def seen(b: int, t: int, h: int) -> list[int]:
        return selected_seen(t, q.shape[1], block_index[b, t, h], spec, cu_seqlens)

    return attend(q, k, v, seen, scale)[0]


def importance(
    q: Array, k_cmp: Array, spec: NSASpec, scale: float, cu_seqlens: Documents = None
) -> Array:
    """[B, T, Hkv, blocks of the longest document]: Σ over heads and blocks of p · overlap/d."""
    batch, seq_len, heads, _ = q.shape
    groups = k_cmp.shape[2]
    longest = max(stop - start for start, stop in spans(seq_len, cu_seqlens))
    score = np.zeros((batch, seq_len, groups, -(-longest // spec.select_len)))
    for b, t, i in np.ndindex(batch, seq_len, heads):
        h = i // (heads // groups)
        start, stop = document_of(t, seq_len, cu_seqlens)
        blocks = compressed_blocks(stop - start, spec)
        seen = compressed_seen(t, seq_len, spec, cu_seqlens)
        if not seen:
            continue
        logits = [scale * float(np.dot(q[b, t, i], k_cmp[b, key, h])) for key in seen]
        weight = [math.exp(s - max(logits)) for s in logits]
        for block, w in zip(blocks, weight, strict=False):  # the first blocks are those seen
            for position in block:
                score[b, t, h, position // spec.select_len] += (
                    w / math.fsum(weight) / spec.block_stride
                )
    return score


def select_blocks(score: Array, spec: NSASpec, cu_seqlens: Documents = None) -> Array:
    """[B, T, Hkv, n] from `importance`: forced blocks, then the best, ties to the lower index."""
    batch, seq_len, groups, _ = score.shape
    index = np.full((batch, seq_len, groups, spec.select_top), -1)
    for b, t, h in np.ndindex(batch, seq_len, groups):
        own = (t - document_of(t, seq_len, cu_seqlens)[0]) // spec.select_len
        candidates = range(own + 1)
        forced = {j for j in candidates if j < spec.init_blocks or j > own - spec.local_blocks}
        ranked = sorted(candidates, key=lambda j: (j not in forced, -score[b, t, h, j], j))
        selected = sorted(ranked[: spec.select_top])
        index[b, t, h, : len(selected)] = selected
    return index
