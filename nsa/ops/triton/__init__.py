"""Triton backend: which inputs its kernels support, and the operations that all backends have.

docs/design/kernels.md lists the files. Kernels are imported at the first call, because importing
Triton is slow. Other operations, such as SwiGLU, import their Triton op themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

from nsa.ops.inputs import AttentionInputs, SelectionInputs

Function = TypeVar("Function", bound=Callable[..., Any])
MAX_HEAD_SIZE = 256
MAX_POOL_SIZE = 128  # of a head, and of a block in tokens: a program of `pool` holds both
MAX_PROGRAMS = 65_535  # in the second and third dimension of a grid
MIN_CAPABILITY = (8, 0)  # bf16 matrix products need it


def unsupported_reason(
    x: Tensor, *others: Tensor, by_name: bool, attention: bool = True
) -> str | None:
    """Return why the kernels cannot run on these tensors, or None.

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
    return _device_problem(x.device)


def constant_result(function: Function) -> Function:
    """Let compiled code call `function` once, when it is compiled, and keep the result.

    `torch.compiler.assume_constant_result` sets the same attribute but imports torch._dynamo, which
    would add a second to the start of every command.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_result
def _device_problem(device: torch.device) -> str | None:
    # Uncached, because Dynamo looks through the wrapper of `cache` and so would not see the mark.
    return _find_device_problem(device)


@cache
def _find_device_problem(device: torch.device) -> str | None:
    """Return why no kernel can run on this device, or None; computed once."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    from nsa.ops.triton.configs import AMD, amd_chip

    if name := amd_chip(device):
        if name not in AMD:
            return f"the GPU is AMD's {name}; of AMD's GPUs it supports {', '.join(AMD)}"
        if find_spec("triton.language.target_info") is None:
            return "AMD's GPUs need Triton 3.5"
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "the GPU is older than compute capability {}.{}".format(*MIN_CAPABILITY)
    return None


def interpreted() -> bool:
    """Return whether Triton's interpreter, which runs kernels on the CPU, is on."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def attention(x: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return one branch's attention, (o, lse)."""
    from nsa.ops.triton.band import triton_band
    from nsa.ops.triton.selected import triton_selected

    return triton_selected(x) if x.branch == "selected" else triton_band(x)


def select_blocks(x: SelectionInputs) -> Tensor:
    """Return each query's selected blocks, ascending, padded with -1: int32 [B, T, Hkv, n]."""
    from nsa.ops.triton.select import triton_select

    return triton_select(x)


def pool_limit(block_len: int, size: int) -> str | None:
    """Return why the kernels of φ `pool` cannot take these sizes, or None."""
    if size > MAX_POOL_SIZE:
        return f"a head is larger than {MAX_POOL_SIZE}"
    if block_len > MAX_POOL_SIZE:
        return f"compressed blocks are longer than {MAX_POOL_SIZE}"
    return None
