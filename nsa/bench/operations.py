"""The functions of nsa.ops as calls on given inputs, and the FLOPs and bytes of each call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nsa.bench.implementations import Implementation
from nsa.bench.inputs import Inputs
from nsa.bench.measure import tensor_bytes
from nsa.ops import (
    NSASpec,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    window_attention,
)

PARTS = ("compressed_attention", "select_blocks", "selected_attention", "window_attention")
FUNCTIONS = (*PARTS, "nsa_attention")


@dataclass(frozen=True)
class SelectedBlocks:
    """What the compressed branch passes on: lse, and the selected blocks."""

    lse: Tensor
    index: Tensor

    @classmethod
    def of(cls, inputs: Inputs, spec: NSASpec, backend: str) -> SelectedBlocks:
        with torch.no_grad():
            _, lse = compressed_attention(
                inputs.q, inputs.k_cmp, inputs.v_cmp, spec, backend=backend
            )
            return cls(lse, select_blocks(inputs.q, inputs.k_cmp, lse, spec, backend=backend))


def calls(
    inputs: Inputs, spec: NSASpec, backend: str, selection: SelectedBlocks | None = None
) -> dict[str, Implementation]:
    """Every function by name; selecting blocks has no gradient."""
    x, selection = inputs, selection or SelectedBlocks.of(inputs, spec, backend)

    def cmp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compressed_attention(q, k, v, spec, backend=backend)[0]

    select = partial(select_blocks, spec=spec, backend=backend)
    sel = partial(selected_attention, spec=spec, backend=backend)
    win = partial(window_attention, window=spec.window, backend=backend)
    return {
        "compressed_attention": Implementation(cmp, x.q, x.k_cmp, x.v_cmp),
        "select_blocks": Implementation(select, x.q, x.k_cmp, selection.lse, differentiable=False),
        "selected_attention": Implementation(sel, x.q, x.k_sel, x.v_sel, selection.index),
        "window_attention": Implementation(win, x.q, x.k_win, x.v_win),
        "nsa_attention": Implementation(partial(nsa_attention, spec=spec, backend=backend), *x),
    }


def flops(name: str, inputs: Inputs, spec: NSASpec) -> dict[str, int]:
    """FLOPs of the visible pairs. Backward: five products (scores again, dp, dq, dk, dv)."""
    key, value = inputs.q.shape[-1], inputs.v_sel.shape[-1]
    if name == "nsa_attention":
        counts = [flops(part, inputs, spec) for part in PARTS]
        return {what: sum(count[what] for count in counts) for what in counts[0]}
    visible = 2 * pairs(name, inputs, spec)
    if name == "select_blocks":
        return {"forward": visible * key, "forward_backward": visible * key}
    return {
        "forward": visible * (key + value),
        "forward_backward": visible * (4 * key + 3 * value),
    }


def pairs(name: str, inputs: Inputs, spec: NSASpec) -> int:
    """Visible (query, key) pairs of a function, over the batch and all query heads."""
    batch, seq_len, heads = inputs.q.shape[:3]
    visible = {
        "selected_attention": spec.visible_selected,
        "window_attention": spec.visible_window,
    }.get(name, spec.visible_compressed)
    return sum(map(visible, range(seq_len))) * batch * heads


def moved_bytes(name: str, call: Implementation, inputs: Inputs, spec: NSASpec) -> dict[str, int]:
    """Least bytes moved: inputs and saved outputs read once, results written once."""
    read = tensor_bytes(call.inputs)
    rows, value = inputs.q.shape[:3].numel(), inputs.v_sel.shape[-1]
    if name == "select_blocks":
        moved = read + 4 * inputs.q.shape[:2].numel() * inputs.k_cmp.shape[2] * spec.select_top
        return {"forward": moved, "forward_backward": moved}
    output = rows * (value * inputs.q.element_size() + 4 * (name != "nsa_attention"))  # o and lse
    gradients = tensor_bytes(x for x in call.inputs if x.is_floating_point())
    return {"forward": read + output, "forward_backward": 2 * read + 3 * output + gradients}
