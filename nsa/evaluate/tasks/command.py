"""`nsa tasks`: long-range recall with NSA, dense and window-only attention."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nsa.atomic_io import atomic_write_text
from nsa.validation import positive_flags

MODELS = ("dense", "nsa", "selector loss", "shared keys", "cmp+win", "win")  # in train.VARIANTS


def add_parser(verbs: Any) -> None:
    about = (
        "train small models with NSA, dense and window-only attention on associative recall, and "
        "test them on needles in haystacks; takes minutes on a CPU"
    )
    parser = verbs.add_parser("tasks", help=about, description=about)
    add = parser.add_argument
    add("--steps", type=int, default=1_000, help="steps per model (%(default)s)")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="each for all models (1 2 3)")
    add("--models", default=",".join(MODELS), help="a comma-separated choice of: %(default)s")
    add("--seq-len", type=int, default=256, help="tokens of the longest sequences (%(default)s)")
    add("--hops", type=int, choices=(1, 2), default=1, help="facts needed for an answer (1)")
    add(
        "--pattern",
        choices=("small", "recipe"),
        default="small",
        help="blocks of 4, or M7C's sizes",
    )
    add("--compressor", choices=("mean", "mlp"), default="mean", help="φ of NSA (%(default)s)")
    add("--jobs", type=int, default=1, help="models trained in parallel (%(default)s)")
    add("--out", type=Path, default=Path("runs/tasks"), help="folder for the results (%(default)s)")
    parser.set_defaults(run=_tasks)


def _tasks(args: argparse.Namespace) -> int:
    positive_flags(args, "steps", "seq_len", "jobs")
    models = args.models.split(",")
    if unknown := [name for name in models if name not in MODELS]:
        raise ValueError(f"--models {args.models}: unknown {unknown[0]!r}; {', '.join(MODELS)}")
    import torch

    from nsa.evaluate.results import make_folder
    from nsa.evaluate.tasks.data import VALUES
    from nsa.evaluate.tasks.evaluate import FACTS, evaluate_all, random_selection
    from nsa.evaluate.tasks.report import draw_needle, draw_recall, lines, summary_json
    from nsa.evaluate.tasks.train import Task

    task = Task(args.seq_len, args.hops, args.pattern, args.compressor)
    make_folder(args.out)
    result: dict[str, Any] = {
        "command": " ".join(["nsa", *sys.argv[1:]]),
        "torch": torch.__version__,
        **asdict(task),
        "steps": args.steps,
        "seeds": args.seeds,
        "reach": task.reach,
        "chance": 1 / VALUES,
        "random_selection": random_selection(task),
        "spec": asdict(task.spec),
        "rows": [],
    }
    files = [args.out / "tasks.json", args.out / "recall.png"]
    pairs = [(seed, model) for seed in args.seeds for model in models]
    with closing(evaluate_all(task, args.steps, pairs, args.jobs)) as evaluated:
        for rows in evaluated:
            result["rows"] += rows
            atomic_write_text(files[0], summary_json(result))
            row = rows[-1]
            print(f"{row['model']}, seed {row['seed']}: evaluated and saved", flush=True)
    draw_recall(result, files[1])
    if any(row["needle"] for row in result["rows"]):
        files.append(args.out / "needle.png")
        draw_needle(result, files[2])
    note = f"Random blocks would include {result['random_selection']:.1%} of {FACTS[-1]} facts."
    print(*lines(result), note, *files, sep="\n")
    return 0
