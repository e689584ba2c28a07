"""`nsa tasks`: long-range recall with NSA, dense and window-only attention."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nsa.atomic_io import atomic_write_text
from nsa.validation import positive_flags, whole_number_list, words_of

# The keys of train.VARIANTS, and model.config's, which import torch.
COMPRESSORS = ("mean", "pool", "mlp")
MODELS = ("dense", "nsa", "selector loss", "cmp+win", "win")
OTHERS = ("half dense", "sparsified")  # not among the default


def add_parser(verbs: Any) -> None:
    about = (
        "train small models with NSA, dense and window-only attention on associative recall; "
        "evaluate recall and needles in haystacks; by default half an hour or more on two cores"
    )
    parser = verbs.add_parser("tasks", help=about, description=about)
    add = parser.add_argument
    add("--steps", type=int, default=1_000, help="steps per model (%(default)s)")
    about = "every model is trained with each; with spaces or commas (1 2 3)"
    add("--seeds", type=whole_number_list, nargs="+", default=[[1, 2, 3]], help=about)
    about = f"some of these, or {', '.join(OTHERS)}, with commas (%(default)s)"
    add("--models", type=words_of(*MODELS, *OTHERS), default=",".join(MODELS), help=about)
    add("--seq-len", type=int, default=256, help="tokens of the longest sequences (%(default)s)")
    add("--hops", type=int, choices=(1, 2), default=1, help="facts needed for an answer (1)")
    about = "sizes of blocks, windows and heads: small (blocks of 4) or M7C's (%(default)s)"
    add("--pattern", choices=("small", "recipe"), default="small", help=about)
    add("--compressor", choices=COMPRESSORS, default="mean", help="φ of NSA (%(default)s)")
    add("--jobs", type=int, default=1, help="models trained in parallel (%(default)s)")
    add("--out", type=Path, default=Path("runs/tasks"), help="folder for the results (%(default)s)")
    parser.set_defaults(run=_tasks)


def _tasks(args: argparse.Namespace) -> int:
    positive_flags(args, "steps", "seq_len", "jobs")
    seeds = [seed for group in args.seeds for seed in group]
    import torch

    from nsa.evaluate.results import make_folder
    from nsa.evaluate.tasks.data import VALUES
    from nsa.evaluate.tasks.evaluate import FACT_COUNTS, evaluate_all, random_selection
    from nsa.evaluate.tasks.report import draw_needle, draw_recall, lines, summary_json
    from nsa.evaluate.tasks.train import Task

    task = Task(args.seq_len, args.hops, args.pattern, args.compressor)
    make_folder(args.out)
    result: dict[str, Any] = {
        "command": " ".join(["nsa", *sys.argv[1:]]),
        "torch": torch.__version__,
        **asdict(task),
        "steps": args.steps,
        "seeds": seeds,
        "reach": task.reach,
        "chance": 1 / VALUES,
        "random_selection": random_selection(task),
        "spec": asdict(task.spec),
        "rows": [],
    }
    json_file, recall_plot = args.out / "tasks.json", args.out / "recall.png"
    pairs = [(seed, model) for seed in seeds for model in args.models]
    with closing(evaluate_all(task, args.steps, pairs, args.jobs)) as evaluated:
        for rows in evaluated:
            result["rows"] += rows
            atomic_write_text(json_file, summary_json(result))
            row = rows[-1]
            print(f"{row['model']}, seed {row['seed']}: evaluated and saved", flush=True)
    files = [json_file, recall_plot]
    draw_recall(result, recall_plot)
    if any(row["needle"] for row in result["rows"]):
        files.append(args.out / "needle.png")
        draw_needle(result, files[-1])
    random = f"{result['random_selection']:.1%} of {FACT_COUNTS[-1]} facts"
    print(*lines(result), f"Random blocks would include {random}.", *files, sep="\n")
    return 0
