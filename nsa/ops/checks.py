"""Argument checks of the public functions; every error names the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops.documents import compressed_cu_seqlens
from nsa.spec import NSASpec


def check_heads(q: Tensor, **keys_or_values: Tensor) -> None:
    """Require [B, length, heads, size] tensors of one dtype and device; KV heads divide q's.

    Keys and values of one branch, such as `k_sel` and `v_sel`, may differ in head size only.
    """
    for name, x in {"q": q, **keys_or_values}.items():
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [B, T, heads, size]")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device} and q is {q.dtype} on {q.device}; "
                "give both the same dtype and device"
            )
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch {x.shape[0]} and q has {q.shape[0]}")
        if name[0] == "k" and x.shape[3] != q.shape[3]:
            raise ValueError(f"{name} has head size {x.shape[3]} and q has {q.shape[3]}")
        if x.shape[2] == 0 or q.shape[2] % x.shape[2]:
            raise ValueError(
                f"{name} has {x.shape[2]} heads, which do not divide q's {q.shape[2]} query heads"
            )
    for name, v in keys_or_values.items():
        k = keys_or_values.get(f"k{name[1:]}", v)
        if k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"k{name[1:]} is {tuple(k.shape)} and {name} is {tuple(v.shape)}; "
                "they may differ in head size only"
            )


def check_scale(q: Tensor, scale: float | None) -> float:
    """Return the softmax scale, which defaults to Dk^-0.5."""
    if scale is None:
        return q.shape[-1] ** -0.5
    if not 1e-30 < scale < 1e30:  # beyond these it under- or overflows in float32
        raise ValueError(f"scale = {scale}: must be from 1e-30 to 1e30, or None for Dk^-0.5")
    return scale


def check_length(name: str, x: Tensor, length: int, required_by: str) -> None:
    """Require `length` entries along x's second dimension."""
    if x.shape[1] != length:
        raise ValueError(f"{name} has length {x.shape[1]}; {required_by} requires {length}")


def check_documents(cu_seqlens: Tensor | None, x: Tensor, name: str = "q") -> None:
    """Require integer cu_seqlens [documents + 1] that ascends from 0 to T, for x [1, T, ..]."""
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        kind = type(cu_seqlens).__name__
        raise ValueError(f"cu_seqlens is a {kind}; it must be a tensor, int32 [documents + 1]")
    integers = cu_seqlens.dtype in (torch.int32, torch.int64)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or not integers:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}; "
            "it must be int32 [documents + 1], the offsets of packed documents, and no mask"
        )
    batch, seq_len = x.shape[:2]
    if batch != 1:
        raise ValueError(f"cu_seqlens packs documents into one row, but the batch is {batch}")
    if cu_seqlens.device != x.device:
        raise ValueError(
            f"cu_seqlens is on {cu_seqlens.device} and {name} on {x.device}; "
            "give both the same device"
        )
    if torch.compiler.is_compiling() or cu_seqlens.device.type != "cpu":
        return  # reading values would break the graph or synchronise with the device
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    falls = (cu_seqlens[1:] < cu_seqlens[:-1]).nonzero()
    if len(falls):
        at = int(falls[0])
        before, after = cu_seqlens[at : at + 2].tolist()
        raise ValueError(
            f"cu_seqlens falls from {before} to {after} at [{at + 1}]; it must ascend from 0 to T "
            f"= {seq_len}"
        )
    if first != 0 or last != seq_len:
        raise ValueError(
            f"cu_seqlens goes from {first} to {last}; it must ascend from 0 to T = {seq_len}"
        )


def check_compressed(k_cmp: Tensor, seq_len: int, spec: NSASpec, cu_seqlens: Tensor | None) -> None:
    """Require one compressed key per compressed block of the documents."""
    if cu_seqlens is None:
        expected = spec.compressed_len(seq_len)
    elif cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        expected = int(compressed_cu_seqlens(cu_seqlens, spec)[-1])
    else:
        return
    check_length("k_cmp", k_cmp, expected, f"block_len {spec.block_len} at T = {seq_len}")
