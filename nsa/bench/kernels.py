"""`python -m nsa.bench kernels`: each function of nsa.ops by itself, on each backend.

Operations and bytes are those that the function has to do and to move: pairs of a query and a key
that it sees, with the scores computed again in the backward pass; inputs and saved tensors read
once, outputs written once. What a backend does beyond that lowers its figures, as it should.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from nsa.bench.calls import Call, Chosen, calls, flops, moved_bytes
from nsa.bench.contenders import Contender, figure, measure, ratios
from nsa.bench.gpu import ceilings, recover
from nsa.bench.inputs import Inputs
from nsa.bench.report import Report, ratio, shown, table
from nsa.bench.shapes import Shape
from nsa.ops import NSASpec

SPEC = NSASpec()
MEASURED = ("forward", "forward_backward")


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Measure every function at every shape and length; prints a table a case."""
    report = Report(flags)
    on_gpu = report.device.type == "cuda"
    names = flags.backends or (["triton", "blockwise"] if on_gpu else ["blockwise", "reference"])
    report.data["settings"]["backends"] = names
    report.data["ceilings"] = ceilings(report.device, report.dtype, size=8192 if on_gpu else 256)
    for shape in flags.shapes:
        for seq_len in flags.lengths:
            case = partial(_case, shape, seq_len, names, report)
            report.attempt(f"{shape.name} T={seq_len}", case)
    return report.finish()


def _case(shape: Shape, seq_len: int, backends: list[str], report: Report) -> None:
    batch = max(1, report.flags.tokens // seq_len)
    inputs = Inputs.of(shape, batch, seq_len, SPEC, report.device, report.dtype)
    chosen = _chosen(inputs, backends, report.device)
    by_backend = {backend: calls(inputs, chosen, SPEC, backend) for backend in backends}
    title = f"{shape.name} T={seq_len} batch {batch}"
    lines = [[title, "fwd ms", "TFLOP/s", "GB/s", "fwd+bwd ms", "TFLOP/s", "GB/s"]]
    reasons = []
    for function in report.flags.functions:
        these = {backend: by_name[function] for backend, by_name in by_backend.items()}
        found = measure({name: partial(_contender, call) for name, call in these.items()}, report)
        counts = {
            "flops": flops(function, inputs, chosen.index, SPEC),
            "bytes": moved_bytes(function, these[backends[0]], inputs, SPEC),
        }
        for one in found.values():
            one["tflops"] = {
                what: _rate(counts["flops"][what], one, what, 1e9) for what in MEASURED
            }
            one["gbps"] = {what: _rate(counts["bytes"][what], one, what, 1e6) for what in MEASURED}
        report.add(
            {
                "function": function,
                "shape": shape.name,
                "heads": [shape.heads, shape.kv_heads, shape.key, shape.value],
                "length": seq_len,
                "batch": batch,
                **counts,
                "contenders": found,
                "ratios": ratios(found, lambda _: backends[0]),
            }
        )
        lines += [[f"{function} {backend}", *_cells(one)] for backend, one in found.items()]
        reasons += [
            f"  {function} {backend}, {what}: {why}"
            for backend, one in found.items()
            for what, why in one["why_not"].items()
        ]
    table(lines)
    print(*reasons, "", sep="\n", flush=True)


def _contender(call: Call) -> Contender:
    return Contender(call.function, *call.tensors, learns=call.learns)


def _chosen(inputs: Inputs, backends: list[str], device: torch.device) -> Chosen:
    """As the first backend chooses that can; blockwise serves every call."""
    for backend in backends:
        try:
            return Chosen.of(inputs, SPEC, backend)
        except Exception as error:  # what is wrong with it is found again where it is measured
            recover(error, device)
    return Chosen.of(inputs, SPEC, "blockwise")


def _rate(count: int, one: dict[str, Any], what: str, unit: float) -> float | None:
    """Of a count and milliseconds: 1e9 gives tera a second, 1e6 giga a second."""
    return ratio(count / unit, figure(one, what))


def _cells(one: dict[str, Any]) -> list[str]:
    return [
        shown(value)
        for what in MEASURED
        for value in (figure(one, what), one["tflops"][what], one["gbps"][what])
    ]
