"""`python -m nsa.bench kernels`: each function of nsa.ops alone, on each backend.

The cases are those of the kind `parts` of `module`, for several backends. FLOPs and bytes are the
least that a function needs: visible pairs, with scores computed again in the backward pass; inputs
and saved tensors read once, outputs written once. Whatever a backend does beyond that lowers its
TFLOP/s and GB/s.
"""

from __future__ import annotations

import argparse

import torch

from nsa.bench.module import run_cases
from nsa.bench.options import add_gpu_flags
from nsa.bench.results import Report
from nsa.bench.timing import time_alternating
from nsa.validation import words


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_gpu_flags(parser, "2k,8k,64k", shapes_default="m7c,64x4x128", backend=False)
    parser.add_argument("--backends", type=words, help="to compare: triton,blockwise,reference")


def run(report: Report) -> None:
    """Measure every function at every shape and length; print a table per case."""
    default = ["triton", "blockwise"] if report.on_gpu else ["blockwise", "reference"]
    backends = report.flags.backends or default
    report.data["settings"]["backends"] = backends
    report.data["ceilings"] = _ceilings(report)
    run_cases(report, ["parts"], backends)


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
