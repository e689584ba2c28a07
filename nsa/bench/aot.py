"""`python -m nsa.bench aot`: compile every kernel that the library can launch, without a GPU.

Fails if a kernel does not compile or exceeds a limit of a chip (compile_gate.py).
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from nsa.bench.results import Report

CHIPS = "sm_80,sm_86,sm_89,sm_90,sm_100,sm_120,gfx942"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default=CHIPS, help="chips (%(default)s)")
    cases = parser.add_mutually_exclusive_group()
    cases.add_argument("--full", action="store_true", help="every dtype, size and candidate config")
    cases.add_argument(
        "--benchmarks",
        action="store_true",
        help="what the GPU benchmarks launch, every candidate: fills Triton's cache for them",
    )
    parser.add_argument("--operation", nargs="+", default=[], help="only these operations")
    parser.add_argument("--dtype", nargs="+", default=[], help="only these dtypes")
    # Each imports PyTorch, and a container may report more CPU cores than it may use.
    jobs = min(os.cpu_count() or 1, 16)
    parser.add_argument("--jobs", type=int, default=jobs, help="processes (%(default)s)")


def run(report: Report) -> dict[str, Any]:
    """Compile, check and print a line per kernel."""
    flags = report.flags
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled
    import triton

    from nsa.bench import compile_gate
    from nsa.bench.kernel_launches import all_launches, check_names

    chips = check_names("arch", flags.arch.split(","), compile_gate.CHIPS)
    launches = all_launches(chips, flags.operation, flags.dtype, flags.full, flags.benchmarks)
    first = not (flags.full or flags.benchmarks)
    spilled = compile_gate.MAX_SPILLED_FIRST if first else compile_gate.MAX_SPILLED
    rows, failures = compile_gate.check(launches, flags.jobs, spilled)
    return {"triton": triton.__version__, "failures": failures, "rows": rows}
