"""The fused kernels: what they can serve, and the functions that every backend has.

An operation is a file of kernels (`band.py`, `select.py`, `selected.py`, `selected_keys.py`) and
its launchers and custom ops, beside it where one file cannot hold both; `gated.py` joins them, and
`decode.py` has a token's. They are imported at the first call that they serve: importing Triton
takes a while.
"""

from __future__ import annotations

import os
from dataclasses import astuple
from importlib.util import find_spec

import torch
from torch import Tensor

from nsa.spec import NSASpec

LARGEST_HEAD = 256
MOST_PROGRAMS = 65_535  # of the second and third dimension of a grid
OLDEST = (8, 0)  # compute capability: bf16 matrix products need it


def why_not(q: Tensor, *others: Tensor, by_name: bool) -> str | None:
    """Why these tensors cannot be served, or None; the interpreter serves only if asked by name."""
    if q.device.type != "cuda" and not (by_name and interpreted()):
        return f"tensors are on {q.device.type}, and it needs a CUDA device"
    if q.dtype == torch.float64:
        return "it has no float64"
    if max(x.shape[-1] for x in (q, *others)) > LARGEST_HEAD:
        return f"a head is larger than {LARGEST_HEAD}"
    if q.shape[0] * q.shape[2] > MOST_PROGRAMS:
        return f"batch times heads is more than {MOST_PROGRAMS}"
    return _lacking(q.device)


@torch.compiler.assume_constant_result
def _lacking(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST:
        return f"the GPU is older than compute capability {OLDEST[0]}.{OLDEST[1]}"
    return None


def interpreted() -> bool:
    """Whether Triton's interpreter is on (TRITON_INTERPRET=1), which runs kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    spec: NSASpec,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each query over the compressed keys of blocks that end at or before it; (o, lse)."""
    from nsa.ops.triton.band_op import triton_band

    band = [spec.block_len, spec.block_stride, 0]
    return triton_band(q, k_cmp, v_cmp, cu_seqlens, band, scale)


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    spec: NSASpec,
    *,
    seq_len: int,
    scale: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The blocks that each query attends to, ascending, padded with -1: int32 [B, T, K, n]."""
    from nsa.ops.triton.select import triton_select

    return triton_select(q, k_cmp, lse, cu_seqlens, list(astuple(spec)), seq_len, scale)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_index: Tensor,
    spec: NSASpec,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Each query over the positions at or before it inside its chosen blocks."""
    from nsa.ops.triton.selected_op import triton_selected

    pattern = list(astuple(spec))
    return triton_selected(q, k, v, block_index, cu_seqlens, pattern, scale)[0]


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Each query over the last `window` positions, its own included."""
    from nsa.ops.triton.band_op import triton_band

    return triton_band(q, k, v, cu_seqlens, [1, 1, window], scale)[0]


def nsa_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    spec: NSASpec,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The three branches and their gates as one operation; (o, block_index)."""
    from nsa.ops.triton.gated import triton_gated

    pairs = k_cmp, v_cmp, k_sel, v_sel, k_win, v_win
    o, index, *_ = triton_gated(q, *pairs, gates, cu_seqlens, list(astuple(spec)), scale)
    return o, index
