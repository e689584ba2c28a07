"""Checks of what a model or a layer is called with, where they cost no synchronisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.constants import IGNORE_INDEX

CONVERTED = {torch.float32, torch.float16, torch.bfloat16}  # by autocast


def check_spec(spec: Any) -> None:
    """Raise a ValueError if `spec` is no NSASpec.

    Not by isinstance: an export's code may hold the class twice.
    """
    if type(spec).__name__ != "NSASpec":
        fields = ", ".join(f"{k}={v}" for k, v in spec.items()) if isinstance(spec, dict) else "..."
        raise ValueError(f"spec = {spec!r}: is a {type(spec).__name__}; give NSASpec({fields})")


def check_hidden_states(x: Tensor, width: int, weight: Any, attention_mask: Any) -> None:
    """Raise a ValueError if a layer with this projection cannot read x, or is given a mask."""
    if attention_mask is not None:
        raise ValueError(
            "attention_mask is given: the layer's attention is always causal and reads no mask; "
            "omit it, and pack texts of different lengths without padding, by cu_seqlens"
        )
    if x.dim() != 3 or x.shape[1] < 1 or x.shape[2] != width:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [B, T, {width}]")
    # Quantized weights have a dtype that says nothing, and autocast may convert both.
    known = isinstance(weight, Tensor) and weight.is_floating_point()
    if not known or x.dtype == weight.dtype:
        return
    if not ({x.dtype, weight.dtype} <= CONVERTED and torch.is_autocast_enabled(x.device.type)):
        raise ValueError(
            f"x has dtype {x.dtype} and the layer {weight.dtype}; convert one: x.to({weight.dtype})"
        )


def check_tokens(tokens: Tensor, vocab_size: int, name: str = "input_ids") -> None:
    """Raise a ValueError for tokens that are no ids; on a GPU only their dtype is read."""
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} has dtype {tokens.dtype}; it must be int64 or int32")
    if tokens.device.type != "cpu" or torch.compiler.is_compiling() or not tokens.numel():
        return
    known = tokens[tokens != IGNORE_INDEX] if name == "labels" else tokens
    if known.numel() and not 0 <= int(known.min()) <= int(known.max()) < vocab_size:
        wrong = int(known.max()) if int(known.max()) >= vocab_size else int(known.min())
        ignored = f", or {IGNORE_INDEX}" if name == "labels" else ""
        raise ValueError(
            f"{name} contains {wrong}; ids are 0 to {vocab_size - 1} with this vocabulary{ignored}"
        )
