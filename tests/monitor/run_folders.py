"""Records of steps, and run folders that the writers of a real run write; judged at a gate."""

import json
import platform
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from nsa.constants import BRANCHES
from nsa.gates.criteria import GateInputs, judge
from nsa.gates.results import Gate, GateResult
from nsa.monitor.artifacts import list_ranks, read_rank, read_table, valid_beats
from nsa.monitor.config import LadderConfig
from nsa.monitor.observer import LayerStatistics, StepRecord
from nsa.monitor.outputs import metrics_csv, selection_csv

Beat = dict[str, Any]
CONFIG = LadderConfig()


def make_record(step: int, **changes: Any) -> StepRecord:
    """Return a logged step with values that need full float64 precision."""
    values: dict[str, Any] = {
        "tokens": 4096 * step,
        "loss": 5.0 / (step + 2),
        "lr": 1e-4 / 3,
        "grad_norm": 0.1 + 0.2,
        "tokens_per_s": 1e6 / 7,
        "memory_gb": 15.6 / 7,
        "seconds": 1 / 3,
    }
    return StepRecord(step=step, **{**values, **changes})


def make_layers(layers: int = 2, **changes: Any) -> list[LayerStatistics]:
    """Return the statistics of layers with different gates."""
    return [make_layer(index, **changes) for index in range(layers)]


def make_layer(index: int, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for place, branch in enumerate(BRANCHES):
        values[f"gate_{branch}"] = (index + place) / 8
        values[f"gate_{branch}_std"] = 1 / 3
    values |= {"choosing": 0.75, "entropy": 0.5 + index / 16}
    values |= {"overlap": 0.875, "distance": 6.5}
    return {**values, **changes}


# Statistics of a layer whose queries all read every block.
NO_FREE_BLOCKS: dict[str, Any] = dict.fromkeys(("entropy", "overlap", "distance"))


def write_metrics(
    run_dir: Path,
    steps: int = 300,
    *,
    start: int = 0,
    log_every: int = 10,
    change: Callable[[int], dict[str, Any]] = lambda step: {},
) -> None:
    """Write metrics.csv: a falling loss, steady steps, a validation loss every 50."""
    observer = metrics_csv()
    observer.on_start(run_dir, start)
    for step in range(start + 1, steps + 1):
        if step % log_every == 0 or step in (1, steps):
            observer.on_step(_record(step, change(step)))


def _record(step: int, change: dict[str, Any]) -> StepRecord:
    values: dict[str, Any] = {"loss": 3 + 3 / step, "seconds": 0.5 + 0.001 * (step % 7)}
    if step == 1:
        values |= {"tokens_per_s": None, "seconds": 40.0}
    if step % 50 == 0:
        values |= {"val_loss": 3.1 + 3 / step, "bits_per_byte": 1.1 + 3 / step}
    return make_record(step, **{**values, **change})


def make_beat(rank: int, **changes: object) -> Beat:
    """Return a line of a rank's heartbeat file, written now by a process that is gone."""
    line = {"event": "progress", "rank": rank, "pid": 2**22, "host": platform.node()}
    line |= {"phase": "forward", "since": 0.0, "time": time.time(), "mono": time.monotonic()}
    return {**line, "step": 7, "micro_step": 0, "tokens": 0, "skipped": 0, **changes}


def beats(
    steps: int,
    *,
    rank: int = 0,
    start: int = 0,
    pid: int = 100,
    mono: float = 50.0,
    waits: dict[int, tuple[str, float]] | None = None,
    **values: Any,
) -> list[Beat]:
    """Return the heartbeats of one process whose steps take half a second.

    `waits` = {step: (phase, seconds)}: after that step, it stays in the phase for so long, with a
    line every 5 seconds.
    """
    lines: list[Beat] = []

    def line(event: str, phase: str, step: int, since: float) -> None:
        recorded = {"memory_gb": 10.0, "gpu_busy": 0.95, "backend": "deepspeed-zero1", **values}
        place = {"event": event, "phase": phase, "step": step, "since": since}
        when = {"time": 1.7e9 + mono, "mono": mono}
        lines.append(
            make_beat(rank, pid=pid + rank, tokens=4096 * step, **place, **when, **recorded)
        )

    line("start", "setup", start, 0.0)
    mono += 30.0
    for step in range(start + 1, steps + 1):
        line("step_start", "data", step - 1, 0.01)
        mono += 0.3
        line("progress", "backward", step - 1, 0.1)
        mono += 0.2
        line("step_end", "step", step, 0.05)
        phase, seconds = (waits or {}).get(step, ("", 0.0))
        for passed in range(5, int(seconds) + 1, 5):
            mono += 5.0
            line("progress", phase, step, float(passed))
    return lines


def write_beats(run_dir: Path, *processes: list[Beat]) -> None:
    """Append the lines of processes to the heartbeat files of their ranks."""
    run_dir.mkdir(parents=True, exist_ok=True)
    for lines in processes:
        with (run_dir / f"heartbeat_rank{lines[0]['rank']}.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def read_heartbeats(run_dir: Path) -> dict[int, list[Beat]]:
    """Read the valid lines of every rank that has any, oldest first."""
    matches = (re.search(r"rank(\d+)", path.name) for path in run_dir.glob("heartbeat_rank*.jsonl"))
    found = {}
    for rank in sorted({int(match[1]) for match in matches if match}):
        lines = (run_dir / f"heartbeat_rank{rank}.jsonl").read_bytes().splitlines()
        found[rank] = list(valid_beats(lines))
    return found


def write_limits(folder: Path, **limits: object) -> None:
    """Write config.yaml with `monitor.watch`."""
    folder.mkdir(exist_ok=True)
    watch = {"compute": 20, "silence": 10, "save": 1_000, **limits}
    (folder / "config.yaml").write_text(yaml.safe_dump({"monitor": {"watch": watch}}))


def write_selection(
    run_dir: Path,
    steps: int = 300,
    *,
    gates: dict[str, float],
    layers: int = 2,
    changes: Sequence[dict[str, Any]] = ({}, {}),
) -> None:
    """Write selection.csv with the same gates in every layer, and each layer's `changes`."""
    values = {f"gate_{branch}": mean for branch, mean in gates.items()}
    rows = [
        {**make_layer(layer), **values, "entropy": 0.7 - 0.1 * layer, **changes[layer]}
        for layer in range(layers)
    ]
    observer = selection_csv(selector_loss=any(changes))
    observer.on_start(run_dir, 0)
    for step in (1, *range(10, steps + 1, 10)):
        observer.on_step(make_record(step, layers=rows))


def write_run(run_dir: Path, steps: int = 300, ranks: int = 2, **values: Any) -> Path:
    """Write the files of a healthy run."""
    write_metrics(run_dir, steps)
    write_beats(run_dir, *(beats(steps, rank=rank, **values) for rank in range(ranks)))
    return run_dir


def load_inputs(run_dir: Path, gate: Gate, **facts: Any) -> GateInputs:
    """Return what the run has recorded, and `facts` that its files do not hold."""
    return GateInputs(
        gate.step,
        metrics=read_table(run_dir / "metrics.csv"),
        selection=read_table(run_dir / "selection.csv"),
        histories=[read_rank(run_dir, rank) for rank in list_ranks(run_dir)],
        **facts,
    )


def judge_files(run_dir: Path, gate: Gate, config: LadderConfig, **facts: Any) -> GateResult:
    return judge(gate, load_inputs(run_dir, gate, **facts), config)
