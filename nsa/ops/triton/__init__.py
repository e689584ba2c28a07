"""Triton backend: its entry points, and the inputs that its kernels support.

docs/design/kernels.md lists the files. Entry points import kernels at the first call, because
importing Triton is slow.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

from nsa.ops.inputs import (
    AttentionInputs,
    PoolInputs,
    PortedPoolInputs,
    RotaryPoolInputs,
    SelectionInputs,
)
from nsa.spec import NSASpec

Function = TypeVar("Function", bound=Callable[..., Any])
MAX_HEAD_SIZE = 256
MAX_POOL_SIZE = 128  # of a head, and tokens of a block, that a program of `pool` holds
MAX_PROGRAMS = 65_535  # of the second and third dimension of a grid
MIN_CAPABILITY = (8, 0)  # bf16 matrix products need it


def unsupported_reason(
    x: Tensor, *others: Tensor, by_name: bool, attention: bool = True
) -> str | None:
    """Why the kernels cannot run on these tensors, or None.

    `by_name`: the caller requested Triton by name, which also allows its CPU interpreter.
    `attention`: x is q [B, T, Hq, Dk]; otherwise it may have any shape. Tensors on `meta` count as
    tensors on a GPU.
    """
    if x.device.type not in ("cuda", "meta") and not (by_name and interpreted()):
        return f"tensors are on {x.device.type}, and it needs a CUDA device"
    if x.dtype == torch.float64:
        return "it has no float64"
    if attention and max(y.shape[-1] for y in (x, *others)) > MAX_HEAD_SIZE:
        return f"a head is larger than {MAX_HEAD_SIZE}"
    if attention and x.shape[0] * x.shape[2] > MAX_PROGRAMS:
        return f"batch times heads is more than {MAX_PROGRAMS}"
    return _missing(x.device)


def constant_result(function: Function) -> Function:
    """Let compiled code call `function` once, when it is compiled, and keep the result.

    `torch.compiler.assume_constant_result` sets the same attribute but imports torch._dynamo, which
    would add a second to the start of every command.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_result
def _missing(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    from nsa.ops.triton.configs import AMD, amd_chip

    if name := amd_chip(device):
        if name not in AMD:
            return f"the GPU is AMD's {name}; of these it supports {', '.join(AMD)}"
        if find_spec("triton.language.target_info") is None:
            return "AMD's GPUs need Triton 3.5"
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "the GPU is older than compute capability {}.{}".format(*MIN_CAPABILITY)
    return None


def interpreted() -> bool:
    """Whether Triton's interpreter is on (TRITON_INTERPRET=1), which runs kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def attention(x: AttentionInputs) -> tuple[Tensor, Tensor]:
    """One branch's attention: (o, lse)."""
    from nsa.ops.triton.band_op import triton_band
    from nsa.ops.triton.selected_op import triton_selected

    q, k, v, block_index, cu_seqlens, branch, spec, scale = x
    if branch == "selected":
        return triton_selected(q, k, v, block_index, cu_seqlens, spec.to_ints(), scale)
    compressed = [spec.block_len, spec.block_stride, 0]
    band = compressed if branch == "compressed" else [1, 1, spec.window]
    return triton_band(q, k, v, cu_seqlens, band, scale)


def select_blocks(x: SelectionInputs) -> Tensor:
    """The blocks that each query selects, ascending, padded with -1: int32 [B, T, Hkv, n]."""
    from nsa.ops.triton.select import triton_select

    q, k_cmp, lse, cu_seqlens, spec, seq_len, scale = x
    return triton_select(q, k_cmp, lse, cu_seqlens, spec.to_ints(), seq_len, scale)


def rotary_pool(x: RotaryPoolInputs) -> tuple[Tensor, ...]:
    """The outputs in the order of `RotaryPoolInputs.empty_outputs`."""
    from nsa.ops.triton.rotary import triton_rotary_pool

    return triton_rotary_pool(*x)


def pool_limit(block_len: int, size: int) -> str | None:
    """Why the kernels of φ `pool` cannot take these sizes, or None: a program holds all of them."""
    if size > MAX_POOL_SIZE:
        return f"a head is larger than {MAX_POOL_SIZE}"
    if block_len > MAX_POOL_SIZE:
        return f"compressed blocks are longer than {MAX_POOL_SIZE}"
    return None


def pool(x: PoolInputs) -> Tensor:
    """Learned means of compressed blocks: [B, N, K, D]."""
    from nsa.ops.triton.pooling import triton_pool

    return triton_pool(*x)[0]


def pool_with_port(x: PortedPoolInputs) -> tuple[Tensor, Tensor]:
    """y, and its port."""
    from nsa.ops.triton.pooling import triton_pool_with_port

    y, port_of_y, *_ = triton_pool_with_port(*x)
    return y, port_of_y


def nsa_attention(
    q: Tensor,
    *pairs_and_gates: Tensor,
    spec: NSASpec,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The three branches and their gates as one custom op: (o, block_index)."""
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
    """Attention of one new token per sequence over its KV cache: [B, Hq, Dv]."""
    from nsa.ops.triton.decode import triton_decode

    return triton_decode(q, *buffers_gates_and_lengths, spec.to_ints(), branches, scale)


def swiglu(gate_up: Tensor, width: int) -> Tensor:
    """silu(gate) · up of [.., gate | up | padding], each of `width` columns."""
    from nsa.ops.triton.activation import triton_swiglu

    return triton_swiglu(gate_up, width)


def cross_entropy_(logits: Tensor, labels: Tensor, with_gradients: bool) -> Tensor:
    """-log softmax(logits)[label]; `with_gradients` overwrites the logits with the gradient."""
    from nsa.ops.triton import cross_entropy

    return cross_entropy.cross_entropy_(logits, labels, with_gradients)


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMSNorm times weight); without delta, x itself comes first."""
    from nsa.ops.triton.normalization import rms_norm_of, triton_add_rms_norm

    if delta is None:
        return rms_norm_of(x, weight, eps)
    return triton_add_rms_norm(x, delta, weight, eps)


def add_token_gradients_(d_weight: Tensor, d_x: Tensor, tokens: Tensor) -> None:
    """d_weight[tokens] += d_x, in place."""
    from nsa.ops.triton.embedding import triton_add_token_gradients_

    triton_add_token_gradients_(d_weight, d_x, tokens)
