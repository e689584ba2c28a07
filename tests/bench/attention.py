"""Random inputs of attention, implementations that are timed on them, and their measurement.

`nsa_functions` returns those of nsa.ops; peers.py holds those of other libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops import (
    NSASpec,
    compress_mean,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from tests.bench.harness import Report, Result, Shape, peak_bytes

PASSES = ("forward", "forward_backward")
FIGURES = (*PASSES, "peak_bytes")
PARTS = ("compressed_attention", "select_blocks", "selected_attention", "window_attention")


class Inputs(NamedTuple):
    """nsa_attention's tensors, in order; compressed keys are mean-pooled selected-branch keys."""

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor

    @classmethod
    def random(
        cls,
        shape: Shape,
        batch: int,
        seq_len: int,
        spec: NSASpec,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Inputs:
        def normal(heads: int, size: int) -> Tensor:
            return torch.randn(batch, seq_len, heads, size, device=device, dtype=dtype)

        q = normal(shape.heads, shape.key)
        k_sel, k_win = (normal(shape.kv_heads, shape.key) for _ in range(2))
        v_sel, v_win = (normal(shape.kv_heads, shape.value) for _ in range(2))
        gates = torch.rand(batch, seq_len, shape.heads, 3, device=device, dtype=dtype)
        pooled = compress_mean(k_sel, spec), compress_mean(v_sel, spec)
        return cls(q, *pooled, k_sel, v_sel, k_win, v_win, gates)

    def local(self, spec: NSASpec) -> Inputs:
        """Return these with queries so similar within a block that they mostly select the same."""
        seq_len = self.q.shape[1]
        shared = torch.randn_like(self.q[:, : spec.select_blocks_len(seq_len)])
        q = shared.repeat_interleave(spec.select_len, 1)[:, :seq_len]
        return self._replace(q=q + 0.1 * torch.randn_like(self.q))


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
        """Run as in inference: nothing is saved for a backward pass."""
        with torch.no_grad():
            return self.function(*(x.detach() for x in self.inputs))

    def forward_backward(self) -> object:
        """Run as in training, with a fixed gradient of the output."""
        o = self.function(*self.inputs)
        if self._grad_output is None:
            self._grad_output = torch.randn_like(o)
        inputs = [x for x in self.inputs if x.requires_grad]
        return torch.autograd.grad(o, inputs, self._grad_output)

    def held(self) -> list[Tensor]:
        """Return the tensors that are kept between calls."""
        return self.inputs if self._grad_output is None else [*self.inputs, self._grad_output]


Builders = dict[str, Callable[[], Implementation]]


@torch.no_grad()
def select(inputs: Inputs, spec: NSASpec, backend: str) -> tuple[Tensor, Tensor]:
    """Return the compressed branch's lse and the selected blocks."""
    q, k, v = inputs[:3]
    _, lse = compressed_attention(q, k, v, spec, backend=backend)
    return lse, select_blocks(q, k, lse, spec, backend=backend)


def nsa_functions(x: Inputs, spec: NSASpec, backend: str) -> Builders:
    """Return builders of the whole and of PARTS; `select_blocks` has no gradient."""
    lse, index = select(x, spec, backend)

    def compressed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compressed_attention(q, k, v, spec, backend=backend)[0]

    blocks = partial(select_blocks, spec=spec, backend=backend)
    selected = partial(selected_attention, spec=spec, backend=backend)
    window = partial(window_attention, window=spec.window, backend=backend)
    whole = partial(nsa_attention, spec=spec, backend=backend)
    return {
        "nsa_attention": partial(Implementation, whole, *x),
        "compressed_attention": partial(Implementation, compressed, x.q, x.k_cmp, x.v_cmp),
        "select_blocks": partial(Implementation, blocks, x.q, x.k_cmp, lse, differentiable=False),
        "selected_attention": partial(Implementation, selected, x.q, x.k_sel, x.v_sel, index),
        "window_attention": partial(Implementation, window, x.q, x.k_win, x.v_win),
    }


def measure(builders: Builders, report: Report, references: Mapping[str, str]) -> dict[str, Result]:
    """Measure each forward, and forward and backward; return times, peak bytes, errors.

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
    for name, reference in references.items():
        if all(x in built and results[x]["forward"] for x in (name, reference)):
            relative = difference(built[name].forward(), built[reference].forward())
            results[name]["difference"] = {"from": reference, "relative": relative}
    return results


def difference(x: Tensor, y: Tensor) -> float:
    """Return ‖x − y‖ / ‖y‖, without float32 copies of the outputs."""
    parts = [
        torch.stack([(a.float() - b.float()).square().sum(), b.float().square().sum()])
        for a, b in zip(x.split(4096, 1), y.split(4096, 1), strict=True)
    ]
    error, norm = torch.stack(parts).double().sum(0).sqrt().tolist()
    return error / norm
