"""`nsa tasks`: can a model answer from far back? NSA beside dense and window-only attention."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from nsa.atomic_io import atomic_write_text


def add_parser(verbs: Any) -> None:
    """Add `tasks` to the verbs of `nsa`."""
    about = (
        "train small models on associative recall, NSA beside dense and window-only, and search "
        "them for needles in haystacks: minutes on a processor"
    )
    parser = verbs.add_parser("tasks", help=about, description=about)
    parser.add_argument("--steps", type=int, default=1_000, help="of each model (%(default)s)")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="each trains all of them (1 2 3)"
    )
    parser.add_argument(
        "--seq-len", type=int, default=256, help="tokens of the longest sequences (%(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="models at a time, one thread each (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/tasks"), help="folder for the results (%(default)s)"
    )
    parser.set_defaults(run=_tasks)


def _tasks(args: argparse.Namespace) -> int:
    for name in ("steps", "seq_len", "jobs"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be 1 or more")
    from nsa.evaluate.results import new_folder
    from nsa.evaluate.tasks import examination, pictures
    from nsa.evaluate.tasks.learning import lengths

    lengths(args.seq_len)  # refuses what cannot be, before anything is trained
    new_folder(args.out)
    result = {
        "command": " ".join(["nsa", *sys.argv[1:]]),
        **examination.examine(
            args.seq_len, args.steps, args.seeds, args.jobs, partial(_tell, args.steps)
        ),
    }
    atomic_write_text(args.out / "tasks.json", json.dumps(result, indent=1) + "\n")
    pictures.draw_recall(result, args.out / "recall.png")
    pictures.draw_needle(result, args.out / "needle.png")
    print("\n".join(examination.lines(result)))
    for name in ("tasks.json", "recall.png", "needle.png"):
        print(args.out / name)
    return 0


def _tell(steps: int, name: str, seed: int, step: int, loss: float) -> None:
    """Say now and then how far a model has come."""
    if step % max(1, steps // 4) == 0 or step == steps:
        print(f"{name}, seed {seed}: step {step}/{steps}, loss {loss:.3f}", flush=True)
