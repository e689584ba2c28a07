"""`python -m tests.bench aot`: compile every kernel that the library can launch, without a GPU.

Fails if a kernel does not compile or exceeds a limit of a chip (check.py).
"""

import argparse
import os
import sys
from typing import Any

from nsa.dtypes import DTYPES
from nsa.ops.triton.configs import AMD, CHIPS
from tests.bench.harness import Report, words_of
from tests.compile.launches import (
    MAX_CANDIDATES,
    OPERATIONS,
    benchmark_launches,
    cases,
    record_launches,
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    about = f"chips ({','.join(CHIPS)})"
    parser.add_argument("--arch", type=words_of(*dict.fromkeys((*CHIPS, *AMD))), help=about)
    which = parser.add_mutually_exclusive_group()
    for kind, about in (
        ("full", "every dtype, size and candidate config"),
        ("benchmarks", "what the GPU benchmarks launch: fills Triton's cache for them"),
        ("tiles", "every candidate that `module --tile` times: fills Triton's cache for it"),
    ):
        which.add_argument(
            f"--{kind}", dest="kind", action="store_const", const=kind, default="first", help=about
        )
    for flag, known in (("--operation", OPERATIONS), ("--dtype", DTYPES)):
        parser.add_argument(flag, type=words_of(*known), default=[*known], help="(all)")
    # Each imports PyTorch, and a container may report more CPU cores than it may use.
    jobs = min(os.cpu_count() or 1, 16)
    parser.add_argument("--jobs", type=int, default=jobs, help="processes (%(default)s)")


def run(report: Report) -> dict[str, Any]:
    """Compile, check and print a line per kernel."""
    flags = report.flags
    if os.environ.pop("TRITON_INTERPRET", None):  # interpreted kernels cannot be compiled
        os.execv(sys.executable, sys.orig_argv)  # PyTorch has imported Triton as interpreter
    import triton

    from tests.compile import check

    candidates = MAX_CANDIDATES if flags.kind in ("full", "tiles") else 1
    launches = [
        (case, launch, chip)
        for case in cases(flags.kind, flags.operation)
        if case.dtype in flags.dtype
        for chip in flags.arch or CHIPS
        for launch in record_launches(case, candidates, chip)
    ]
    if flags.kind == "benchmarks" and flags.operation == [*OPERATIONS]:
        for chip in flags.arch or CHIPS:
            launches += [(*recorded, chip) for recorded in benchmark_launches(chip)]
    spilled = check.MAX_SPILLED_FIRST if flags.kind == "first" else check.MAX_SPILLED
    rows, failures = check.check(launches, flags.jobs, spilled)
    return {"triton": triton.__version__, "failures": failures, "rows": rows}
