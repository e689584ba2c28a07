"""`python -m tests.bench <name>`: benchmarks, counts and experiments; needs a clone.

Each name is a module with `add_flags(parser)`, and `run(report)`, which adds rows to the report or
returns entries to add to it. `harness.py` has what they share.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from nsa.validation import Parser

BENCHMARKS = {  # name: one line of help
    "aot": "compile the kernels without a GPU and check their limits",
    "traffic": "operations and bytes of a micro-batch, by part; needs no GPU",
    "comm": "what each DeepSpeed config sends, and what that costs a step",
    "real": "a real dense model becomes sparse: loss by position, recall, needles",
    "recall": "small models on recall tasks: NSA, dense and window-only attention",
    "module": "attention: NSA against dense attention and other NSA implementations",
    "train": "a training step of M7C, NSA against dense attention",
    "profile": "the kernels of a training step, their time, and how busy the GPU is",
    "decode": "attention of a decoded token at growing context length, NSA against dense",
}


def parser(arguments: Sequence[str]) -> Parser:
    """Return the parser with the flags of the benchmark in `arguments`; import only that one."""
    top = Parser(prog="python -m tests.bench", description="Run a benchmark.")
    commands = top.add_subparsers(dest="benchmark", required=True, metavar="benchmark")
    for name, about in BENCHMARKS.items():
        command = commands.add_parser(
            name, help=about, description=about, conflict_handler="resolve"
        )
        if name in arguments[:1]:
            module = import_module("tests.compile.aot" if name == "aot" else f"tests.bench.{name}")
            command.add_argument("--out", type=Path, help="write the results to this JSON file")
            module.add_flags(command)
            command.set_defaults(function=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one benchmark and save its report; exit with 1 if the report lists failures."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    flags = parser(words).parse_args(words)
    from tests.bench.harness import Report  # late: imports PyTorch

    run = vars(flags).pop("function")
    report = Report(flags, " ".join(["python -m tests.bench", *words]))
    report.data |= run(report) or {}
    report.finish()
    if report.data.get("failures"):
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        raise SystemExit(2) from None
