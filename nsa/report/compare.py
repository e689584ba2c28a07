"""`nsa compare`: the curves of several runs in one picture, and a table of their final values."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa.report.plots import draw
from nsa.report.report import Summary, curve_panels, formatted, lookup, summarise
from nsa.system import user_path
from nsa.text import align

_OTHER_TEXT = "training and validation text differ, so only speed is comparable"
_MUST_BE_EQUAL = {  # setting -> what it means if runs differ in it
    "data.source": _OTHER_TEXT,
    "data.subset": _OTHER_TEXT,
    "data.split": _OTHER_TEXT,
    "data.pattern": _OTHER_TEXT,
    "data.held_out": _OTHER_TEXT,
    "data.tokenizer": "losses per token are not comparable; bits/byte are",
    "data.seq_len": "tokens see different amounts of context",
    "train.steps": "learning rates differ at the same step",
    "tokens per step": "compare at the same number of tokens, not of steps",
    "steps taken": "the final values are of different steps",
}
_HEADER = ("run", "steps", "loss", "val loss", "bits/byte", "tokens/s", "GB", "go/no-go")
_LOSSES = ("loss", "val_loss", "bits_per_byte")  # columns of metrics.csv


def add_parser(verbs: Any) -> None:
    about = "plot the curves of runs in one picture, and print their final values"
    compare = verbs.add_parser("compare", help=about, description=about)
    compare.add_argument("runs", type=user_path, nargs="+", help="run folders, e.g. runs/m7c-demo")
    about = "the picture to write (default: compare.png next to the first run)"
    compare.add_argument("--out", type=user_path, help=about)
    compare.add_argument("--json", action="store_true", help="print JSON")
    compare.set_defaults(run=_compare)


def _compare(args: argparse.Namespace) -> int:
    out = args.out or args.runs[0].resolve().parent / "compare.png"
    runs = read_runs(args.runs)
    table = compare_runs(runs, out)
    if args.json:
        rows = [_json_row(label, run) for label, run in runs.items()]
        tree = {"runs": rows, "differences": [*differences(runs)], "picture": str(out)}
        print(json.dumps(tree, indent=2))
        return 0
    print(*table, sep="\n")
    for line in differences(runs):
        print(f"nsa: warning: {line}", file=sys.stderr)
    print(out)
    return 0


def read_runs(folders: Sequence[Path]) -> dict[str, Summary]:
    """Read runs; the keys are their labels in the plots."""
    return {label: summarise(run) for label, run in labelled(folders).items()}


def differences(runs: Mapping[str, Summary]) -> Iterator[str]:
    """Yield a line for each setting whose difference makes the runs' figures incomparable."""
    for name, meaning in _MUST_BE_EQUAL.items():
        labels_of: dict[str, list[str]] = {}  # value -> labels of the runs that have it
        for label, run in runs.items():
            derived = {"tokens per step": run.tokens_per_step or "", "steps taken": run.steps}
            value = derived[name] if name in derived else lookup(run.config, name)
            if value != "":  # recorded
                text = f"{value:,}" if isinstance(value, int) else str(value)
                labels_of.setdefault(text, []).append(label)
        if len(labels_of) > 1:
            values = [f"{text} in {', '.join(labels)}" for text, labels in labels_of.items()]
            yield f"{name} differs, {'; '.join(values)}: {meaning}"


def compare_runs(runs: Mapping[str, Summary], out: Path) -> list[str]:
    """Draw the runs, by label, into `out`; return a table of their final values."""
    for run in runs.values():
        if not run.metrics.rows:
            raise ValueError(
                f"{run.run_dir}: {run.metrics.problem}; choose a run with logged steps"
            )
    panels = curve_panels(runs)
    if not panels:
        raise ValueError("metrics.csv holds no finite figure of any run; choose a run that has one")
    draw(panels, out)
    return align([_HEADER, *(_row(label, run) for label, run in runs.items())])


def _row(label: str, run: Summary) -> tuple[str, ...]:
    last_gate = "-"
    if run.gates:
        gate = run.gates[-1]
        name = f"{gate.step:,} steps" if gate.of_short_run else gate.gate
        last_gate = f"{name} {'Go' if gate.go else 'No-Go'}"
    return (
        label,
        f"{run.steps:,}",
        *(run.last_text(column, ".3f") or "-" for column in _LOSSES),
        formatted(run.tokens_per_s, ",.0f") or "-",
        formatted(run.memory_gb, ".2f") or "-",
        last_gate,
    )


def _json_row(label: str, run: Summary) -> dict[str, Any]:
    figures = {column: run.last(column) for column in _LOSSES}
    figures |= {"tokens_per_s": run.tokens_per_s, "memory_gb": run.memory_gb}
    gates: dict[str, Any] = {"gate": None, "go": None}
    if run.gates:
        gates = {"gate": run.gates[-1].gate, "go": run.gates[-1].go}
    return {"run": label, "steps": run.steps, **figures, **gates}


def labelled(runs: Sequence[Path]) -> dict[str, Path]:
    """Label each run by its folder's name, or by its path if two names are equal."""
    names = [run.resolve().name for run in runs]
    labels = names if len(set(names)) == len(names) else [str(run) for run in runs]
    return dict(zip(labels, runs, strict=True))
