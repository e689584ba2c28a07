"""`nsa doctor`: check this machine before a run; prints a line per check and a fix per problem."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nsa.doctor.node import OK, SKIP, WARN, Check, checkpoint_bytes, lines, node_checks, passed
from nsa.validation import positive_flags

_RANKS = "code and all-reduce: deepspeed --num_gpus 2 recipes/m7c.py --until preflight"
_M7C = 125_000_000  # parameters
_M7C_CHECKPOINTS = 10  # 50,000 steps, one every 5,000


def add_parser(
    verbs: Any,
    kernel_table: Callable[[], tuple[list[str], list[str]]],
    tune: Callable[[list[str]], Iterable[str]],
) -> None:
    """Add `doctor`.

    `kernel_table` checks M7C's kernels and returns a table and the problems; `tune` measures tile
    sizes for heads and returns a line for each kernel.
    """
    about = "check this machine before a run"
    doctor = verbs.add_parser("doctor", help=about, description=about)
    add = doctor.add_argument
    add("--run-dir", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    add(
        "--parameters",
        type=int,
        default=_M7C,
        help=f"parameters of the model (default {_M7C:,}, M7C)",
    )
    about = f"checkpoints that the run keeps (default {_M7C_CHECKPOINTS})"
    add("--checkpoints", type=int, default=_M7C_CHECKPOINTS, help=about)
    add("--ranks", type=int, help="ranks on this machine (default: one per GPU, or 2 without any)")
    about = "compare M7C's kernels with PyTorch on this GPU, in bf16; packed documents too"
    add("--kernels", action="store_true", help=about)
    about = (
        "instead of checking, time the kernels' tile sizes on this GPU and keep the fastest, for "
        "heads x KV heads x size (default: M7C's, 12x2x64); minutes"
    )
    add("--tune", nargs="*", metavar="HEADS", help=about)
    add("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor, kernel_table=kernel_table, tune_kernels=tune)


def _doctor(args: argparse.Namespace) -> int:
    positive_flags(args, "parameters", "checkpoints", "ranks")
    if args.tune is not None:
        for line in args.tune_kernels(args.tune):
            print(line, flush=True)
        return 0
    checks = node_checks(
        args.run_dir.expanduser(),
        checkpoint_bytes=checkpoint_bytes(args.parameters),
        checkpoints=args.checkpoints,
        ranks=args.ranks,
    )
    checks.append(Check("ranks", SKIP, _RANKS))
    table: list[str] = []
    if args.kernels:
        table, problems = args.kernel_table()
        checks.append(_kernels(table, problems))
    if args.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        print(*lines(checks), *table, sep="\n")
    return 0 if passed(checks) else 2


def _kernels(table: list[str], problems: list[str]) -> Check:
    if not table:
        return Check("kernels", SKIP, "no GPU here")
    if problems:
        fix = "set model.attention.backend=auto: these operations then run in PyTorch"
        return Check("kernels", WARN, "; ".join(problems), fix)
    return Check("kernels", OK, f"{len(table) - 1} cases equal PyTorch's")
