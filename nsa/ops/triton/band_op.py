"""Launchers and custom ops of banded attention: the compressed and the window branch."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from nsa.ops.triton.band import band_forward_kernel, band_keys_kernel, band_queries_kernel
from nsa.ops.triton.common import (
    LOG2E,
    backward_arguments,
    backward_rows,
    offsets_of,
    shape_constants,
    slots,
)
from nsa.ops.triton.configs import choose_config
from nsa.ops.triton.flash_window import flash_forward, is_faster
from nsa.ops.triton.launch import launch, rows_contiguous, strides

# Few tiles of compressed keys see very many queries each. More programs share them, and their
# float32 parts are added up in a fixed order.
QUERIES_PER_SPLIT = 4096
MOST_SPLITS = 8


def band_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, band: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """(o, lse) of attention over the band [LEN, STRIDE, WINDOW]; WINDOW 0 is none."""
    q, k, v = map(rows_contiguous, (q, k, v))
    constants = _constants(q, k, v, cu_seqlens, band)
    sizes = constants["KEY_P"], constants["VALUE_P"]
    if band[2] and is_faster(q, v, sizes):
        return flash_forward(q, k, v, cu_seqlens, band[2], scale)
    batch, seq_len, heads = q.shape[:3]
    o = q.new_empty(batch, seq_len, heads, v.shape[-1])
    lse = q.new_empty(batch, seq_len, heads, dtype=torch.float32)
    config = choose_config("band_forward", sizes, q.dtype)
    cu, documents = offsets_of(cu_seqlens)
    rows = slots(seq_len * constants["GROUP"], config.rows, cu_seqlens)
    launch(
        band_forward_kernel,
        (rows, k.shape[2], batch),
        {"q": q, "k": k, "v": v, "o": o, "lse": lse, "cu": cu}
        | strides(q=q, k=k, v=v, o=o, lse=lse)
        | {"seq_len": seq_len, "documents": documents, "scale": scale * LOG2E},
        constants | {"ROWS": config.rows, "KEYS": config.keys},
        config,
    )
    return o, lse


def band_backward(
    do: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    band: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; the same from run to run."""
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    delta, lse2 = backward_rows(do, o, lse, dlse)
    dk, dv = band_gradients(do, q, k, v, lse2, delta, dq, False, band, cu_seqlens, scale)
    return dq, dk, dv


def band_gradients(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse2: Tensor,
    delta: Tensor,
    dq: Tensor,
    add: bool,
    band: list[int],
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(dk, dv), and dq written, or added to what is there, from what `backward_rows` has made."""
    q, k, v, do = map(rows_contiguous, (q, k, v, do))
    batch, seq_len = q.shape[:2]
    constants = _constants(q, k, v, cu_seqlens, band)
    inputs = backward_arguments(do, q, k, v, lse2, delta, cu_seqlens, scale)
    sizes = constants["KEY_P"], constants["VALUE_P"]

    config = choose_config("band_queries", sizes, q.dtype)
    launch(
        band_queries_kernel,
        (slots(seq_len * constants["GROUP"], config.rows, cu_seqlens), k.shape[2], batch),
        inputs | {"dq": dq} | strides(dq=dq),
        constants | {"ROWS": config.rows, "KEYS": config.keys, "ADD": add},
        config,
    )

    splits = 1 if band[2] else min(MOST_SPLITS, triton.cdiv(seq_len, QUERIES_PER_SPLIT))
    dk, dv = (
        x.new_empty(splits, *x.shape, dtype=torch.float32 if splits > 1 else x.dtype)
        for x in (k, v)
    )
    config = choose_config("band_keys", sizes, q.dtype)
    launch(
        band_keys_kernel,
        (slots(seq_len, config.keys * band[1], cu_seqlens), splits, k.shape[2] * batch),
        inputs
        | {"dk": dk, "dv": dv, "split_len": triton.cdiv(seq_len, splits)}
        | {"dk_s": dk.stride(0), "dv_s": dv.stride(0)}
        | strides(dk=dk[0], dv=dv[0]),
        constants | {"ROWS": config.rows, "KEYS": config.keys, "HEADS": k.shape[2]},
        config,
    )
    return _add_up(dk, k.dtype), _add_up(dv, v.dtype)


def _add_up(parts: Tensor, dtype: torch.dtype) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0).to(dtype)


def _constants(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, band: list[int]
) -> dict[str, Any]:
    length, stride, window = band
    constants = shape_constants(q, k, v, cu_seqlens)
    return constants | {"LEN": length, "STRIDE": stride, "WINDOW": window}


@torch.library.custom_op("nsa::triton_band", mutates_args=())
def triton_band(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, band: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """One branch's (o, lse)."""
    return band_forward(q, k, v, cu_seqlens, band, scale)


@triton_band.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, band: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("nsa::triton_band_backward", mutates_args=())
def triton_band_backward(
    do: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    band: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    return band_backward(do, dlse, q, k, v, o, lse, cu_seqlens, band, scale)


@triton_band_backward.register_fake
def _(
    do: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, cu_seqlens, *ctx.static = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    return *triton_band_backward(do, dlse, *ctx.saved_tensors, *ctx.static), None, None, None


triton_band.register_autograd(_backward, setup_context=_setup_context)
