"""`report.md` of a run: go/no-go results with evidence, facts, settings and plots.

A plot is drawn only if its values were recorded.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from nsa.atomic_io import atomic_write_text
from nsa.constants import BRANCHES
from nsa.gates.results import GateResult
from nsa.gates.schedule import GATE_NAMES
from nsa.monitor.artifacts import Table, read_json, read_table, try_read_text
from nsa.monitor.csv_files import FALLBACK_COLUMNS, FALLBACKS_FILE, TEACHER_FILE
from nsa.monitor.observer import TEACHER_COLUMNS, Observer, RunInfo
from nsa.report.markdown import plain, table
from nsa.report.plots import Panel, Points, draw
from nsa.report.summary import Summary, lookup, summarise

FILE_NAME, PLOTS = "report.md", "report"
_SETTINGS = (
    "model.layers",
    "model.width",
    "model.attention.kind",
    "model.attention.branches",
    "model.attention.compressor",
    "model.attention.selector_loss",
    "model.activation_checkpointing",
    "data.source",
    "data.tokenizer",
    "data.seq_len",
    "train.steps",
    "train.dense_steps",
    "train.micro_batch",
    "train.accumulation",
    "train.learning_rate",
    "train.teacher",
    "train.precision",
    "train.seed",
    "train.on_bad_step",
)
_SELECTION = {
    "entropy": "entropy of free blocks",
    "overlap": "overlap with the previous token's blocks",
    "forced": "fraction of forced blocks",
    "distance": "mean distance of free blocks, in blocks",
    "selector_loss": "selector loss, nats",
    "recall": "recall of selected blocks",
    "recall_random": "recall of as many random blocks",
}
_MET = {True: "yes", False: "**NO**", None: "not measured"}


def add_parser(verbs: Any) -> None:
    about = "write report.md of runs: go/no-go results with evidence, facts, plots"
    report = verbs.add_parser("report", help=about, description=about)
    report.add_argument("runs", type=Path, nargs="+", help="run folders, for example runs/m7c-demo")
    report.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    for run in args.runs:
        print(write_report(run))
    return 0


def write_report(run_dir: Path) -> Path:
    """Write `report.md` and its plots for a run in any state."""
    run = summarise(run_dir)
    if not any((run_dir / name).exists() for name in ("config.yaml", "metrics.csv", "gates.json")):
        raise ValueError(
            f"{run_dir} holds no config.yaml, metrics.csv or gates.json; give the folder of a run"
        )
    env = read_json(run_dir / "env.json")
    lines = [
        f"# {plain(run.name)}: {plain(_decision(run.gates))}",
        *_gate_sections(run.gates),
        *_facts(run, env),
        *_versus_teacher(run),
        *_settings(run),
    ]
    for title, path in draw_plots(run):
        lines += [*_heading(title), "", f"![{title}]({path})"]
    atomic_write_text(run_dir / FILE_NAME, "\n".join(lines) + "\n")
    return run_dir / FILE_NAME


class Reporter(Observer):
    """Writes the report at each gate."""

    def on_start(self, info: RunInfo) -> None:
        self._run_dir = info.run_dir

    def on_gate(self, name: str, go: bool) -> None:
        write_report(self._run_dir)


def _decision(gates: Sequence[GateResult]) -> str:
    if not gates:
        return "not judged yet"
    failed = [gate.gate for gate in gates if not gate.go]
    if failed:
        return f"No-Go at {', '.join(failed)}"
    last = gates[-1]
    return f"Go for {last.step:,} steps, {last.count}" if last.short else f"Go at {last.gate}"


def _gate_sections(gates: Sequence[GateResult]) -> Iterator[str]:
    for gate in gates:
        yield from _heading(f"{gate.gate}: {'Go' if gate.go else 'No-Go'} at step {gate.step:,}")
        yield from ("", f"Judged {plain(gate.time)}.", "")
        yield from table(
            ("criterion", "met", "value", "limit", "evidence"),
            [
                (row.name, _MET[row.ok], _number(row.value), row.limit, row.evidence)
                for row in gate.criteria
            ],
        )
    if missing := [name for name in GATE_NAMES if name not in {gate.gate for gate in gates}]:
        yield from ("", f"Not judged: {', '.join(missing)}.")


def _facts(run: Summary, env: dict[str, Any]) -> Iterator[str]:
    halt = read_json(run.run_dir / "halt.json")
    packages = ("torch", "deepspeed", "triton")
    versions = [(name, lookup(env, f"packages.{name}")) for name in packages]
    devices = lookup(env, "cuda.devices") or lookup(env, "cpu.model")
    yield from (*_heading("Run"), "")
    rows = [
        ("recipe, profile", _join(env.get("recipe"), env.get("profile"))),
        ("git commit", env.get("git_commit") or ""),
        (
            "hardware",
            _join(env.get("host"), *(devices if isinstance(devices, list) else [devices])),
        ),
        ("versions", _join(*(f"{name} {version}" for name, version in versions if version))),
        ("steps", f"{run.steps:,}"),
        ("tokens", _format(run.last("tokens"), ",.0f")),
        ("median tokens/s", _speed(run)),
        ("peak memory of a rank, GB", _format(run.memory_gb, ".2f")),
        ("final training loss", run.final("loss", ".4f")),
        ("final validation loss", run.final("val_loss", ".4f")),
        ("final bits per byte", run.final("bits_per_byte", ".4f")),
        *_heartbeat_facts(run),
        ("skipped steps", _format(run.skipped, ",d")),
        ("halted by the watchdog", "; ".join(f"{key}: {value}" for key, value in halt.items())),
        ("backend fallbacks", _fallbacks(run.run_dir)),
        ("unreadable", run.metrics.problem),
    ]
    yield from table(("", ""), [row for row in rows if row[1]])
    notes = env.get("notes")
    for note in notes if isinstance(notes, list) else ():
        yield from ("", plain(note))


def _speed(run: Summary) -> str:
    """Describe the median speed; of a run that begins dense also that of each phase."""
    steps, rates = run.points("tokens_per_s")
    switch = lookup(run.config, "train.dense_steps")
    switch = switch if isinstance(switch, int) else 0
    dense = [rate for step, rate in zip(steps, rates, strict=True) if step <= switch]
    sparse = [rate for step, rate in zip(steps, rates, strict=True) if step > switch]
    text = _format(run.tokens_per_s, ",.0f")
    if not dense or not sparse:
        return text
    return f"{text}; dense steps {median(dense):,.0f}, sparse {median(sparse):,.0f}"


def _heartbeat_facts(run: Summary) -> Iterator[tuple[str, str]]:
    """Yield elapsed time, resumes, longest pause, engine and end of the run."""
    if not run.histories or not run.histories[0].lines:
        return
    history = run.histories[0]
    passed = timedelta(seconds=max(0, round((history.last_time or 0) - (history.first_time or 0))))
    yield "elapsed", f"{passed} on {len(run.histories)} ranks, pauses between launches included"
    yield "resumes", f"{max(0, history.processes - 1):,}"
    worst = max(run.histories, key=lambda history: history.pause)
    yield "longest pause", f"{worst.pause:.1f} s ({worst.pause_at})" if worst.pause_at else ""
    yield "engine", history.backend
    yield "end", history.status or "none recorded: still running, or killed"


def _fallbacks(run_dir: Path) -> str:
    # Python 3.10's csv refuses zero bytes, which a crash of the machine may leave.
    text = (try_read_text(run_dir / FALLBACKS_FILE) or "").replace("\0", "")
    rows = csv.DictReader(text.splitlines())
    calls: dict[str, Counter[str]] = {}  # by backend and reason, then by operation
    for row in rows:
        if all(row.get(column) for column in FALLBACK_COLUMNS) and row["calls"].isdecimal():
            same = calls.setdefault("not on {backend}: {reason}".format_map(row), Counter())
            same[row["operation"]] += int(row["calls"])
    return "; ".join(
        f"{reason}: {', '.join(f'{name} ({count} calls)' for name, count in counts.items())}"
        for reason, counts in [*calls.items()][:10]
    )


def _versus_teacher(run: Summary) -> Iterator[str]:
    """Compare with the run's teacher at the last validation, by position."""
    rows = read_table(run.run_dir / TEACHER_FILE).rows
    last = [row for row in rows if row["step"] == rows[-1]["step"]]
    last = [row for row in last if all(name in row for name in TEACHER_COLUMNS)]
    if not last:
        return
    teacher, step = lookup(run.config, "train.teacher"), last[0]["step"]
    yield from (*_heading("Compared with the teacher"), "")
    yield from (f"{plain(teacher)}, on the validation split at step {step:,.0f}.", "")
    tokens = sum(row["tokens"] for row in last)
    total = {
        name: sum(row[name] * row["tokens"] for row in last) / tokens
        for name in TEACHER_COLUMNS[3:]
    }
    total |= {"first": last[0]["first"], "last": last[-1]["last"], "tokens": tokens}
    yield from table(
        ("positions", "tokens", "loss", "teacher's", "difference", "KL, nats", "same top-1"),
        [
            (
                f"{row['first'] + 1:,.0f} to {row['last'] + 1:,.0f}",
                f"{row['tokens']:,.0f}",
                *(f"{row[name]:.4f}" for name in ("loss", "teacher_loss")),
                f"{row['loss'] - row['teacher_loss']:+.4f}",
                f"{row['kl']:.4f}",
                f"{row['same_top1']:.1%}",
            )
            for row in [*last, total]
        ],
    )


def _settings(run: Summary) -> Iterator[str]:
    stage = lookup(read_json(run.run_dir / "ds_config.json"), "zero_optimization.stage")
    rows = [*((name, lookup(run.config, name)) for name in _SETTINGS), ("ZeRO stage", stage)]
    if present := [row for row in rows if row[1] != ""]:
        yield from (*_heading("Settings"), "", *table(("setting", "value"), present))
        yield from ("", "All settings: `config.yaml` and `ds_config.json`.")


def _heading(text: str) -> tuple[str, str]:
    return ("", f"## {plain(text)}")


def _join(*values: object) -> str:
    return ", ".join(str(value) for value in values if value)


def _number(value: float | None) -> str:
    return _format(value, ".4g" if value is None or abs(value) < 1_000 else ",.0f")


def _format(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def draw_plots(run: Summary) -> list[tuple[str, str]]:
    """Draw into `<run>/report/`; return titles and paths relative to report.md."""
    drawn = []
    for name, title, panels in _plots(run):
        present = [panel for panel in panels if any(steps for steps, _ in panel.curves.values())]
        if present:
            draw(present, run.run_dir / PLOTS / f"{name}.png", width=4.5 if present[1:] else 7.0)
            drawn.append((title, f"{PLOTS}/{name}.png"))
    return drawn


def _plots(run: Summary) -> Iterator[tuple[str, str, list[Panel]]]:
    loss = {"training": run.points("loss"), "validation": run.points("val_loss")}
    yield "loss", "Loss", [Panel("loss (nats per token)", loss)]
    for name, title, column in (
        ("learning_rate", "Learning rate", "lr"),
        ("gradient_norm", "Gradient norm", "grad_norm"),
        ("tokens_per_s", "Tokens/s", "tokens_per_s"),
    ):
        curve = {run.name: run.points(column)}
        panel = Panel(
            title.lower(), curve, smoothed=column != "lr", logarithmic=column == "grad_norm"
        )
        yield name, title, [panel]
    yield "memory", "Peak memory", [Panel("peak memory, GB", _memory(run))]
    health = read_table(run.run_dir / "selection.csv")
    gates = [_by_layer(health, f"gate_{branch}", f"mean gate, {branch}") for branch in BRANCHES]
    yield "gates", "Mean gates by layer, first (dark) to last", gates
    selection = [_by_layer(health, column, title) for column, title in _SELECTION.items()]
    yield "selection", "Block selection by layer, first (dark) to last", selection


def _memory(run: Summary) -> dict[str, Points]:
    """Return the peaks of each rank from heartbeats, else of rank 0 from metrics.csv."""
    curves: dict[str, Points] = {
        f"rank {history.rank}": (
            [float(step) for step, _ in history.memory] + [float(history.step)],
            [memory for _, memory in history.memory] + [history.memory[-1][1]],
        )
        for history in run.histories
        if history.memory
    }
    return curves or {"rank 0": run.points("memory_gb")}


def _by_layer(health: Table, column: str, title: str) -> Panel:
    curves: dict[str, tuple[list[float], list[float]]] = {}
    fraction = column not in ("distance", "selector_loss")
    for row in health.rows:
        if "layer" in row and math.isfinite(row.get(column, math.nan)):
            steps, values = curves.setdefault(f"layer {row['layer']:.0f}", ([], []))
            steps.append(row["step"])
            values.append(row[column])
    return Panel(title, curves, ordered=True, fraction=fraction)
