"""Triton backend: the backend's functions, and which inputs its kernels support.

An operation has a file of kernels (`band.py`, `select.py`, `selected.py`, `selected_keys.py`,
`decode_parts.py`) and its launchers and custom op, beside it where one file cannot hold both
(`band_op.py`, `selected_op.py`, `decode.py`); `gated.py` joins the three branches. They are
imported at their first call: importing Triton takes a while.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from nsa.spec import NSASpec

MAX_HEAD_SIZE = 256
MAX_PROGRAMS = 65_535  # of the second and third dimension of a grid
MIN_CAPABILITY = (8, 0)  # bf16 matrix products need it


def unsupported_reason(q: Tensor, *others: Tensor, by_name: bool) -> str | None:
    """Why the kernels do not support these tensors, or None; the interpreter runs only by name."""
    if q.device.type != "cuda" and not (by_name and interpreted()):
        return f"tensors are on {q.device.type}, and it needs a CUDA device"
    if q.dtype == torch.float64:
        return "it has no float64"
    if max(x.shape[-1] for x in (q, *others)) > MAX_HEAD_SIZE:
        return f"a head is larger than {MAX_HEAD_SIZE}"
    if q.shape[0] * q.shape[2] > MAX_PROGRAMS:
        return f"batch times heads is more than {MAX_PROGRAMS}"
    return _missing(q.device)


@torch.compiler.assume_constant_result
def _missing(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "the GPU is older than compute capability {}.{}".format(*MIN_CAPABILITY)
    return None


def interpreted() -> bool:
    """Whether Triton's interpreter is on (TRITON_INTERPRET=1), which runs kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, spec: NSASpec, scale: float, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention over the compressed keys of blocks that end at or before each query; (o, lse)."""
    from nsa.ops.triton.band_op import triton_band

    band = [spec.block_len, spec.block_stride, 0]
    return triton_band(q, k_cmp, v_cmp, cu_seqlens, band, scale)


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    spec: NSASpec,
    seq_len: int,
    scale: float,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """The blocks that each query attends to, ascending, padded with -1: int32 [B, T, Hkv, n]."""
    from nsa.ops.triton.select import triton_select

    return triton_select(q, k_cmp, lse, cu_seqlens, spec.to_ints(), seq_len, scale)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_index: Tensor,
    spec: NSASpec,
    scale: float,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Attention over the positions at or before each query inside its selected blocks."""
    from nsa.ops.triton.selected_op import triton_selected

    return triton_selected(q, k, v, block_index, cu_seqlens, spec.to_ints(), scale)[0]


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, cu_seqlens: Tensor | None
) -> Tensor:
    """Attention over the last `window` positions, the query's own included."""
    from nsa.ops.triton.band_op import triton_band

    return triton_band(q, k, v, cu_seqlens, [1, 1, window], scale)[0]


def nsa_attention(
    q: Tensor,
    *pairs_and_gates: Tensor,
    spec: NSASpec,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The three branches and their gates as one operation; (o, block_index)."""
    from nsa.ops.triton.gated import triton_gated

    o, block_index, *_ = triton_gated(q, *pairs_and_gates, cu_seqlens, spec.to_ints(), scale)
    return o, block_index


def decode_attention(
    q: Tensor,
    *buffers_gates_and_lengths: Tensor | None,
    spec: NSASpec,
    branches: str,
    scale: float,
) -> Tensor:
    """One new token of each sequence over its cache: [B, Hq, Dv]."""
    from nsa.ops.triton.decode import triton_decode

    return triton_decode(q, *buffers_gates_and_lengths, spec.to_ints(), branches, scale)
