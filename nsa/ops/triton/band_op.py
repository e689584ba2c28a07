"""Launchers and custom op of attention over a band of keys: the compressed and window branches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.triton.band import band_forward_kernel, band_keys_kernel, band_queries_kernel
from nsa.ops.triton.common import (
    LOG2E,
    attention_constants,
    backward_rows,
    document_arguments,
    slots,
)
from nsa.ops.triton.configs import choose_config
from nsa.ops.triton.flash_window import flash_forward, is_faster
from nsa.ops.triton.launch import cdiv, launch

# Few tiles of compressed keys see many queries each. Several programs share one, and their float32
# parts are added up in a fixed order.
QUERIES_PER_SPLIT = 4096
MAX_SPLITS = 8


class Band(NamedTuple):
    """Inputs of the op; `band` is [LEN, STRIDE, WINDOW], where WINDOW 0 is none."""

    q: Tensor  # [B, T, Hq, Dk]
    k: Tensor  # [B, N, Hkv, Dk]
    v: Tensor  # [B, N, Hkv, Dv]
    cu_seqlens: Tensor | None
    band: list[int]
    scale: float


def band_forward(x: Band) -> tuple[Tensor, Tensor]:
    """(o, lse)."""
    arguments, constants, sizes = _arguments(x)
    q, k, v, cu_seqlens, (_, _, window), scale = x
    if window and is_faster(q, v, sizes):
        return flash_forward(
            arguments["q"], arguments["k"], arguments["v"], cu_seqlens, window, scale
        )
    batch, seq_len, heads, _ = q.shape
    o = q.new_empty(batch, seq_len, heads, v.shape[-1])
    lse = q.new_empty(batch, seq_len, heads, dtype=torch.float32)
    config = choose_config(f"{_branch(x)}_forward", sizes, q, seq_len)
    rows = slots(seq_len * constants["GROUP"], config.rows, cu_seqlens)
    launch(
        band_forward_kernel,
        (rows, k.shape[2], batch),
        arguments | {"o": o, "lse": lse},
        constants | {"ROWS": config.rows, "KEYS": config.keys},
        config,
    )
    return o, lse


def band_backward(
    do: Tensor, dlse: Tensor, x: Band, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; the same from run to run."""
    dq = torch.empty_like(x.q, memory_format=torch.contiguous_format)
    delta, lse2 = backward_rows(do, o, lse, dlse)
    arguments, constants, sizes = _arguments(x)
    arguments |= {"do": do.contiguous(), "lse2": lse2, "delta": delta, "dq": dq}
    seq_len = x.q.shape[1]
    config = choose_config(f"{_branch(x)}_queries", sizes, x.q, seq_len)
    launch(
        band_queries_kernel,
        (slots(seq_len * constants["GROUP"], config.rows, x.cu_seqlens), x.k.shape[2], len(x.q)),
        arguments,
        constants | {"ROWS": config.rows, "KEYS": config.keys},
        config,
    )
    return dq, *band_key_gradients(do, x, lse2, delta)


def band_key_gradients(do: Tensor, x: Band, lse2: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """(dk, dv), given lse in base 2 and delta = Σ do · o of each row."""
    arguments, constants, sizes = _arguments(x)
    q, k, v, cu_seqlens, (_, stride, _), _ = x
    batch, seq_len = q.shape[:2]
    dk, dv, splits = key_parts(x)
    arguments |= {"do": do.contiguous(), "lse2": lse2, "delta": delta}
    config = choose_config(f"{_branch(x)}_keys", sizes, q, seq_len)
    launch(
        band_keys_kernel,
        (slots(seq_len, config.keys * stride, cu_seqlens), splits, k.shape[2] * batch),
        arguments | {"dk": dk, "dv": dv, "split_len": cdiv(seq_len, splits)},
        constants | {"ROWS": config.rows, "KEYS": config.keys},
        config,
    )
    return add_parts(dk, k.dtype), add_parts(dv, v.dtype)


def key_parts(x: Band) -> tuple[Tensor, Tensor, int]:
    """Uninitialised dk and dv, [splits, ..] for `add_parts`, and the number of splits."""
    seq_len, window = x.q.shape[1], x.band[2]
    splits = 1 if window else min(MAX_SPLITS, cdiv(seq_len, QUERIES_PER_SPLIT))
    # Packed documents may have fewer compressed keys than k has rows. No kernel writes to the rest,
    # and no check counts them where cu_seqlens is on a device.
    empty = torch.zeros if x.cu_seqlens is not None and not window else torch.empty
    dtype = torch.float32 if splits > 1 else x.k.dtype
    dk, dv = (empty(splits, *y.shape, dtype=dtype, device=y.device) for y in (x.k, x.v))
    return dk, dv, splits


def add_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over splits."""
    return parts[0] if parts.shape[0] == 1 else parts.sum(0).to(dtype)


def _branch(x: Band) -> str:
    return "window" if x.band[2] else "compressed"


def _arguments(x: Band) -> tuple[dict[str, Any], dict[str, Any], tuple[int, int]]:
    """What all three kernels take: arguments, constants, and the sizes that tiles depend on."""
    length, stride, window = x.band
    arguments = {
        **{"q": x.q.contiguous(), "k": x.k.contiguous(), "v": x.v.contiguous()},
        **document_arguments(x.q.shape[1], x.cu_seqlens),
        **{"key_len": x.k.shape[1], "scale": x.scale * LOG2E, "scale_out": x.scale},
    }
    constants = attention_constants(x.q, x.k, x.v)
    constants = constants | {"LEN": length, "STRIDE": stride, "WINDOW": window}
    return arguments, constants, (constants["KEY_P"], constants["VALUE_P"])


def outputs_like(x: Any) -> tuple[Tensor, Tensor]:
    """(o, lse) of attention without their values."""
    lse = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
    return x.q.new_empty(*x.q.shape[:3], x.v.shape[-1]), lse


triton_band = register(
    "nsa::triton_band",
    Band,
    band_forward,
    fake=outputs_like,
    outputs=2,
    gradient=Gradient(band_backward, inputs=3, outputs=2),
)
