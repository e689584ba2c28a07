"""`python -m nsa.bench <benchmark>`: speed and memory, printed and saved as JSON.

Each benchmark is a module of this package with `run(report)` and, if it has flags besides --out,
`add_flags(parser)`. `run` adds rows to the report, or returns entries to add to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from nsa.validation import Parser

BENCHMARKS = {  # name: one line of help
    "aot": "compile the kernels without a GPU and check their limits",
    "roofline": "least FLOPs and bytes of each kernel, and the time floor that follows",
    "traffic": "operations and bytes of a micro-batch, by part; needs no GPU",
    "schedule": "how evenly the attention kernels fill a GPU, counted without one",
    "ablations": "train the demo or M7C with parts of its attention changed, several seeds",
    "kernels": "each function of nsa.ops, on each backend",
    "module": "NSA against dense attention and other NSA implementations",
    "train": "a training step of M7C, NSA against dense attention",
    "profile": "the kernels of a training step, their time, and how busy the GPU is",
    "recipe": "the recipe under DeepSpeed's launcher on one GPU, killed and resumed",
    "decode": "a decoding step at growing context length, NSA against dense attention",
    "tune": "time the kernels' tile sizes on this GPU and keep the fastest",
}


def parser(
    arguments: Sequence[str], package: str = "nsa.bench", benchmarks: Mapping[str, str] = BENCHMARKS
) -> Parser:
    """Return the parser with the flags of the benchmark in `arguments`; import only that one."""
    top = Parser(prog=f"python -m {package}", description="Run a benchmark.")
    commands = top.add_subparsers(dest="benchmark", required=True, metavar="benchmark")
    selected = next((word for word in arguments if not word.startswith("-")), None)
    for name, about in benchmarks.items():
        command = commands.add_parser(name, help=about, description=about)
        if name == selected:
            module = import_module(f"{package}.{name}")
            if hasattr(module, "add_flags"):
                module.add_flags(command)
            command.add_argument("--out", type=Path, help="write the results to this JSON file")
    return top


def main(
    arguments: Sequence[str] | None = None,
    package: str = "nsa.bench",
    benchmarks: Mapping[str, str] = BENCHMARKS,
) -> None:
    """Run one benchmark and save its report; exit with 1 if the report lists failures."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    flags = parser(words, package, benchmarks).parse_args(words)
    from nsa.bench.results import Report  # late: imports PyTorch

    report = Report(flags, " ".join([f"python -m {package}", *words]))
    report.data |= import_module(f"{package}.{flags.benchmark}").run(report) or {}
    report.finish()
    if report.data.get("failures"):
        raise SystemExit(1)


def run_script(main: Callable[[], None]) -> None:
    """Run a script; print a user's mistake in one line and exit with 2."""
    try:
        main()
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    run_script(main)
