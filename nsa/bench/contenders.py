"""Who is measured: a function on tensors, run forward alone and forward and backward.

Contenders of one case are built, timed in turns and held against the first one. One that cannot be
built or run is a result too: its reason stands where its time would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from nsa.bench.gpu import Step, peak_bytes, recover, take_turns
from nsa.bench.report import Report, ratio

MEASURES = ("forward", "forward_backward", "peak_bytes")


class Refused(ValueError):
    """A contender's own limits leave this shape out."""


class Contender:
    """`function(*inputs)` gives what attention gives; every floating input gets its gradient."""

    def __init__(
        self, function: Callable[..., Tensor], *inputs: Tensor, note: str = "", learns: bool = True
    ) -> None:
        self.function, self.note, self.learns = function, note, learns
        self.inputs = [x.detach().requires_grad_(learns and x.is_floating_point()) for x in inputs]
        self._into: Tensor | None = None

    def forward(self) -> Tensor:
        """As in inference: nothing is kept for a backward pass."""
        with torch.no_grad():
            return self.function(*(x.detach() for x in self.inputs))

    def both(self) -> object:
        """As in training, towards a fixed gradient of the output."""
        o = self.function(*self.inputs)
        if self._into is None:
            self._into = torch.randn_like(o)
        return torch.autograd.grad(o, [x for x in self.inputs if x.requires_grad], self._into)

    def owned(self) -> list[Tensor]:
        """What it holds between calls."""
        return self.inputs if self._into is None else [*self.inputs, self._into]


Builders = Mapping[str, Callable[[], Contender]]


def measure(
    builders: Builders, report: Report, twins: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """Milliseconds forward, forward and backward, and peak bytes of each; or why there are none.

    `twins` says whose output a contender's should equal: how far it is from it is kept as well.
    """
    device = report.device
    found: dict[str, dict[str, Any]] = {
        name: {**dict.fromkeys(MEASURES), "why_not": {}, "note": ""} for name in builders
    }
    built: dict[str, Contender] = {}
    for name, build in builders.items():
        try:
            built[name] = build()
            found[name]["note"] = built[name].note
        except Exception as error:  # its reason is its result
            reason = str(error) if isinstance(error, Refused | ImportError) else None
            found[name]["why_not"]["all"] = reason or recover(error, device)
    forward: dict[str, Step] = {name: one.forward for name, one in built.items()}
    _keep("forward", forward, found, report)
    both: dict[str, Step] = {
        name: one.both
        for name, one in built.items()
        if one.learns and found[name]["forward"] is not None
    }
    _keep("forward_backward", both, found, report)
    for name, step in both.items():
        if found[name]["forward_backward"] is not None:
            found[name]["peak_bytes"] = peak_bytes(step, built[name].owned(), device)
    for name, twin in (twins or {}).items():
        if all(one in built and found[one]["forward"] is not None for one in (name, twin)):
            found[name]["difference"] = {
                "from": twin,
                "relative": difference(built[name].forward(), built[twin].forward()),
            }
    return found


def difference(x: Tensor, y: Tensor) -> float:
    """The norm of x - y over that of y, without float32 copies of whole outputs."""
    parts = [
        torch.stack([(a.float() - b.float()).square().sum(), b.float().square().sum()])
        for a, b in zip(x.split(4096, 1), y.split(4096, 1), strict=True)
    ]
    off, whole = torch.stack(parts).double().sum(0).sqrt().tolist()
    return off / whole


def _keep(
    what: str, steps: Mapping[str, Step], found: dict[str, dict[str, Any]], report: Report
) -> None:
    flags = report.flags
    timings, failed = take_turns(steps, report.device, seconds=flags.seconds, rounds=flags.rounds)
    for name, timing in timings.items():
        found[name][what] = asdict(timing)
    for name, reason in failed.items():
        found[name]["why_not"][what] = reason


def ratios(
    found: Mapping[str, Mapping[str, Any]], base_of: Callable[[str], str]
) -> dict[str, dict[str, float | None]]:
    """Each contender's figures over those of its base: above 1, the base is the better one."""
    return {
        name: {what: ratio(figure(one, what), figure(found[base], what)) for what in MEASURES}
        for name, one in found.items()
        if (base := base_of(name)) != name and base in found
    }


def figure(one: Mapping[str, Any], what: str) -> float | None:
    """A contender's median milliseconds, or its bytes."""
    value = one[what]
    return value["median"] if isinstance(value, dict) else value
