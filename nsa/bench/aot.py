"""`python -m nsa.bench aot`: compile every kernel that the library can launch, without a GPU.

Fails if a kernel does not compile or exceeds a limit of a chip (compile_check.py). With --loops it
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
from nsa.bench.kernel_launches import MAX_CANDIDATES, OPERATIONS, cases, record_launches
from nsa.bench.loops import KINDS, PIPES, RATES
from nsa.bench.options import SHAPES
from nsa.bench.results import Report, print_table
from nsa.dtypes import DTYPES
from nsa.ops.triton.configs import AMD, CHIPS
from nsa.validation import words_of


def add_flags(parser: argparse.ArgumentParser) -> None:
    about = f"chips ({','.join(CHIPS)}; with --loops {','.join(RATES)})"
    parser.add_argument("--arch", type=words_of(*dict.fromkeys((*CHIPS, *AMD))), help=about)
    which = parser.add_mutually_exclusive_group()
    for kind, about in (
        ("full", "every dtype, size and candidate config"),
        ("benchmarks", "what the GPU benchmarks launch: fills Triton's cache for them"),
        ("tune", "every candidate that `tune` times: fills Triton's cache for it"),
    ):
        which.add_argument(
            f"--{kind}", dest="kind", action="store_const", const=kind, default="first", help=about
        )
    about = "what each innermost loop is bound by, from its machine code, for M7C in bf16"
    which.add_argument("--loops", action="store_true", help=about)
    for flag, known in (("--operation", OPERATIONS), ("--dtype", DTYPES)):
        parser.add_argument(flag, type=words_of(*known), default=[*known], help="(all)")
    # Each imports PyTorch, and a container may report more CPU cores than it may use.
    jobs = min(os.cpu_count() or 1, 16)
    parser.add_argument("--jobs", type=int, default=jobs, help="processes (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(report: Report) -> dict[str, Any]:
    """Compile, check and print a line per kernel, with --loops one per loop."""
    flags = report.flags
    if os.environ.pop("TRITON_INTERPRET", None):  # interpreted kernels cannot be compiled
        os.execv(sys.executable, sys.orig_argv)  # PyTorch has imported Triton as interpreter
    import triton

    from nsa.bench import compile_check

    chips = flags.arch or [*(RATES if flags.loops else CHIPS)]
    if flags.loops and not RATES.keys() >= set(chips):
        raise ValueError(f"--arch {','.join(chips)}: --loops has rates of {', '.join(RATES)} alone")
    candidates = MAX_CANDIDATES if flags.kind in ("full", "tune") else 1
    launches = (
        (case, launch, chip)
        for case in cases(flags.kind, flags.operation)
        if case.dtype in flags.dtype
        for chip in chips
        for launch in record_launches(case, candidates, chip)
    )
    if flags.loops:
        heads = SHAPES["m7c"].heads
        launches = (x for x in launches if x[0].heads == heads and not x[0].packed)
    first = flags.kind == "first"
    spilled = compile_check.MAX_SPILLED_FIRST if first else compile_check.MAX_SPILLED
    with redirect_stdout(sys.stderr) if flags.json else nullcontext():
        rows, failures = compile_check.check(launches, flags.jobs, spilled, flags.loops)
    result = {"triton": triton.__version__, "failures": failures, "rows": rows}
    if flags.json:
        print(row_json(result))
    elif flags.loops:
        _print_loops(rows)
    return result


def _print_loops(rows: list[dict[str, Any]]) -> None:
    lines = [["kernel", "chip", "loop", *KINDS, *(f"{x} cycles" for x in PIPES)]]
    lines[0] += ["bound by", "tensor share"]
    for row in rows:
        for number, loop in enumerate(row.get("loops", ())):
            counts = [loop["instructions"][kind] for kind in KINDS]
            counts += [loop["cycles"][pipe] for pipe in PIPES]
            cells = [row["kernel"], row["chip"], *map(str, [number, *counts])]
            lines.append([*cells, loop["bound_by"], f"{loop['tensor_share']:.2f}"])
    print_table(lines)
