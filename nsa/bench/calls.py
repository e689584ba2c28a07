"""The functions of nsa.ops as calls on given inputs, and what each has to compute and move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nsa.bench.gpu import tensor_bytes
from nsa.bench.inputs import Inputs
from nsa.bench.shapes import PARTS
from nsa.ops import (
    NSASpec,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    window_attention,
)


@dataclass(frozen=True)
class Call:
    """`function(*tensors)` is what is measured; choosing blocks has no gradient."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    learns: bool = True


@dataclass(frozen=True)
class Chosen:
    """What the compressed branch hands to the selected one."""

    lse: Tensor
    index: Tensor

    @classmethod
    def of(cls, inputs: Inputs, spec: NSASpec, backend: str) -> Chosen:
        with torch.no_grad():
            _, lse = compressed_attention(
                inputs.q, inputs.k_cmp, inputs.v_cmp, spec, backend=backend
            )
            return cls(lse, select_blocks(inputs.q, inputs.k_cmp, lse, spec, backend=backend))


def calls(inputs: Inputs, chosen: Chosen, spec: NSASpec, backend: str) -> dict[str, Call]:
    """Every function by its name."""
    given: dict[str, Any] = {"backend": backend}
    q = inputs.q
    return {
        "compressed_attention": Call(
            lambda q, k, v: compressed_attention(q, k, v, spec, **given)[0],
            (q, inputs.k_cmp, inputs.v_cmp),
        ),
        "select_blocks": Call(
            lambda q, k, lse: select_blocks(q, k, lse, spec, **given),
            (q, inputs.k_cmp, chosen.lse),
            learns=False,
        ),
        "selected_attention": Call(
            lambda q, k, v, index: selected_attention(q, k, v, index, spec, **given),
            (q, inputs.k_sel, inputs.v_sel, chosen.index),
        ),
        "window_attention": Call(
            lambda q, k, v: window_attention(q, k, v, spec.window, **given),
            (q, inputs.k_win, inputs.v_win),
        ),
        "nsa_attention": Call(partial(nsa_attention, spec=spec, **given), inputs.tensors()),
    }


def flops(name: str, inputs: Inputs, index: Tensor, spec: NSASpec) -> dict[str, int]:
    """Operations forward, and forward and backward: pairs that are seen, two a multiplication.

    The backward pass multiplies each pair five times (scores again, dp, dq, dk, dv).
    """
    key, value = inputs.q.shape[-1], inputs.v_sel.shape[-1]
    if name == "select_blocks":
        once = 2 * pairs("compressed_attention", inputs, index, spec) * key
        return {"forward": once, "forward_backward": once}
    if name == "nsa_attention":
        counts = [flops(part, inputs, index, spec) for part in PARTS]
        return {what: sum(count[what] for count in counts) for what in counts[0]}
    seen = pairs(name, inputs, index, spec)
    return {
        "forward": 2 * seen * (key + value),
        "forward_backward": 2 * seen * (4 * key + 3 * value),
    }


def pairs(name: str, inputs: Inputs, index: Tensor, spec: NSASpec) -> int:
    """(query, key) pairs that a branch sees, over the whole batch and all query heads."""
    batch, seq_len, heads = inputs.q.shape[:3]
    if name == "selected_attention":
        t = torch.arange(seq_len, device=index.device)[:, None, None]
        inside = (t + 1 - index.long() * spec.select_len).clamp(max=spec.select_len)
        return int(inside.masked_fill_(index < 0, 0).sum()) * heads // index.shape[2]
    if name == "window_attention":
        seen = sum(min(t + 1, spec.window) for t in range(seq_len))
    else:
        seen = sum(spec.visible_compressed(t) for t in range(seq_len))
    return seen * batch * heads


def moved_bytes(name: str, call: Call, inputs: Inputs, spec: NSASpec) -> dict[str, int]:
    """Bytes that have to be moved: inputs and saved outputs read once, results written once."""
    read = tensor_bytes(call.tensors)
    rows, value = inputs.q.shape[:3].numel(), inputs.v_sel.shape[-1]
    if name == "select_blocks":
        batch, seq_len = inputs.q.shape[:2]
        written = 4 * batch * seq_len * inputs.k_cmp.shape[2] * spec.select_top
        return {"forward": read + written, "forward_backward": read + written}
    output = rows * (value * inputs.q.element_size() + 4 * (name != "nsa_attention"))
    gradients = tensor_bytes(x for x in call.tensors if x.is_floating_point())
    return {
        "forward": read + output,
        "forward_backward": 2 * read + 3 * output + gradients,
    }
