"""`report.md` with its pictures: what was decided about a run, from what, and how the run went."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.atomic_io import atomic_write_text
from nsa.report.markdown import plain, table

if TYPE_CHECKING:
    from nsa.gates.result import GateResult
    from nsa.report.summary import Summary

FILE_NAME = "report.md"
_SETTINGS = (
    "model.layers",
    "model.width",
    "model.attention.kind",
    "model.attention.compressor",
    "model.activation_checkpointing",
    "data.source",
    "data.tokenizer",
    "data.seq_len",
    "train.steps",
    "train.micro_batch",
    "train.accumulation",
    "train.learning_rate",
    "train.precision",
    "train.seed",
    "train.on_bad_step",
)
_ANSWERS = {True: "yes", False: "**NO**", None: "not measured"}


def add_parser(verbs: Any) -> None:
    """Add `report` to the verbs of `nsa`."""
    about = "write report.md of runs: verdicts with their evidence, facts, pictures"
    report = verbs.add_parser("report", help=about, description=about)
    report.add_argument("runs", type=Path, nargs="+", help="folders of runs, as runs/m7c-demo")
    report.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    for run in args.runs:
        print(write_report(run))
    return 0


def write_report(run_dir: Path) -> Path:
    """Write `report.md` and the pictures that it shows, however far the run has come."""
    from nsa.report.report_plots import draw_pictures
    from nsa.report.summary import summarise

    run = summarise(run_dir)
    if not any((run_dir / name).exists() for name in ("config.yaml", "metrics.csv", "gates.json")):
        raise ValueError(
            f"{run_dir} holds no config.yaml, metrics.csv or gates.json; give the folder of a run"
        )
    pictures = draw_pictures(run)
    lines = [
        *_verdicts(run.verdicts),
        *_not_measured(run.verdicts),
        *_facts(run),
        *_beside_the_earlier_system(run),
        *_settings(run_dir),
        *_pictures(pictures),
    ]
    path = run_dir / FILE_NAME
    atomic_write_text(path, "\n".join([f"# {run.name}: {_decision(run.verdicts)}", *lines]) + "\n")
    return path


def _decision(verdicts: Sequence[GateResult]) -> str:
    if not verdicts:
        return "not judged yet"
    bad = [verdict.gate for verdict in verdicts if not verdict.go]
    return f"No-Go at {', '.join(bad)}" if bad else f"Go at {verdicts[-1].gate}"


def _verdicts(verdicts: Sequence[GateResult]) -> Iterator[str]:
    from nsa.gates.result import NAMES

    for verdict in verdicts:
        decision = "Go" if verdict.go else "No-Go"
        yield from _heading(f"{verdict.gate}: {decision} at step {verdict.step:,}")
        yield from ("", f"Judged {plain(verdict.time)}, from recorded data alone.")
        yield from _table(
            ("criterion", "met", "value", "wanted", "evidence"),
            [
                (
                    criterion.name,
                    _ANSWERS[criterion.ok],
                    _figure(criterion.value),
                    criterion.limit,
                    criterion.evidence,
                )
                for criterion in verdict.criteria
            ],
        )
    judged = {verdict.gate for verdict in verdicts}
    if missing := [name for name in NAMES if name not in judged]:
        yield from ("", f"Not judged: {', '.join(missing)}.")


def _not_measured(verdicts: Sequence[GateResult]) -> Iterator[str]:
    """What no verdict rests on, once for each reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        for criterion in verdict.unmeasured:
            found.setdefault((criterion.name, criterion.evidence), []).append(verdict.gate)
    if found:
        yield from (*_heading("Not measured"), "")
        for (name, why), gates in found.items():
            yield f"- {plain(name)} ({', '.join(gates)}): {plain(why)}"


def _facts(run: Summary) -> Iterator[str]:
    from nsa.monitor.artifacts import read_json

    env, halt = read_json(run.run_dir / "env.json"), read_json(run.run_dir / "halt.json")
    yield from _heading("The run")
    rows = [
        ("recipe, profile", _joined(env.get("recipe"), env.get("profile"))),
        ("code", plain(env.get("git_commit") or "")),
        ("machine", _joined(env.get("host"), *_devices(env))),
        ("versions", _versions(env)),
        ("steps", f"{run.steps:,}"),
        ("tokens", _shown(run.tokens, ",.0f")),
        ("loss, last", _shown(run.loss, ".4f")),
        ("held-out loss, last", _shown(run.held_out, ".4f")),
        ("held-out bits per byte, last", _shown(run.bits_per_byte, ".4f")),
        *_history(run),
        ("steps not applied", _shown(run.skipped, ",d")),
        ("halted by the watchdog", _halt(halt)),
        ("kernels passed over", _fallbacks(run.run_dir)),
        ("not read", plain(run.metrics.problem)),
    ]
    yield from _table(("", ""), [row for row in rows if row[1]])
    notes = env.get("notes")
    for note in notes if isinstance(notes, list) else ():
        yield from ("", plain(note))


def _history(run: Summary) -> Iterator[tuple[str, str]]:
    """What rank 0's heartbeats tell of the run's hours."""
    if not run.histories or not run.histories[0].lines:
        return
    history = run.histories[0]
    if history.first_time is not None and history.last_time is not None:
        passed = max(0, round(history.last_time - history.first_time))
        clock = f"{passed // 3600}:{passed // 60 % 60:02}:{passed % 60:02}"
        yield "time from first to last heartbeat", f"{clock} on {len(run.histories)} ranks"
    yield "times it went on", f"{max(0, history.processes - 1):,}"
    pause = max(run.histories, key=lambda one: one.pause)
    yield "longest pause", f"{pause.pause:.1f} s ({pause.pause_at})" if pause.pause_at else ""
    yield "engine", plain(history.backend)
    yield "end", plain(history.status or "none was written: it still runs, or was killed")


def _devices(env: dict[str, Any]) -> list[Any]:
    for part, key in (("cuda", "devices"), ("cpu", "model")):
        found = env.get(part)
        if isinstance(found, dict) and found.get(key):
            return found[key] if isinstance(found[key], list) else [found[key]]
    return []


def _versions(env: dict[str, Any]) -> str:
    packages = env.get("packages")
    known = packages if isinstance(packages, dict) else {}
    wanted = ("torch", "deepspeed", "triton")
    return ", ".join(f"{name} {plain(known[name])}" for name in wanted if known.get(name))


def _halt(halt: dict[str, Any]) -> str:
    return "; ".join(f"{plain(key)}: {plain(value)}" for key, value in halt.items())


def _fallbacks(run_dir: Path) -> str:
    from nsa.monitor.artifacts import read_text

    rows = list(csv.DictReader((read_text(run_dir / "fallbacks.csv") or "").splitlines()))
    known = [row for row in rows if row.get("operation") and row.get("calls")]
    return "; ".join(
        plain(f"{row['operation']} on {row['backend']}: {row['reason']} ({row['calls']} calls)")
        for row in known[:10]
    )


def _beside_the_earlier_system(run: Summary) -> Iterator[str]:
    """The earlier system's are of 12 layers, 2,048 tokens, bf16, two A100 80GB over PCIe."""
    yield from _heading("Beside the earlier system")
    yield from _table(
        ("", "this run", "the earlier one, M7C on two A100"),
        [
            ("tokens/s, median", _shown(run.tokens_per_s, ",.0f"), "39 (its target: 50)"),
            ("peak memory of a rank, GB", _shown(run.memory_gb, ".2f"), "15.6 (its limit: 40)"),
            ("loss at step 1", _shown(run.first_loss, ".2f"), "5.67"),
        ],
    )


def _settings(run_dir: Path) -> Iterator[str]:
    import yaml

    from nsa.monitor.artifacts import read_json, read_text

    try:
        tree = yaml.safe_load(read_text(run_dir / "config.yaml") or "")
    except (yaml.YAMLError, ValueError, RecursionError):
        tree = None
    rows = [(name, _at(tree, name)) for name in _SETTINGS]
    zero = _at(read_json(run_dir / "ds_config.json"), "zero_optimization.stage")
    shown = [(name, plain(value)) for name, value in [*rows, ("ZeRO stage", zero)] if value != ""]
    if shown:
        yield from _heading("Settings")
        yield from _table(("setting", "value"), shown)
        yield from ("", "All of them are in `config.yaml` and `ds_config.json`.")


def _at(tree: object, name: str) -> object:
    for part in name.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return ""
        tree = tree[part]
    return tree


def _pictures(pictures: Iterable[tuple[str, str]]) -> Iterator[str]:
    for title, path in pictures:
        yield from (*_heading(title), "", f"![{title}]({path})")


def _heading(text: str) -> tuple[str, ...]:
    return ("", f"## {plain(text)}")


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield from ("", *table(header, rows))


def _joined(*values: object) -> str:
    return ", ".join(plain(value) for value in values if value)


def _figure(value: float | None) -> str:
    return _shown(value, ".4g" if value is None or abs(value) < 1_000 else ",.0f")


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
