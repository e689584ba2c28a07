"""`python -m nsa.bench kernels`: each function of nsa.ops alone, on each backend.

FLOPs and bytes are the least that the function needs: visible pairs, with scores computed again in
the backward pass; inputs and saved tensors read once, outputs written once. Whatever a backend does
beyond that lowers its TFLOP/s and GB/s.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from nsa.bench.implementations import Builders, measure, ratios
from nsa.bench.inputs import Inputs
from nsa.bench.measure import recover, time_alternating
from nsa.bench.operations import FUNCTIONS, SelectedBlocks, calls, flops, moved_bytes
from nsa.bench.options import Shape, add_gpu_flags, names
from nsa.bench.results import Report, Result, cell, figure, print_errors, print_table, ratio
from nsa.ops import NSASpec

SPEC = NSASpec()


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_gpu_flags(parser, "2k,8k,64k", shapes_default="m7c,64x4x128")
    parser.add_argument("--backends", type=names, help="for example triton,blockwise,reference")


def run(flags: argparse.Namespace) -> None:
    """Measure every function at every shape and length; print a table per case."""
    report = Report(flags)
    default = ["triton", "blockwise"] if report.on_gpu else ["blockwise", "reference"]
    backends = report.data["settings"]["backends"] = flags.backends or default
    report.data["ceilings"] = _ceilings(report)
    for shape in flags.shapes:
        for seq_len in flags.lengths:
            case = partial(_case, shape, seq_len, backends, report)
            report.attempt(f"{shape} T={seq_len}", case)
    report.finish()


def _ceilings(report: Report) -> dict[str, float]:
    """What a plain matrix product and a plain copy reach on this device."""
    device, dtype, size = report.device, report.dtype, 8192 if report.on_gpu else 256
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.empty(16 * size * size, dtype=dtype, device=device)
    target = torch.empty_like(source)
    steps = {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    timings, _ = time_alternating(steps, device, seconds=0.2, rounds=20)
    moved = 2 * source.numel() * source.element_size()
    return {
        "matrix_product_tflops": 2 * size**3 / timings["product"].median / 1e9,
        "copy_gbps": moved / timings["copy"].median / 1e6,
    }


def _case(shape: Shape, seq_len: int, backends: list[str], report: Report) -> None:
    batch = max(1, report.flags.tokens // seq_len)
    inputs = Inputs.random(shape, batch, seq_len, SPEC, report.device, report.dtype)
    selection = _selection(inputs, backends, report.device)
    by_backend = {name: calls(inputs, SPEC, name, selection) for name in backends}
    heads = [f"{shape} T={seq_len} batch {batch}", "fwd ms", "TFLOP/s", "GB/s"]
    lines = [[*heads, "fwd+bwd ms", "TFLOP/s", "GB/s"]]
    all_results: dict[str, Result] = {}
    for function in FUNCTIONS:
        builders: Builders = {
            name: partial(by_backend[name].__getitem__, function) for name in backends
        }
        results = measure(builders, report)
        call = by_backend[backends[0]][function]
        counts = {
            "flops": flops(function, inputs, SPEC),
            "bytes": moved_bytes(function, call, inputs, SPEC),
        }
        for name, result in results.items():
            cells = [f"{function} {name}"]
            result |= {"tflops": {}, "gbps": {}}
            for what in ("forward", "forward_backward"):
                ms = figure(result, what)
                result["tflops"][what] = ratio(counts["flops"][what] / 1e9, ms)
                result["gbps"][what] = ratio(counts["bytes"][what] / 1e6, ms)
                cells += map(cell, (ms, result["tflops"][what], result["gbps"][what]))
            lines.append(cells)
            all_results[f"{function} {name}"] = result
        report.add(
            {
                "function": function,
                "shape": shape.name,
                "heads": shape.sizes,
                "length": seq_len,
                "batch": batch,
                **counts,
                "implementations": results,
                "ratios": ratios(results, lambda _: backends[0]),
            }
        )
    print_table(lines)
    print_errors(all_results)


def _selection(inputs: Inputs, backends: list[str], device: torch.device) -> SelectedBlocks:
    """Select with the first backend that can; blockwise always can."""
    for backend in backends:
        try:
            return SelectedBlocks.of(inputs, SPEC, backend)
        except Exception as error:  # recorded again where this backend is measured
            recover(error, device)
    return SelectedBlocks.of(inputs, SPEC, "blockwise")
