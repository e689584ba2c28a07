"""`report.md` of a run: go/no-go results with evidence, facts, settings and two pictures.

A panel is drawn only if its values were recorded.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from nsa.atomic_io import atomic_write_text
from nsa.constants import SHORT_RUN
from nsa.gates.results import GATE_NAMES, GateResult, read_results
from nsa.monitor.artifacts import RankHistory, Table, list_ranks, read_json, read_rank, read_table
from nsa.monitor.outputs import FALLBACK_COLUMNS, FALLBACKS_FILE, SELECTION_FILE
from nsa.report.plots import Panel, draw
from nsa.system import user_path
from nsa.text import markdown_table, plain
from nsa.untrusted import parse_yaml, text_or_empty

FILE_NAME, PLOTS = "report.md", "report"
_SETTINGS = {
    "model": ("layers", "width"),
    "model.attention": ("kind", "branches", "compressor"),
    "data": ("source", "tokenizer", "seq_len"),
    "train": ("dense_steps", "micro_batch", "accumulation", "learning_rate", "precision", "seed"),
}
_LAYERS = {  # column of selection.csv -> title
    "gate_cmp": "mean gate, cmp",
    "gate_sel": "mean gate, sel",
    "gate_win": "mean gate, win",
    "entropy": "entropy of free blocks",
    "overlap": "overlap with the previous token's blocks",
    "recall": "recall of selected blocks",
}
_PANELS = (
    ("loss", "training loss (nats per token)"),
    ("bits_per_byte", "validation bits per byte"),
    ("tokens_per_s", "tokens/s, all ranks"),
    ("grad_norm", "gradient norm"),
    ("lr", "learning rate"),
    ("memory_gb", "peak memory of rank 0, GB"),
)
_MET = {True: "yes", False: "**NO**", None: "not measured"}


@dataclass
class Summary:
    """Contents of a run's files; a figure that was not recorded is None."""

    run_dir: Path
    metrics: Table
    histories: list[RankHistory]
    gates: list[GateResult]

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    @property
    def steps(self) -> int:
        """The highest recorded step."""
        logged = (int(row["step"]) for row in self.metrics.rows)
        return max([0, *logged, *(history.step for history in self.histories)])

    @property
    def tokens_per_step(self) -> int | None:
        steps, tokens = self.points("tokens")
        return round(tokens[-1] / steps[-1]) if steps and steps[-1] else None

    @cached_property
    def config(self) -> object:
        """The tree of config.yaml; None if it cannot be read."""
        try:
            return parse_yaml(text_or_empty(self.run_dir / "config.yaml"))
        except ValueError:
            return None

    @property
    def tokens_per_s(self) -> float | None:
        """The median, without warm-up."""
        rates = self.points("tokens_per_s")[1]
        return median(rates) if rates else None

    @property
    def memory_gb(self) -> float | None:
        """The peak of any rank."""
        peaks = [memory for history in self.histories for _, memory in history.memory]
        return max([*peaks, *self.points("memory_gb")[1]], default=None)

    def points(self, column: str) -> tuple[list[float], list[float]]:
        """Return the steps and the finite values of a column of metrics.csv."""
        rows = [row for row in self.metrics.rows if math.isfinite(row.get(column, math.nan))]
        return [row["step"] for row in rows], [row[column] for row in rows]

    def last_text(self, column: str, spec: str) -> str:
        """Format the last finite value of a column; name its step if the run has later steps."""
        steps, values = self.points(column)
        if not values:
            return ""
        step = "" if steps[-1] == self.steps else f" (step {steps[-1]:,.0f})"
        return f"{values[-1]:{spec}}{step}"

    def last(self, column: str) -> float | None:
        """Return the last finite value of a column."""
        values = self.points(column)[1]
        return values[-1] if values else None


def lookup(tree: object, name: str) -> object:
    """Return the value at a dotted name of a tree of settings; "" if there is none."""
    for part in name.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return ""
        tree = tree[part]
    return tree


def summarise(run_dir: Path) -> Summary:
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: no such folder; give a run folder, for example runs/m7c-demo")
    return Summary(
        run_dir=run_dir,
        metrics=read_table(run_dir / "metrics.csv"),
        histories=[read_rank(run_dir, rank) for rank in list_ranks(run_dir)],
        gates=read_results(run_dir),
    )


def curve_panels(runs: Mapping[str, Summary]) -> list[Panel]:
    """Return a panel for each recorded column of metrics.csv, with a curve for each run."""
    panels = []
    for column, title in _PANELS:
        curves = {label: run.points(column) for label, run in runs.items()}
        if any(steps for steps, _ in curves.values()):
            marked = column == "bits_per_byte"
            panels.append(Panel(title, curves, marked=marked, logarithmic=column == "grad_norm"))
    return panels


def add_parser(verbs: Any) -> None:
    about = "write report.md of runs: go/no-go results with evidence, facts, plots"
    report = verbs.add_parser("report", help=about, description=about)
    report.add_argument("runs", type=user_path, nargs="+", help="run folders, e.g. runs/m7c-demo")
    report.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    for run in args.runs:
        print(write_report(run))
    return 0


def write_report(run_dir: Path, status: str = "") -> Path:
    """Write `report.md` and its pictures for a run in any state.

    The run itself calls it with its `status` at the end, and then draws no pictures of a short run.
    """
    run = summarise(run_dir)
    if not any((run_dir / name).exists() for name in ("config.yaml", "metrics.csv", "gates.json")):
        raise ValueError(
            f"{run_dir} holds no config.yaml, metrics.csv or gates.json; give the folder of a run"
        )
    lines = [
        f"# {plain(run.name)}: {plain(_decision(run.gates))}",
        *_gate_sections(run.gates),
        *_facts(run, status),
        *_settings(run),
    ]
    pictures = [] if status and run.steps < SHORT_RUN else draw_plots(run)
    for title, path in pictures:
        lines += [*_heading(title), "", f"![{title}]({path})"]
    atomic_write_text(run_dir / FILE_NAME, "\n".join(lines) + "\n")
    return run_dir / FILE_NAME


def _decision(gates: Sequence[GateResult]) -> str:
    if not gates:
        return "not judged yet"
    if failed := [gate.gate for gate in gates if not gate.go]:
        return f"No-Go at {', '.join(failed)}"
    last = gates[-1]
    if last.of_short_run:
        return f"Go for {last.step:,} steps, {last.count_text}"
    return f"Go at {last.gate}"


def _gate_sections(gates: Sequence[GateResult]) -> Iterator[str]:
    for gate in gates:
        yield from _heading(f"{gate.gate}: {'Go' if gate.go else 'No-Go'} at step {gate.step:,}")
        yield from ("", f"Judged {plain(gate.time)}.", "")
        rows = [(x.name, _MET[x.ok], _number(x.value), x.limit, x.evidence) for x in gate.criteria]
        yield from markdown_table(("criterion", "met", "value", "limit", "evidence"), rows)
    judged = {gate.gate for gate in gates}
    if missing := [name for name in GATE_NAMES if name not in judged]:
        yield from ("", f"Not judged: {', '.join(missing)}.")


def _facts(run: Summary, status: str) -> Iterator[str]:
    env, halt = read_json(run.run_dir / "env.json"), read_json(run.run_dir / "halt.json")
    gpus = lookup(env, "cuda.devices")
    devices = gpus if isinstance(gpus, list) and gpus else [lookup(env, "cpu.model")]
    packages = ("torch", "deepspeed", "triton")
    versions = [f"{name} {x}" for name in packages if (x := lookup(env, f"packages.{name}"))]
    skipped = [history.skipped for history in run.histories if history.skipped is not None]
    problems = [run.metrics.problem, *(history.problem for history in run.histories)]
    rows = [
        ("recipe, profile", _join(env.get("recipe"), env.get("profile"))),
        ("git commit", env.get("git_commit") or ""),
        ("hardware", _join(env.get("host"), *devices)),
        ("versions", _join(*versions)),
        ("steps", f"{run.steps:,}"),
        ("tokens", formatted(run.last("tokens"), ",.0f")),
        ("median tokens/s", _speed(run)),
        ("peak memory of a rank, GB", formatted(run.memory_gb, ".2f")),
        ("final training loss", run.last_text("loss", ".4f")),
        ("final validation loss", run.last_text("val_loss", ".4f")),
        ("final bits per byte", run.last_text("bits_per_byte", ".4f")),
        *_heartbeat_facts(run.histories, status),
        ("skipped steps", formatted(max(skipped, default=None), ",d")),
        ("halted by the watchdog", halt.get("reason") or ""),
        ("backend fallbacks", "; ".join(_fallbacks(run.run_dir))),
        ("unreadable", "; ".join(filter(None, problems))),
    ]
    yield from (*_heading("Run"), "", *markdown_table(("", ""), [row for row in rows if row[1]]))
    notes = env.get("notes")
    for note in notes if isinstance(notes, list) else ():
        yield from ("", plain(note))


def _speed(run: Summary) -> str:
    """Describe the median speed; if a run has dense and sparse steps, also that of each."""
    steps, rates = run.points("tokens_per_s")
    dense_steps = lookup(run.config, "train.dense_steps")
    dense_steps = dense_steps if isinstance(dense_steps, int) else 0
    dense = [rate for step, rate in zip(steps, rates, strict=True) if step <= dense_steps]
    sparse = [rate for step, rate in zip(steps, rates, strict=True) if step > dense_steps]
    text = formatted(run.tokens_per_s, ",.0f")
    if not dense or not sparse:
        return text
    return f"{text}; dense steps {median(dense):,.0f}, sparse {median(sparse):,.0f}"


def _heartbeat_facts(histories: Sequence[RankHistory], status: str) -> list[tuple[str, str]]:
    if not any(history.processes for history in histories):
        return []
    first, worst = histories[0], max(histories, key=lambda history: history.pause)
    pause = f"{worst.pause:.1f} s ({worst.pause_at})" if worst.pause_at else ""
    return [
        ("ranks, engine", f"{len(histories)}, {first.backend}"),
        ("resumes", f"{max(0, first.processes - 1):,}"),
        ("longest pause since the last start", pause),
        ("end", status or first.status or "none recorded: still running, or killed"),
    ]


def _fallbacks(run_dir: Path) -> list[str]:
    # Python 3.10's csv refuses zero bytes, which a crash of the machine may leave.
    text = text_or_empty(run_dir / FALLBACKS_FILE).replace("\0", "")
    rows = [row for row in csv.DictReader(text.splitlines()) if all(map(row.get, FALLBACK_COLUMNS))]
    line = "{operation} not on {backend}: {reason} ({calls} calls)"
    return [line.format_map(row) for row in rows[:20]]


def _settings(run: Summary) -> Iterator[str]:
    stage = lookup(read_json(run.run_dir / "ds_config.json"), "zero_optimization.stage")
    names = [f"{section}.{name}" for section, names in _SETTINGS.items() for name in names]
    rows = [(name, lookup(run.config, name)) for name in names]
    rows.append(("ZeRO stage", stage))
    if present := [row for row in rows if row[1] != ""]:
        yield from (*_heading("Settings"), "", *markdown_table(("setting", "value"), present))
        yield from ("", "All settings: `config.yaml` and `ds_config.json`.")


def _heading(text: str) -> tuple[str, str]:
    return ("", f"## {plain(text)}")


def _join(*values: object) -> str:
    return ", ".join(str(value) for value in values if value)


def _number(value: float | None) -> str:
    return formatted(value, ".4g" if value is None or abs(value) < 1_000 else ",.0f")


def formatted(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def draw_plots(run: Summary) -> list[tuple[str, str]]:
    """Draw into `<run>/report/`; return titles and paths relative to report.md."""
    by_layer = "Selection, and gates if there are any, by layer, first (dark) to last"
    pictures = (
        ("curves", "Curves", curve_panels({run.name: run})),
        ("layers", by_layer, _layer_panels(run)),
    )
    for name, _, panels in pictures:
        if panels:
            draw(panels, run.run_dir / PLOTS / f"{name}.png")
    return [(title, f"{PLOTS}/{name}.png") for name, title, panels in pictures if panels]


def _layer_panels(run: Summary) -> list[Panel]:
    """Return a panel for each column of selection.csv, with a curve for each layer."""
    rows = read_table(run.run_dir / SELECTION_FILE).rows
    panels = []
    for column, title in _LAYERS.items():
        curves: dict[str, tuple[list[float], list[float]]] = {}
        for row in rows:
            if "layer" in row and math.isfinite(row.get(column, math.nan)):
                steps, values = curves.setdefault(f"layer {row['layer']:.0f}", ([], []))
                steps.append(row["step"])
                values.append(row[column])
        if curves:
            panels.append(Panel(title, curves, ordered=True, fraction=True))
    return panels
