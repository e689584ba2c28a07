"""Attention implementations to benchmark: the forward pass, and forward and backward.

`calls` returns those of nsa.ops; baselines.py holds those of other libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from nsa.bench.inputs import Inputs
from nsa.bench.measure import peak_bytes
from nsa.bench.results import Report, Result, figure, ratio
from nsa.ops import (
    NSASpec,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    window_attention,
)

FIGURES = ("forward", "forward_backward", "peak_bytes")
PARTS = ("compressed_attention", "select_blocks", "selected_attention", "window_attention")
FUNCTIONS = (*PARTS, "nsa_attention")


class Implementation:
    """`function(*inputs)` returns attention's output; floating-point inputs get gradients."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        *inputs: Tensor,
        note: str = "",
        differentiable: bool = True,
    ) -> None:
        self.function, self.note, self.differentiable = function, note, differentiable
        self.inputs = [
            x.detach().requires_grad_(differentiable and x.is_floating_point()) for x in inputs
        ]
        self._grad_output: Tensor | None = None

    def forward(self) -> Tensor:
        """As in inference: nothing is saved for a backward pass."""
        with torch.no_grad():
            return self.function(*(x.detach() for x in self.inputs))

    def forward_backward(self) -> object:
        """As in training, with a fixed gradient of the output."""
        o = self.function(*self.inputs)
        if self._grad_output is None:
            self._grad_output = torch.randn_like(o)
        inputs = [x for x in self.inputs if x.requires_grad]
        return torch.autograd.grad(o, inputs, self._grad_output)

    def step(self) -> object:
        """Forward and backward, or forward alone if there is no gradient."""
        return self.forward_backward() if self.differentiable else self.forward()

    def held(self) -> list[Tensor]:
        """Tensors that are kept between calls."""
        return self.inputs if self._grad_output is None else [*self.inputs, self._grad_output]


@torch.no_grad()
def select(inputs: Inputs, spec: NSASpec, backend: str) -> tuple[Tensor, Tensor]:
    """Return the compressed branch's lse and the selected blocks."""
    q, k, v = inputs[:3]
    _, lse = compressed_attention(q, k, v, spec, backend=backend)
    return lse, select_blocks(q, k, lse, spec, backend=backend)


def calls(
    x: Inputs, spec: NSASpec, backend: str, selection: tuple[Tensor, Tensor] | None = None
) -> dict[str, Implementation]:
    """Return an implementation of each of FUNCTIONS; `select_blocks` has no gradient."""
    lse, index = selection or select(x, spec, backend)

    def compressed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compressed_attention(q, k, v, spec, backend=backend)[0]

    blocks = partial(select_blocks, spec=spec, backend=backend)
    selected = partial(selected_attention, spec=spec, backend=backend)
    window = partial(window_attention, window=spec.window, backend=backend)
    return {
        "compressed_attention": Implementation(compressed, x.q, x.k_cmp, x.v_cmp),
        "select_blocks": Implementation(blocks, x.q, x.k_cmp, lse, differentiable=False),
        "selected_attention": Implementation(selected, x.q, x.k_sel, x.v_sel, index),
        "window_attention": Implementation(window, x.q, x.k_win, x.v_win),
        "nsa_attention": Implementation(partial(nsa_attention, spec=spec, backend=backend), *x),
    }


Builders = dict[str, Callable[[], Implementation]]


def measure(
    builders: Builders, report: Report, references: Mapping[str, str] | None = None
) -> dict[str, Result]:
    """Milliseconds forward, forward and backward, and peak bytes of each; errors where missing.

    `references` maps an implementation to the one whose output it should equal.
    """
    built, results = report.build(builders, FIGURES)
    for name, x in built.items():
        results[name]["note"] = x.note
    report.time({name: x.forward for name, x in built.items()}, results, "forward")
    backward = {
        name: x.forward_backward
        for name, x in built.items()
        if x.differentiable and results[name]["forward"]
    }
    report.time(backward, results, "forward_backward")
    for name, step in backward.items():
        if results[name]["forward_backward"]:
            results[name]["peak_bytes"] = peak_bytes(step, built[name].held(), report.device)
    for name, reference in (references or {}).items():
        if all(x in built and results[x]["forward"] for x in (name, reference)):
            relative = difference(built[name].forward(), built[reference].forward())
            results[name]["difference"] = {"from": reference, "relative": relative}
    return results


def difference(x: Tensor, y: Tensor) -> float:
    """‖x − y‖ / ‖y‖ without float32 copies of the outputs."""
    parts = [
        torch.stack([(a.float() - b.float()).square().sum(), b.float().square().sum()])
        for a, b in zip(x.split(4096, 1), y.split(4096, 1), strict=True)
    ]
    error, norm = torch.stack(parts).double().sum(0).sqrt().tolist()
    return error / norm


def ratios(
    results: Mapping[str, Result], base_of: Callable[[str], str]
) -> dict[str, dict[str, float | None]]:
    """Each implementation's figures over its base's: above 1, the base is faster or smaller."""
    return {
        name: {what: ratio(figure(x, what), figure(results[base], what)) for what in FIGURES}
        for name, x in results.items()
        if (base := base_of(name)) != name and base in results
    }
