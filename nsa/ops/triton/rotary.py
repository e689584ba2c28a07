"""RoPE, gates and mean pooling of one packed projection: kernels and launchers.

One kernel rotates tokens, one pools blocks, and one writes the gradient of the projection. A
program takes a tile of tokens and loops over their heads, so RoPE tables are loaded once. The two
halves of a head are two tiles, so that one thread has both elements of each pair that RoPE rotates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.inputs import PackedLayout, RotaryPoolInputs
from nsa.ops.triton.common import kernel
from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import cdiv, launch, next_power_of_2

TILE = 1024  # elements of a tile: tokens times half a head
MAX_TOKENS = 32  # of a tile


@triton.jit
def _tile(seq_len, TOKENS: tl.constexpr):
    """Return a program's tokens in the sequence, in the batch, and whether they exist: [TOKENS]."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    return t, tl.program_id(1).to(tl.int64) * seq_len + t, t < seq_len


class Sizes(NamedTuple):
    """The kernels' compile-time constants, as one argument `C`."""

    WIDTH: int  # columns of the projection
    HEADS: int  # query heads
    KV_HEADS: int  # per set of keys and values
    SETS: int  # of keys and values
    HALF: int  # size of half a query or key
    VALUE: int
    INDEX: int  # 1: the projection has an index's queries and keys; 0: it has none
    GATES: int  # gate logits of all heads
    HALF_P: int  # HALF, padded to a power of two
    VALUE_P: int
    REST: int  # columns after the index's: gate logits and padding
    REST_P: int
    TOKENS: int  # of a tile
    LEN: int = 0  # tokens of a compressed block; 0: no means
    COVER: int = 0  # blocks that cover a token, at most


@triton.jit
def _tables(cos, sin, t, valid, C: tl.constexpr):
    """Load cos and sin of tokens t, [rows, HALF_P]."""
    d = tl.arange(0, C.HALF_P)
    at = (t * C.HALF)[:, None] + d[None, :]
    inside = valid[:, None] & (d < C.HALF)[None, :]
    return tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at, mask=inside, other=0.0)


@triton.jit
def _load(rows, column, valid, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load float32 [rows, PADDED] from `column` on; `rows`: pointers to where the rows begin."""
    d = tl.arange(0, PADDED)
    inside = valid[:, None] & (d < SIZE)[None, :]
    return tl.load(rows[:, None] + (column + d)[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(rows, column, x, valid, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Store x [rows, PADDED] where `_load` would read it."""
    d = tl.arange(0, PADDED)
    inside = valid[:, None] & (d < SIZE)[None, :]
    x = x.to(rows.dtype.element_ty)
    tl.store(rows[:, None] + (column + d)[None, :], x, mask=inside)


@triton.jit
def _rotate_heads(source, target, cos, sin, valid, HEADS, C: tl.constexpr):
    """Rotate adjacent heads of the rows at `source` and store them in the rows at `target`."""
    for h in range(HEADS):
        a = _load(source, 2 * h * C.HALF, valid, C.HALF, C.HALF_P)
        b = _load(source, 2 * h * C.HALF + C.HALF, valid, C.HALF, C.HALF_P)
        _store(target, 2 * h * C.HALF, a * cos - b * sin, valid, C.HALF, C.HALF_P)
        _store(target, 2 * h * C.HALF + C.HALF, b * cos + a * sin, valid, C.HALF, C.HALF_P)


@triton.jit
def _copy_heads(source, target, valid, HEADS, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Copy adjacent heads of SIZE columns; callers copy a key as two heads of half its size."""
    for h in range(HEADS):
        x = _load(source, h * SIZE, valid, SIZE, PADDED)
        _store(target, h * SIZE, x, valid, SIZE, PADDED)


@triton.jit
def _set_columns(packed, SET: tl.constexpr, C: tl.constexpr):
    """Return where a set's keys and its values begin in the rows at `packed`."""
    KEYS: tl.constexpr = 2 * C.HALF
    keys = packed + KEYS * (C.HEADS + SET * C.KV_HEADS)
    values = packed + KEYS * (C.HEADS + C.SETS * C.KV_HEADS) + SET * C.KV_HEADS * C.VALUE
    return keys, values


@triton.jit
def _index_columns(packed, C: tl.constexpr):
    """Return where an index's queries, its keys, and what follows begin in the rows at `packed`."""
    KEYS: tl.constexpr = 2 * C.HALF * C.KV_HEADS
    queries = packed + 2 * C.HALF * C.HEADS + C.SETS * (KEYS + C.KV_HEADS * C.VALUE)
    return queries, queries + KEYS, queries + 2 * KEYS * C.INDEX


@triton.jit
def _rotate_set(packed, k, v, row, cos, sin, valid, SET: tl.constexpr, C: tl.constexpr):
    """Store a set's rotated keys and its values in k and v, unless k is None."""
    if k is not None:
        keys, values = _set_columns(packed, SET, C)
        k_rows = k + row * (C.KV_HEADS * 2 * C.HALF)
        _rotate_heads(keys, k_rows, cos, sin, valid, C.KV_HEADS, C)
        v_rows = v + row * (C.KV_HEADS * C.VALUE)
        _copy_heads(values, v_rows, valid, C.KV_HEADS, C.VALUE, C.VALUE_P)


@kernel
def rotary_kernel(
    packed, cos, sin, q, gates, k_raw, v_raw, k_0, v_0, k_1, v_1, k_2, v_2, index_q, index_k,
    seq_len,
    C: tl.constexpr,
):  # fmt: skip
    """Store all outputs that have a row per token; k_raw and v_raw are set 0 without RoPE."""
    t, row, valid = _tile(seq_len, C.TOKENS)
    c, s = _tables(cos, sin, t, valid, C)
    packed += row * C.WIDTH  # [TOKENS]
    if C.HEADS > 0:
        _rotate_heads(packed, q + row * (C.HEADS * 2 * C.HALF), c, s, valid, C.HEADS, C)
    if k_raw is not None:
        keys, values = _set_columns(packed, 0, C)
        k_rows = k_raw + row * (C.KV_HEADS * 2 * C.HALF)
        _copy_heads(keys, k_rows, valid, 2 * C.KV_HEADS, C.HALF, C.HALF_P)
        v_rows = v_raw + row * (C.KV_HEADS * C.VALUE)
        _copy_heads(values, v_rows, valid, C.KV_HEADS, C.VALUE, C.VALUE_P)
    _rotate_set(packed, k_0, v_0, row, c, s, valid, 0, C)
    _rotate_set(packed, k_1, v_1, row, c, s, valid, 1, C)
    _rotate_set(packed, k_2, v_2, row, c, s, valid, 2, C)
    queries, index_keys, rest = _index_columns(packed, C)
    if C.INDEX:
        rows = row * (C.KV_HEADS * 2 * C.HALF)
        _rotate_heads(queries, index_q + rows, c, s, valid, C.KV_HEADS, C)
        _copy_heads(index_keys, index_k + rows, valid, 2 * C.KV_HEADS, C.HALF, C.HALF_P)
    if C.GATES > 0:
        logits = _load(rest, 0, valid, C.GATES, C.REST_P)
        _store(gates + row * C.GATES, 0, tl.sigmoid(logits), valid, C.GATES, C.REST_P)


@kernel
def pool_kernel(
    keys, values, cos, sin, block_tokens, k_cmp, v_cmp, seq_len, key_len, C: tl.constexpr,
):  # fmt: skip
    """Store the means of a block's rotated keys and values, which are columns of the projection."""
    HALF_P: tl.constexpr = C.HALF_P
    VALUE_P: tl.constexpr = C.VALUE_P
    block, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    out = batch * key_len + block
    k_cmp += out * (C.KV_HEADS * 2 * C.HALF)
    if C.VALUE > 0:
        v_cmp += out * (C.KV_HEADS * C.VALUE)
    d, e = tl.arange(0, HALF_P), tl.arange(0, VALUE_P)
    for h in range(C.KV_HEADS):
        low, high = tl.zeros([HALF_P], tl.float32), tl.zeros([HALF_P], tl.float32)  # [HALF_P]
        value = tl.zeros([VALUE_P], tl.float32)
        for first in range(0, C.LEN, C.TOKENS):
            i = first + tl.arange(0, C.TOKENS)
            valid = i < C.LEN
            t = tl.load(block_tokens + block.to(tl.int64) * C.LEN + i, mask=valid, other=0)
            c, s = _tables(cos, sin, t, valid, C)
            at = (batch * seq_len + t) * C.WIDTH  # [TOKENS]
            a = _load(keys + at, 2 * h * C.HALF, valid, C.HALF, HALF_P)  # [TOKENS, HALF_P]
            b = _load(keys + at, 2 * h * C.HALF + C.HALF, valid, C.HALF, HALF_P)
            low += tl.sum(a * c - b * s, 0)
            high += tl.sum(b * c + a * s, 0)
            value += tl.sum(_load(values + at, h * C.VALUE, valid, C.VALUE, VALUE_P), 0)
        k_at = k_cmp + 2 * h * C.HALF + d
        tl.store(k_at, (low / C.LEN).to(k_cmp.dtype.element_ty), mask=d < C.HALF)
        tl.store(k_at + C.HALF, (high / C.LEN).to(k_cmp.dtype.element_ty), mask=d < C.HALF)
        if C.VALUE > 0:
            v_at, mean = v_cmp + h * C.VALUE + e, value / C.LEN
            tl.store(v_at, mean.to(v_cmp.dtype.element_ty), mask=e < C.VALUE)


@triton.jit
def _unpool(
    gradient, token_blocks, t, batch, column, key_len, valid,
    STRIDE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sum `gradient` / LEN over the blocks that cover each token: [TOKENS, PADDED]."""
    TOKENS: tl.constexpr = C.TOKENS
    total = tl.zeros([TOKENS, PADDED], tl.float32)
    for c in range(C.COVER):
        block = tl.load(token_blocks + t.to(tl.int64) * C.COVER + c, mask=valid, other=-1)
        rows = gradient + (batch * key_len + block) * STRIDE
        total += _load(rows, column, block >= 0, SIZE, PADDED)
    return total / C.LEN


@triton.jit
def _set_gradients(
    packed, dk, dv, dk_raw, dv_raw, dk_cmp, dv_cmp, token_blocks, t, row, batch, cos, sin,
    key_len, valid, SET: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store the projection's gradient in the columns of a set's keys and values.

    It sums, in float32, the gradients by token (dk, dv), pre-RoPE (dk_raw, dv_raw) and by block
    (dk_cmp, dv_cmp), each of which may be None. Gradients of rotated keys are rotated back as one.
    """
    TOKENS: tl.constexpr = C.TOKENS
    HALF_P: tl.constexpr = C.HALF_P
    VALUE_P: tl.constexpr = C.VALUE_P
    KEYS: tl.constexpr = C.KV_HEADS * 2 * C.HALF
    VALUES: tl.constexpr = C.KV_HEADS * C.VALUE
    keys, values = _set_columns(packed, SET, C)
    for h in range(C.KV_HEADS):
        at = 2 * h * C.HALF
        a, b = tl.zeros([TOKENS, HALF_P], tl.float32), tl.zeros([TOKENS, HALF_P], tl.float32)
        value = tl.zeros([TOKENS, VALUE_P], tl.float32)
        if dk is not None:
            a += _load(dk + row * KEYS, at, valid, C.HALF, HALF_P)
            b += _load(dk + row * KEYS, at + C.HALF, valid, C.HALF, HALF_P)
            value += _load(dv + row * VALUES, h * C.VALUE, valid, C.VALUE, VALUE_P)
        if dk_cmp is not None:
            a += _unpool(dk_cmp, token_blocks, t, batch, at, key_len, valid, KEYS,
                         C.HALF, HALF_P, C)  # fmt: skip
            b += _unpool(dk_cmp, token_blocks, t, batch, at + C.HALF, key_len, valid, KEYS,
                         C.HALF, HALF_P, C)  # fmt: skip
            if C.VALUE > 0:
                value += _unpool(dv_cmp, token_blocks, t, batch, h * C.VALUE, key_len, valid,
                                 VALUES, C.VALUE, VALUE_P, C)  # fmt: skip
        low, high = a * cos + b * sin, b * cos - a * sin  # the halves, rotated back
        if dk_raw is not None:
            low += _load(dk_raw + row * KEYS, at, valid, C.HALF, HALF_P)
            high += _load(dk_raw + row * KEYS, at + C.HALF, valid, C.HALF, HALF_P)
            value += _load(dv_raw + row * VALUES, h * C.VALUE, valid, C.VALUE, VALUE_P)
        _store(keys, at, low, valid, C.HALF, HALF_P)
        _store(keys, at + C.HALF, high, valid, C.HALF, HALF_P)
        _store(values, h * C.VALUE, value, valid, C.VALUE, VALUE_P)


@kernel
def rotary_backward_kernel(
    packed, cos, sin, token_blocks, gates, dq, dgates, dk_cmp, dv_cmp, dk_raw, dv_raw,
    dk_0, dv_0, dk_1, dv_1, dk_2, dv_2, index_dq, index_dk, seq_len, key_len, C: tl.constexpr,
):  # fmt: skip
    """Store the projection's gradient in `packed`: every column once, padding included."""
    TOKENS: tl.constexpr = C.TOKENS
    REST_P: tl.constexpr = C.REST_P
    t, row, valid = _tile(seq_len, TOKENS)
    batch = tl.program_id(1).to(tl.int64)
    c, s = _tables(cos, sin, t, valid, C)
    packed += row * C.WIDTH  # [TOKENS]
    if C.HEADS > 0:
        _rotate_heads(dq + row * (C.HEADS * 2 * C.HALF), packed, c, -s, valid, C.HEADS, C)
    _set_gradients(packed, dk_0, dv_0, dk_raw, dv_raw, dk_cmp, dv_cmp, token_blocks, t, row, batch,
                   c, s, key_len, valid, 0, C)  # fmt: skip
    if C.SETS > 1:
        _set_gradients(packed, dk_1, dv_1, None, None, None, None, None, t, row, batch,
                       c, s, key_len, valid, 1, C)  # fmt: skip
    if C.SETS > 2:
        _set_gradients(packed, dk_2, dv_2, None, None, None, None, None, t, row, batch,
                       c, s, key_len, valid, 2, C)  # fmt: skip
    queries, index_keys, rest = _index_columns(packed, C)
    if C.INDEX:
        rows = row * (C.KV_HEADS * 2 * C.HALF)
        _rotate_heads(index_dq + rows, queries, c, -s, valid, C.KV_HEADS, C)
        _copy_heads(index_dk + rows, index_keys, valid, 2 * C.KV_HEADS, C.HALF, C.HALF_P)
    if C.REST > 0:
        gradient = tl.zeros([TOKENS, REST_P], tl.float32)  # of gate logits; padding: 0
        if C.GATES > 0:
            g = _load(gates + row * C.GATES, 0, valid, C.GATES, REST_P)
            gradient += g * (1 - g) * _load(dgates + row * C.GATES, 0, valid, C.GATES, REST_P)
        _store(rest, 0, gradient, valid, C.REST, REST_P)


def rotary_pool_forward(x: RotaryPoolInputs) -> tuple[Tensor, ...]:
    """Return the outputs in the order of `RotaryPoolInputs.empty_outputs`."""
    layout, outputs, sizes = x.read_layout(), x.empty_outputs(), _sizes(x)
    q, gates, k_cmp, v_cmp, k_0, v_0, k_1, v_1, k_2, v_2, *index = _present(outputs)
    k_raw, v_raw = (None, None) if layout.mean else (k_cmp, v_cmp)
    packed, cos, sin = x.packed.contiguous(), x.cos.contiguous(), x.sin.contiguous()
    batch, seq_len, _ = packed.shape
    config = Config(sizes.TOKENS, 0, 4, 1)
    launch(
        rotary_kernel, (cdiv(seq_len, config.rows), batch), config,
        packed=packed, cos=cos, sin=sin, q=q, gates=gates, k_raw=k_raw, v_raw=v_raw,
        k_0=k_0, v_0=v_0, k_1=k_1, v_1=v_1, k_2=k_2, v_2=v_2,
        index_q=index[0], index_k=index[1], seq_len=seq_len,
        C=sizes._replace(LEN=0, COVER=0),  # unread here: one binary for all block sizes
    )  # fmt: skip
    if layout.mean:
        assert x.block_tokens is not None
        key_len, length = x.block_tokens.shape
        _, keys, values, *_ = layout.parts(packed)
        tokens = min(MAX_TOKENS, next_power_of_2(length))
        launch(
            pool_kernel, (key_len, batch), config,
            keys=keys[:, :, 0], values=values[:, :, 0],  # of set 0
            cos=cos, sin=sin, block_tokens=x.block_tokens.contiguous(), k_cmp=k_cmp, v_cmp=v_cmp,
            seq_len=seq_len, key_len=key_len, C=sizes._replace(TOKENS=tokens, COVER=0),
        )  # fmt: skip
    return outputs


def rotary_pool_backward(*gradients_inputs_gates: Any) -> Tensor:
    """Return the gradient of `packed`, with the same bits in every run."""
    *gradients, x, gates = gradients_inputs_gates
    layout, sizes = x.read_layout(), _sizes(x)
    packed = torch.empty_like(x.packed, memory_format=torch.contiguous_format)
    dq, dgates, dk_cmp, dv_cmp, dk_0, dv_0, dk_1, dv_1, dk_2, dv_2, *index = _present(gradients)
    token_blocks = dk_raw = dv_raw = None
    if layout.mean:
        token_blocks = x.token_blocks.contiguous()
    else:
        dk_raw, dv_raw, dk_cmp, dv_cmp = dk_cmp, dv_cmp, None, None
    batch, seq_len, _ = packed.shape
    config = Config(sizes.TOKENS, 0, 4, 1)
    launch(
        rotary_backward_kernel, (cdiv(seq_len, config.rows), batch), config,
        packed=packed, cos=x.cos.contiguous(), sin=x.sin.contiguous(), token_blocks=token_blocks,
        gates=gates if sizes.GATES else None, dq=dq, dgates=dgates,
        dk_cmp=dk_cmp, dv_cmp=dv_cmp, dk_raw=dk_raw, dv_raw=dv_raw,
        dk_0=dk_0, dv_0=dv_0, dk_1=dk_1, dv_1=dv_1, dk_2=dk_2, dv_2=dv_2,
        index_dq=index[0], index_dk=index[1],
        seq_len=seq_len, key_len=x.block_tokens.shape[0] if layout.mean else 0, C=sizes,
    )  # fmt: skip
    return packed


def _present(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Replace outputs that the layout lacks, or their gradients, by None: they have no elements."""
    return [y if y.numel() else None for y in tensors]


def _sizes(x: RotaryPoolInputs) -> Sizes:
    layout, length, cover = x.read_layout(), 0, 0
    if layout.mean:
        assert x.block_tokens is not None
        assert x.token_blocks is not None
        length, cover = x.block_tokens.shape[1], x.token_blocks.shape[1]
    return _cached_sizes(layout, x.packed.shape[2], length, cover)


@lru_cache(maxsize=256)
def _cached_sizes(layout: PackedLayout, width: int, length: int, cover: int) -> Sizes:
    half, rest = layout.key_dim // 2, width - sum(layout.columns[:4])
    half_p = next_power_of_2(half)
    return Sizes(
        WIDTH=width, HEADS=layout.heads, KV_HEADS=layout.kv_heads, SETS=layout.kv_sets,
        HALF=half, VALUE=layout.value_dim, INDEX=layout.indexed,
        GATES=layout.heads * layout.gates,
        HALF_P=half_p, VALUE_P=next_power_of_2(layout.value_dim),
        REST=rest, REST_P=next_power_of_2(max(1, rest)),
        TOKENS=min(MAX_TOKENS, max(1, TILE // half_p)), LEN=length, COVER=cover,
    )  # fmt: skip


triton_rotary_pool = register(
    "nsa::triton_rotary_pool",
    RotaryPoolInputs,
    rotary_pool_forward,
    RotaryPoolInputs.empty_outputs,
    outputs=12,
    # Of the outputs the backward pass reads only the gates, of `packed` only shape and dtype.
    gradient=Gradient(rotary_pool_backward, inputs=1, outputs=12, saved=slice(1, 2), shape_only=1),
)
