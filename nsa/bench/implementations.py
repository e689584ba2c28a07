"""Attention implementations under measurement: forward alone, and forward and backward.

The implementations of one case alternate and are compared with the first one. An error is a result
too: it is recorded where the figure would stand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from nsa.bench.measure import Step, peak_bytes, recover, time_alternating
from nsa.bench.results import Report, ratio

FIGURES = ("forward", "forward_backward", "peak_bytes")


class Unsupported(ValueError):
    """The implementation does not take this shape."""


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
        """Tensors that live between calls."""
        return self.inputs if self._grad_output is None else [*self.inputs, self._grad_output]


Builders = Mapping[str, Callable[[], Implementation]]
Result = dict[str, Any]


def measure(
    builders: Builders, report: Report, references: Mapping[str, str] | None = None
) -> dict[str, Result]:
    """Milliseconds forward, forward and backward, and peak bytes of each; errors where missing.

    `references` maps an implementation to the one whose output it should equal.
    """
    device = report.device
    results: dict[str, Result] = {
        name: {**dict.fromkeys(FIGURES), "errors": {}, "note": ""} for name in builders
    }
    built: dict[str, Implementation] = {}
    for name, build in builders.items():
        try:
            built[name] = build()
            results[name]["note"] = built[name].note
        except (Unsupported, ImportError) as error:
            results[name]["errors"]["all"] = str(error)
        except Exception as error:
            results[name]["errors"]["all"] = recover(error, device)

    def time_all(figure: str, steps: Mapping[str, Step]) -> None:
        flags = report.flags
        timings, errors = time_alternating(
            steps, device, seconds=flags.seconds, rounds=flags.rounds
        )
        for name, timing in timings.items():
            results[name][figure] = asdict(timing)
        for name, error in errors.items():
            results[name]["errors"][figure] = error

    time_all("forward", {name: x.forward for name, x in built.items()})
    backward = {
        name: x for name, x in built.items() if x.differentiable and results[name]["forward"]
    }
    time_all("forward_backward", {name: x.forward_backward for name, x in backward.items()})
    for name, x in backward.items():
        if results[name]["forward_backward"]:
            results[name]["peak_bytes"] = peak_bytes(x.forward_backward, x.held(), device)
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


def figure(result: Mapping[str, Any], what: str) -> float | None:
    """Median milliseconds, or bytes."""
    value = result[what]
    return value["median"] if isinstance(value, dict) else value
