"""RoPE, gates and mean pooling of one packed projection: kernels and launchers.

One kernel rotates tokens, one pools blocks, and one writes the gradient of the projection. A
program takes a tile of tokens and loops over their heads, so RoPE tables are loaded once. The two
halves of a head are two tiles, so that a pair is in the same thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.inputs import PackedLayout, RotaryPoolInputs
from nsa.ops.triton.common import kernel
from nsa.ops.triton.configs import Config
from nsa.ops.triton.launch import cdiv, launch, next_power_of_2

TILE = 1024  # elements of half a head that a program reads at once
MAX_TOKENS = 32  # of a tile


@triton.jit
def _tile(seq_len, TOKENS: tl.constexpr):
    """A program's tokens in the sequence and in the batch, and whether they exist: [TOKENS]."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    return t, tl.program_id(1).to(tl.int64) * seq_len + t, t < seq_len


@triton.jit
def _tables(cos, sin, t, valid, HALF: tl.constexpr, HALF_P: tl.constexpr):
    """cos and sin of tokens t, [rows, HALF_P]."""
    d = tl.arange(0, HALF_P)
    at, inside = (t * HALF)[:, None] + d[None, :], valid[:, None] & (d < HALF)[None, :]
    return tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at, mask=inside, other=0.0)


@triton.jit
def _load(rows, column, valid, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """float32 [rows, PADDED] from column `column` on, of rows that begin at pointers [rows]."""
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
def _rotate_heads(source, target, cos, sin, valid, HEADS, HALF: tl.constexpr, HALF_P: tl.constexpr):
    """Rotate heads side by side, from rows at `source` to rows at `target`."""
    for h in range(HEADS):
        a = _load(source, 2 * h * HALF, valid, HALF, HALF_P)
        b = _load(source, 2 * h * HALF + HALF, valid, HALF, HALF_P)
        _store(target, 2 * h * HALF, a * cos - b * sin, valid, HALF, HALF_P)
        _store(target, 2 * h * HALF + HALF, b * cos + a * sin, valid, HALF, HALF_P)


@triton.jit
def _copy_heads(source, target, valid, HEADS, SIZE: tl.constexpr, PADDED: tl.constexpr):
    for h in range(HEADS):
        x = _load(source, h * SIZE, valid, SIZE, PADDED)
        _store(target, h * SIZE, x, valid, SIZE, PADDED)


@triton.jit
def _rotate_copy(
    packed, k, v, row, cos, sin, valid, COPY: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, COPIES: tl.constexpr, HALF: tl.constexpr, VALUE: tl.constexpr,
    HALF_P: tl.constexpr, VALUE_P: tl.constexpr,
):  # fmt: skip
    """One copy's rotated keys, and its values; nothing where k is None."""
    if k is not None:
        keys = packed + 2 * HALF * (HEADS + COPY * KV_HEADS)
        _rotate_heads(
            keys, k + row * (KV_HEADS * 2 * HALF), cos, sin, valid, KV_HEADS, HALF, HALF_P
        )
        values = packed + 2 * HALF * (HEADS + COPIES * KV_HEADS) + COPY * KV_HEADS * VALUE
        _copy_heads(values, v + row * (KV_HEADS * VALUE), valid, KV_HEADS, VALUE, VALUE_P)


@kernel
def rotary_kernel(
    packed, cos, sin, q, gates, k_raw, v_raw, k_0, v_0, k_1, v_1, k_2, v_2, seq_len,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, COPIES: tl.constexpr,
    HALF: tl.constexpr, VALUE: tl.constexpr, GATES: tl.constexpr, HALF_P: tl.constexpr,
    VALUE_P: tl.constexpr, REST_P: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """All outputs by token; k_raw and v_raw are the pre-RoPE first copy."""
    t, row, valid = _tile(seq_len, TOKENS)
    c, s = _tables(cos, sin, t, valid, HALF, HALF_P)
    packed += row * WIDTH  # [TOKENS]
    _rotate_heads(packed, q + row * (HEADS * 2 * HALF), c, s, valid, HEADS, HALF, HALF_P)
    if k_raw is not None:
        keys = packed + 2 * HALF * HEADS
        _copy_heads(keys, k_raw + row * (KV_HEADS * 2 * HALF), valid, 2 * KV_HEADS, HALF, HALF_P)
        values = packed + 2 * HALF * (HEADS + COPIES * KV_HEADS)
        _copy_heads(values, v_raw + row * (KV_HEADS * VALUE), valid, KV_HEADS, VALUE, VALUE_P)
    _rotate_copy(packed, k_0, v_0, row, c, s, valid, 0, HEADS, KV_HEADS, COPIES, HALF, VALUE,
                 HALF_P, VALUE_P)  # fmt: skip
    _rotate_copy(packed, k_1, v_1, row, c, s, valid, 1, HEADS, KV_HEADS, COPIES, HALF, VALUE,
                 HALF_P, VALUE_P)  # fmt: skip
    _rotate_copy(packed, k_2, v_2, row, c, s, valid, 2, HEADS, KV_HEADS, COPIES, HALF, VALUE,
                 HALF_P, VALUE_P)  # fmt: skip
    if GATES > 0:
        first = 2 * HALF * HEADS + COPIES * KV_HEADS * (2 * HALF + VALUE)
        logits = _load(packed, first, valid, GATES, REST_P)
        _store(gates + row * GATES, 0, tl.sigmoid(logits), valid, GATES, REST_P)


@kernel
def pool_kernel(
    keys, values, cos, sin, block_tokens, k_cmp, v_cmp, seq_len, key_len,
    WIDTH: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, VALUE: tl.constexpr,
    HALF_P: tl.constexpr, VALUE_P: tl.constexpr, LEN: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The means of one block's rotated keys and of its values, both columns of the projection."""
    block, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    out = batch * key_len + block
    k_cmp += out * (KV_HEADS * 2 * HALF)
    v_cmp += out * (KV_HEADS * VALUE)
    d, e = tl.arange(0, HALF_P), tl.arange(0, VALUE_P)
    for h in range(KV_HEADS):
        low, high = tl.zeros([HALF_P], tl.float32), tl.zeros([HALF_P], tl.float32)  # [HALF_P]
        value = tl.zeros([VALUE_P], tl.float32)
        for first in range(0, LEN, TOKENS):
            i = first + tl.arange(0, TOKENS)
            valid = i < LEN
            t = tl.load(block_tokens + block.to(tl.int64) * LEN + i, mask=valid, other=0)
            c, s = _tables(cos, sin, t, valid, HALF, HALF_P)
            at = (batch * seq_len + t) * WIDTH  # [TOKENS]
            a = _load(keys + at, 2 * h * HALF, valid, HALF, HALF_P)  # [TOKENS, HALF_P]
            b = _load(keys + at, 2 * h * HALF + HALF, valid, HALF, HALF_P)  # [TOKENS, HALF_P]
            low += tl.sum(a * c - b * s, 0)
            high += tl.sum(b * c + a * s, 0)
            value += tl.sum(_load(values + at, h * VALUE, valid, VALUE, VALUE_P), 0)
        k_at, v_at = k_cmp + 2 * h * HALF + d, v_cmp + h * VALUE + e
        tl.store(k_at, (low / LEN).to(k_cmp.dtype.element_ty), mask=d < HALF)
        tl.store(k_at + HALF, (high / LEN).to(k_cmp.dtype.element_ty), mask=d < HALF)
        tl.store(v_at, (value / LEN).to(v_cmp.dtype.element_ty), mask=e < VALUE)


@triton.jit
def _unpool(
    gradient, token_blocks, t, batch, column, key_len, valid,
    STRIDE: tl.constexpr, LEN: tl.constexpr, COVER: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The tokens' gradient from the means of the blocks that cover them, [TOKENS, PADDED]."""
    total = tl.zeros([TOKENS, PADDED], tl.float32)
    for c in range(COVER):
        block = tl.load(token_blocks + t.to(tl.int64) * COVER + c, mask=valid, other=-1)
        rows = gradient + (batch * key_len + block) * STRIDE
        total += _load(rows, column, block >= 0, SIZE, PADDED)
    return total / LEN


@triton.jit
def _copy_gradients(
    packed, dk, dv, dk_raw, dv_raw, dk_cmp, dv_cmp, token_blocks, t, row, batch, cos, sin,
    key_len, valid,
    COPY: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, COPIES: tl.constexpr,
    HALF: tl.constexpr, VALUE: tl.constexpr, HALF_P: tl.constexpr, VALUE_P: tl.constexpr,
    LEN: tl.constexpr, COVER: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One copy's columns of the gradient.

    Each source may be absent: by token (dk, dv None), pre-RoPE (dk_raw, dv_raw None), by block (LEN
    0). Keys' gradients are summed in float32 and rotated back once.
    """
    KEYS: tl.constexpr = KV_HEADS * 2 * HALF
    VALUES: tl.constexpr = KV_HEADS * VALUE
    keys = packed + 2 * HALF * HEADS + COPY * KEYS
    values = packed + 2 * HALF * HEADS + COPIES * KEYS + COPY * VALUES
    for h in range(KV_HEADS):
        at = 2 * h * HALF
        a, b = tl.zeros([TOKENS, HALF_P], tl.float32), tl.zeros([TOKENS, HALF_P], tl.float32)
        value = tl.zeros([TOKENS, VALUE_P], tl.float32)
        if dk is not None:
            a += _load(dk + row * KEYS, at, valid, HALF, HALF_P)
            b += _load(dk + row * KEYS, at + HALF, valid, HALF, HALF_P)
            value += _load(dv + row * VALUES, h * VALUE, valid, VALUE, VALUE_P)
        if LEN > 0:
            a += _unpool(dk_cmp, token_blocks, t, batch, at, key_len, valid, KEYS, LEN, COVER,
                         HALF, HALF_P, TOKENS)  # fmt: skip
            b += _unpool(dk_cmp, token_blocks, t, batch, at + HALF, key_len, valid, KEYS, LEN,
                         COVER, HALF, HALF_P, TOKENS)  # fmt: skip
            value += _unpool(dv_cmp, token_blocks, t, batch, h * VALUE, key_len, valid, VALUES,
                             LEN, COVER, VALUE, VALUE_P, TOKENS)  # fmt: skip
        low, high = a * cos + b * sin, b * cos - a * sin
        if dk_raw is not None:
            low += _load(dk_raw + row * KEYS, at, valid, HALF, HALF_P)
            high += _load(dk_raw + row * KEYS, at + HALF, valid, HALF, HALF_P)
            value += _load(dv_raw + row * VALUES, h * VALUE, valid, VALUE, VALUE_P)
        _store(keys, at, low, valid, HALF, HALF_P)
        _store(keys, at + HALF, high, valid, HALF, HALF_P)
        _store(values, h * VALUE, value, valid, VALUE, VALUE_P)


@kernel
def rotary_backward_kernel(
    packed, cos, sin, token_blocks, gates, dq, dgates, dk_cmp, dv_cmp, dk_raw, dv_raw,
    dk_0, dv_0, dk_1, dv_1, dk_2, dv_2, seq_len, key_len,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, COPIES: tl.constexpr,
    HALF: tl.constexpr, VALUE: tl.constexpr, GATES: tl.constexpr, HALF_P: tl.constexpr,
    VALUE_P: tl.constexpr, REST_P: tl.constexpr, LEN: tl.constexpr, COVER: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the projection's gradient to `packed`: every column once, padding too."""
    t, row, valid = _tile(seq_len, TOKENS)
    batch = tl.program_id(1).to(tl.int64)
    c, s = _tables(cos, sin, t, valid, HALF, HALF_P)
    packed += row * WIDTH  # [TOKENS]
    _rotate_heads(dq + row * (HEADS * 2 * HALF), packed, c, -s, valid, HEADS, HALF, HALF_P)
    _copy_gradients(
        packed, dk_0, dv_0, dk_raw, dv_raw, dk_cmp, dv_cmp, token_blocks, t, row, batch, c, s,
        key_len, valid, 0, HEADS, KV_HEADS, COPIES, HALF, VALUE, HALF_P, VALUE_P, LEN, COVER,
        TOKENS,
    )  # fmt: skip
    if COPIES > 1:
        _copy_gradients(
            packed, dk_1, dv_1, None, None, None, None, None, t, row, batch, c, s,
            key_len, valid, 1, HEADS, KV_HEADS, COPIES, HALF, VALUE, HALF_P, VALUE_P, 0, 0, TOKENS,
        )  # fmt: skip
    if COPIES > 2:
        _copy_gradients(
            packed, dk_2, dv_2, None, None, None, None, None, t, row, batch, c, s,
            key_len, valid, 2, HEADS, KV_HEADS, COPIES, HALF, VALUE, HALF_P, VALUE_P, 0, 0, TOKENS,
        )  # fmt: skip
    FIRST: tl.constexpr = 2 * HALF * HEADS + COPIES * KV_HEADS * (2 * HALF + VALUE)
    if WIDTH > FIRST:
        gradient = tl.zeros([TOKENS, REST_P], tl.float32)  # of gate logits and padding
        if GATES > 0:
            g = _load(gates + row * GATES, 0, valid, GATES, REST_P)
            gradient += g * (1 - g) * _load(dgates + row * GATES, 0, valid, GATES, REST_P)
        _store(packed, FIRST, gradient, valid, WIDTH - FIRST, REST_P)


def rotary_pool_forward(x: RotaryPoolInputs) -> tuple[Tensor, ...]:
    """The outputs in the order of `RotaryPoolInputs.empty_outputs`."""
    layout, outputs = x.read_layout(), x.empty_outputs()
    arguments, constants, config = _arguments(x)
    arguments |= {"packed": x.packed.contiguous()} | _by_name(layout, outputs)
    batch, seq_len, _ = x.packed.shape
    grid = cdiv(seq_len, config.rows), batch
    launch(rotary_kernel, grid, arguments, constants, config)
    if layout.mean:
        tokens = min(MAX_TOKENS, next_power_of_2(constants["LEN"]))
        _, keys, values, _ = layout.parts(arguments["packed"])
        arguments |= {"keys": keys[:, :, 0], "values": values[:, :, 0]}  # of the first copy
        grid = arguments["key_len"], batch
        launch(pool_kernel, grid, arguments, constants | {"TOKENS": tokens}, config)
    return outputs


def rotary_pool_backward(*gradients_inputs_gates: Any) -> Tensor:
    """The gradient of `packed`; the same from run to run."""
    *gradients, x, gates = gradients_inputs_gates
    packed = torch.empty_like(x.packed, memory_format=torch.contiguous_format)
    arguments, constants, config = _arguments(x)
    named = _by_name(x.read_layout(), [gradient.contiguous() for gradient in gradients])
    arguments |= {"packed": packed, "gates": gates if constants["GATES"] else None}
    arguments |= {f"d{name}": gradient for name, gradient in named.items()}
    batch, seq_len, _ = packed.shape
    grid = cdiv(seq_len, config.rows), batch
    launch(rotary_backward_kernel, grid, arguments, constants, config)
    return packed


def _by_name(layout: PackedLayout, outputs: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """The outputs, or their gradients, as kernels name them; None for those without elements."""
    compressed, other = ("cmp", "raw") if layout.mean else ("raw", "cmp")
    names = ["q", "gates", *(f"{x}_{y}" for y in (compressed, 0, 1, 2) for x in "kv")]
    named = zip(names, outputs, layout.present, strict=True)
    absent = {f"k_{other}": None, f"v_{other}": None}
    return absent | {name: tensor if present else None for name, tensor, present in named}


def _arguments(x: RotaryPoolInputs) -> tuple[dict[str, Any], dict[str, Any], Config]:
    """What the kernels take besides `packed` and outputs: arguments, constants and a tile."""
    layout, (_, seq_len, width) = x.read_layout(), x.packed.shape
    half = layout.key_dim // 2
    half_p, value_p = next_power_of_2(half), next_power_of_2(layout.value_dim)
    rest_p = next_power_of_2(max(1, width - sum(layout.columns[:3])))
    arguments = {"cos": x.cos.contiguous(), "sin": x.sin.contiguous(), "seq_len": seq_len}
    arguments |= {"block_tokens": None, "token_blocks": None, "key_len": 0}
    blocks = length = cover = 0
    if layout.mean:
        assert x.block_tokens is not None
        assert x.token_blocks is not None
        (blocks, length), (_, cover) = x.block_tokens.shape, x.token_blocks.shape
        arguments |= {"block_tokens": x.block_tokens.contiguous(), "key_len": blocks}
        arguments |= {"token_blocks": x.token_blocks.contiguous()}
    tokens = min(MAX_TOKENS, max(1, TILE // half_p))
    constants = {
        **{"WIDTH": width, "HEADS": layout.heads, "KV_HEADS": layout.kv_heads},
        **{"COPIES": layout.copies, "HALF": half, "VALUE": layout.value_dim},
        **{"GATES": layout.heads * layout.gates, "LEN": length, "COVER": cover},
        **{"HALF_P": half_p, "VALUE_P": value_p, "REST_P": rest_p, "TOKENS": tokens},
    }
    return arguments, constants, Config(tokens, 0, 4, 1)


triton_rotary_pool = register(
    "nsa::triton_rotary_pool",
    RotaryPoolInputs,
    rotary_pool_forward,
    RotaryPoolInputs.empty_outputs,
    outputs=10,
    gradient=Gradient(rotary_pool_backward, inputs=1, outputs=10, saved=slice(1, 2), unread=1),
)
