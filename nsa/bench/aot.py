"""`python -m nsa.bench aot`: compile every kernel that the library can launch, without a GPU.

Fails if a kernel does not compile or exceeds a limit of a chip (compile_gate.py). With --loops it
also lists what each innermost loop of M7C's kernels is bound by: instructions of one warp in one
pass by kind, their cycles by pipe, and the fraction of the bound that tensor instructions take
(loops.py states the rates).
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext, redirect_stdout
from typing import Any

from nsa.atomic_io import row_json
from nsa.bench.options import SHAPES
from nsa.bench.results import Report, print_table

CHIPS = "sm_80,sm_86,sm_89,sm_90,sm_100,sm_120,gfx942"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help=f"chips ({CHIPS}; with --loops sm_80,sm_90)")
    cases = parser.add_mutually_exclusive_group()
    cases.add_argument("--full", action="store_true", help="every dtype, size and candidate config")
    cases.add_argument(
        "--benchmarks",
        action="store_true",
        help="what the GPU benchmarks launch, every candidate: fills Triton's cache for them",
    )
    about = "what each innermost loop is bound by, from its machine code, for M7C in bf16"
    cases.add_argument("--loops", action="store_true", help=about)
    parser.add_argument("--operation", nargs="+", default=[], help="only these operations")
    parser.add_argument("--dtype", nargs="+", default=[], help="only these dtypes")
    # Each imports PyTorch, and a container may report more CPU cores than it may use.
    jobs = min(os.cpu_count() or 1, 16)
    parser.add_argument("--jobs", type=int, default=jobs, help="processes (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(report: Report) -> dict[str, Any]:
    """Compile, check and print a line per kernel, with --loops one per loop."""
    flags = report.flags
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled
    import triton

    from nsa.bench import compile_gate
    from nsa.bench.kernel_launches import all_launches, check_names
    from nsa.bench.loops import RATES

    known = RATES if flags.loops else compile_gate.CHIPS
    arch = flags.arch or (",".join(RATES) if flags.loops else CHIPS)
    chips = check_names("arch", arch.split(","), known)
    launches = all_launches(chips, flags.operation, flags.dtype, flags.full, flags.benchmarks)
    if flags.loops:
        heads = SHAPES["m7c"].heads
        launches = (x for x in launches if x[0].heads == heads and not x[0].packed)
    first = not (flags.full or flags.benchmarks)
    spilled = compile_gate.MAX_SPILLED_FIRST if first else compile_gate.MAX_SPILLED
    with redirect_stdout(sys.stderr) if flags.json else nullcontext():
        rows, failures = compile_gate.check(launches, flags.jobs, spilled, flags.loops)
    result = {"triton": triton.__version__, "failures": failures, "rows": rows}
    if flags.json:
        print(row_json(result))
    elif flags.loops:
        _print_loops(rows)
    return result


def _print_loops(rows: list[dict[str, Any]]) -> None:
    from nsa.bench.loops import KINDS, PIPES

    lines = [["kernel", "chip", "loop", *KINDS, *(f"{x} cycles" for x in PIPES)]]
    lines[0] += ["bound by", "tensor share"]
    for row in rows:
        for number, loop in enumerate(row.get("loops", ())):
            counts = [loop["instructions"][kind] for kind in KINDS]
            counts += [loop["cycles"][pipe] for pipe in PIPES]
            cells = [row["kernel"], row["chip"], *map(str, [number, *counts])]
            lines.append([*cells, loop["bound_by"], f"{loop['tensor_share']:.2f}"])
    print_table(lines)
