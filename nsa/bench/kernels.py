"""`python -m nsa.bench kernels`: each function of nsa.ops alone, on each backend.

FLOPs and bytes are the least that the function needs: visible pairs, with scores computed again in
the backward pass; inputs and saved tensors read once, outputs written once. Whatever a backend does
beyond that lowers its TFLOP/s and GB/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from nsa.bench.implementations import (
    FUNCTIONS,
    PARTS,
    Builders,
    Implementation,
    Inputs,
    measure,
    nsa_functions,
    ratios,
    select,
)
from nsa.bench.options import Shape, add_gpu_flags, names
from nsa.bench.results import Report, Result, cell, figure, print_table, ratio
from nsa.bench.roofline import FP32, pairs
from nsa.bench.timing import recover, tensor_bytes, time_alternating
from nsa.ops import NSASpec

SPEC = NSASpec()
PASSES = ("forward", "forward_backward")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_gpu_flags(parser, "2k,8k,64k", shapes_default="m7c,64x4x128", backend=False)
    parser.add_argument("--backends", type=names, help="to compare: triton,blockwise,reference")


def run(report: Report) -> None:
    """Measure every function at every shape and length; print a table per case."""
    flags = report.flags
    default = ["triton", "blockwise"] if report.on_gpu else ["blockwise", "reference"]
    backends = report.data["settings"]["backends"] = flags.backends or default
    report.data["ceilings"] = _ceilings(report)
    for shape in flags.shapes:
        for seq_len in flags.lengths:
            case = partial(_case, shape, seq_len, backends, report)
            report.attempt(f"{shape} T={seq_len}", case)


def _ceilings(report: Report) -> dict[str, float]:
    """Measure what a plain matrix product and a plain copy reach on this device."""
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
    visible = pairs(shape, batch, seq_len, SPEC)
    by_backend = {name: nsa_functions(inputs, SPEC, name, selection) for name in backends}
    heads = [f"{shape} T={seq_len} batch {batch}", "fwd ms", "TFLOP/s", "GB/s"]
    lines = [[*heads, "fwd+bwd ms", "TFLOP/s", "GB/s"]]
    all_results: dict[str, Result] = {}
    for function in FUNCTIONS:
        builders: Builders = {
            name: partial(by_backend[name].__getitem__, function) for name in backends
        }
        results = measure(builders, report)
        call = by_backend[backends[0]][function]
        flops, moved = _flops(function, shape, visible), _moved_bytes(function, shape, call)
        for name, result in results.items():
            cells = [f"{function} {name}"]
            result |= {"tflops": {}, "gbps": {}}
            for what in PASSES:
                ms = figure(result, what)
                result["tflops"][what] = ratio(flops[what] / 1e9, ms)
                result["gbps"][what] = ratio(moved[what] / 1e6, ms)
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
                "flops": flops,
                "bytes": moved,
                "implementations": results,
                "ratios": ratios(results, lambda _: backends[0]),
            }
        )
    print_table(lines, all_results)


def _selection(inputs: Inputs, backends: list[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Select blocks with the first backend that works; blockwise always does."""
    for backend in backends:
        try:
            return select(inputs, SPEC, backend)
        except Exception as error:  # recorded again where this backend is measured
            recover(error, device)
    return select(inputs, SPEC, "blockwise")


def _flops(function: str, shape: Shape, visible: Mapping[str, int]) -> dict[str, int]:
    """Count the FLOPs of visible pairs; backward has 5 products (scores again, dp, dq, dk, dv)."""
    if function == "nsa_attention":
        parts = [_flops(part, shape, visible) for part in PARTS]
        return {what: sum(part[what] for part in parts) for what in PASSES}
    if function == "select_blocks":
        return dict.fromkeys(PASSES, 2 * visible["compressed"] * shape.key)
    per_number = 2 * visible[function.removesuffix("_attention")]
    return {
        "forward": per_number * (shape.key + shape.value),
        "forward_backward": per_number * (4 * shape.key + 3 * shape.value),
    }


def _moved_bytes(function: str, shape: Shape, call: Implementation) -> dict[str, int]:
    """Count the least bytes: inputs and saved outputs read once, results written once."""
    read, q = tensor_bytes(call.inputs), call.inputs[0]
    tokens = q.shape[:2].numel()
    if function == "select_blocks":
        return dict.fromkeys(PASSES, read + tokens * shape.kv_heads * SPEC.select_top * FP32)
    row = shape.value * q.element_size() + FP32 * (function != "nsa_attention")  # o and lse
    output = tokens * shape.heads * row
    gradients = tensor_bytes(x for x in call.inputs if x.requires_grad)
    return {"forward": read + output, "forward_backward": 2 * read + 3 * output + gradients}
