"""`python -m nsa.bench <what>`: measurements, printed and, with --out, kept as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from nsa.bench.flags import add_ablations_verb, add_comm_verb, add_gpu_verbs
from nsa.bench.shapes import lengths


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nsa.bench", description=__doc__)
    what = parser.add_subparsers(dest="what", required=True, metavar="what")
    cpu = what.add_parser("cpu", help="the PyTorch backend beside SDPA, on this processor")
    cpu.add_argument("--rounds", type=int, default=5, help="turns that each contender takes")
    cpu.add_argument("--longest", type=int, default=16_384, help="longest sequence")
    cpu.add_argument("--out", type=Path, help="write the raw figures there, as JSON")
    data = what.add_parser("data", help="text to batches, and what that costs a training step")
    data.add_argument("--megabytes", type=int, default=64, help="of text that is prepared")
    data.add_argument("--seconds", type=float, default=3.0, help="for each rate")
    data.add_argument("--rounds", type=int, default=8, help="steps with and without the feed")
    data.add_argument("--out", type=Path, help="write the raw figures there, as JSON")
    health = what.add_parser("health", help="what watching gates and selection costs a step")
    health.add_argument("--pairs", type=int, default=40, help="steps with and without, each")
    health.add_argument("--out", type=Path, help="write the raw figures there, as JSON")
    saving = what.add_parser("checkpoint", help="how long training stands still for a checkpoint")
    saving.add_argument("--rounds", type=int, default=5, help="checkpoints of each kind")
    saving.add_argument("--folder", help="where they are written; else where temporary files are")
    saving.add_argument("--out", type=Path, help="write the raw figures there, as JSON")
    aot = what.add_parser("aot", help="compile the kernels without a GPU and check their limits")
    aot.add_argument("--arch", default="sm_80,sm_90,sm_100", help="chips, with commas between")
    which = aot.add_mutually_exclusive_group()
    which.add_argument("--full", action="store_true", help="every dtype, size and candidate config")
    which.add_argument(
        "--benchmarks",
        action="store_true",
        help="what the GPU benchmarks launch, every candidate: they find it in Triton's cache",
    )
    aot.add_argument("--operation", nargs="+", default=[], help="these alone")
    aot.add_argument("--dtype", nargs="+", default=[], help="these alone")
    # Each imports PyTorch, and a container may count processors that it has no share of.
    jobs = min(os.cpu_count() or 1, 16)
    aot.add_argument("--jobs", type=int, default=jobs, help="processes (%(default)s)")
    aot.add_argument("--out", type=Path, help="write the raw figures there, as JSON")
    floors = what.add_parser("roofline", help="the least work of each kernel, and its time")
    floors.add_argument("--shapes", default="m7c,64x4x128", help="names, with commas between")
    floors.add_argument("--lengths", type=lengths, default="2k,64k", help="such as 2k,64k")
    floors.add_argument("--tokens", type=int, default=65_536, help="of a batch")
    floors.add_argument("--token", action="store_true", help="of one token behind a cache instead")
    floors.add_argument("--out", type=Path, help="write the raw figures there, as JSON")
    estimate = what.add_parser("estimate", help="what the compiled kernels could take at best")
    estimate.add_argument("--arch", default="sm_80,sm_90", help="chips, with commas between")
    estimate.add_argument("--shapes", default="m7c,64x4x128", help="names, with commas between")
    estimate.add_argument("--lengths", type=lengths, default="2k,64k", help="such as 2k,64k")
    estimate.add_argument("--tokens", type=int, default=65_536, help="of a batch")
    estimate.add_argument("--out", type=Path, help="write the raw figures there, as JSON")
    add_ablations_verb(what)
    add_comm_verb(what)
    add_gpu_verbs(what)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one benchmark."""
    flags = _parser().parse_args(arguments)
    if flags.what in ("kernels", "module", "train", "decode", "tune"):
        flags.arguments = sys.argv[1:] if arguments is None else list(arguments)
        # These keep their own JSON, case by case: a time limit must not cost what was measured.
        import_module(f"nsa.bench.{flags.what}").run(flags)
        return
    if flags.what == "comm":
        from nsa.bench import comm

        comm.run(flags)
        return
    if flags.what == "ablations":
        from nsa.bench import ablations

        ablations.run(flags)
        return
    if flags.what == "aot":
        os.environ.pop("TRITON_INTERPRET", None)  # what it makes of a kernel cannot be compiled
        from nsa.bench import aot as gate

        which = flags.full, flags.operation, flags.jobs, flags.benchmarks, flags.dtype
        result = gate.run(flags.arch.split(","), *which)
    elif flags.what == "estimate":
        os.environ.pop("TRITON_INTERPRET", None)
        from nsa.bench import estimate

        shapes = flags.shapes.split(",")
        result = estimate.run(shapes, flags.lengths, flags.tokens, flags.arch.split(","))
    elif flags.what == "data":
        from nsa.bench import data

        result = data.run(flags.megabytes, flags.seconds, flags.rounds)
    elif flags.what == "health":
        from nsa.bench import health

        result = health.run(flags.pairs)
    elif flags.what == "checkpoint":
        from nsa.bench import checkpoint

        result = checkpoint.run(flags.rounds, flags.folder)
    elif flags.what == "roofline":
        from nsa.bench import roofline

        shapes = flags.shapes.split(",")
        if flags.token:
            result = roofline.run_token(shapes, flags.lengths)
        else:
            result = roofline.run(shapes, flags.lengths, flags.tokens)
    else:
        from nsa.bench import cpu as bench

        result = bench.run(rounds=flags.rounds, longest=flags.longest)
    if flags.out is not None:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        flags.out.write_text(json.dumps(result, indent=2) + "\n")
    if result.get("failures"):
        sys.exit(1)


if __name__ == "__main__":
    main()
