"""Observers that write a run's metrics: progress lines, CSV files, and trackers.

A resumed run drops the steps that run again from `metrics.csv`, `selection.csv`, `teacher.csv`.
A file with other columns, as after a changed setting, is moved to `metrics.1.csv`, or .2 and so on.
"""

from __future__ import annotations

import csv
import io
import itertools
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from nsa.atomic_io import append, atomic_write_text
from nsa.constants import BRANCHES
from nsa.monitor.observer import (
    LAYER_STATISTICS,
    LINES,
    METRICS_COLUMNS,
    SELECTOR_STATISTICS,
    TAGS,
    TEACHER_COLUMNS,
    Observer,
    StepRecord,
    warn,
)
from nsa.text import printable
from nsa.untrusted import read_text

_MIN_SECONDS = 10.0  # between two lines


class Progress(Observer):
    """Prints a line for some logged steps, for each validation and message."""

    def __init__(self, last_step: int) -> None:
        self._last_step = last_step
        self._last_time = float("-inf")  # of a printed step
        self._unprinted: StepRecord | None = None
        self._run_dir = Path()

    def on_start(self, run_dir: Path, start_step: int) -> None:
        self._run_dir = run_dir

    def on_step(self, record: StepRecord) -> None:
        due = (
            record.val_loss is not None
            or record.step >= self._last_step
            or time.monotonic() - self._last_time >= _MIN_SECONDS
        )
        self._unprinted = record
        if due:
            self._print_step(record)

    def on_message(self, text: str) -> None:
        self._print(text)

    def on_end(self, status: str) -> None:
        if self._unprinted is not None:
            self._print_step(self._unprinted)
        self._print(status)
        if status == "finished":
            run = shlex.quote(str(self._run_dir))
            export = shlex.quote(f"exports/{self._run_dir.name}")
            self._print(
                f"next commands:\n  nsa report {run}\n  nsa generate {run} --prompt 'def '\n"
                f"  nsa export {run} --to {export}\n  tensorboard --logdir {run}"
            )

    def _print_step(self, record: StepRecord) -> None:
        self._last_time, self._unprinted = time.monotonic(), None
        eta = tqdm.format_interval(max(0, self._last_step - record.step) * record.seconds)
        parts = [f"step {record.step}/{self._last_step}"]
        for name, text in LINES.items():
            if (value := getattr(record, name)) is not None:
                parts.append(text.format(value))
        self._print("  ".join([*parts, f"ETA {eta}"]))

    def _print(self, text: str) -> None:
        print(printable(text, keep="\n"), flush=True)


METRICS_FILE, SELECTION_FILE, FALLBACKS_FILE = "metrics.csv", "selection.csv", "fallbacks.csv"
TEACHER_FILE = "teacher.csv"
SELECTION_COLUMNS = ("step", "layer", *LAYER_STATISTICS)
FALLBACK_COLUMNS = ("operation", "backend", "reason", "calls")
Cells = Mapping[str, float | None]  # of a row, by column
Counts = Mapping[tuple[str, str, str], int]  # calls by operation, backend and reason


class CsvObserver(Observer):
    """Appends the rows of each logged step to a file, which its first row creates.

    The first of `columns` is `step`. `rows` returns a step's rows, which may have further cells.
    """

    def __init__(
        self,
        file_name: str,
        columns: Sequence[str],
        rows: Callable[[StepRecord], Sequence[Cells]],
        float_format: str = "{:.6g}",
    ) -> None:
        self.file_name = file_name
        self._header = ",".join(columns)
        self._columns, self._rows, self._float_format = columns, rows, float_format
        self._path: Path | None = None  # None before `on_start`, and if that raised

    def on_start(self, run_dir: Path, start_step: int) -> None:
        path = run_dir / self.file_name
        self._drop_rows_after(path, start_step)
        self._path = path

    def on_step(self, record: StepRecord) -> None:
        if self._path is None:
            return
        lines = ""
        for row in self._rows(record):
            lines += ",".join(self._cell(row.get(column)) for column in self._columns) + "\n"
        if lines:
            append(self._path, lines, header=f"{self._header}\n")

    def _cell(self, value: float | None) -> str:
        if value is None:
            return ""
        return str(value) if isinstance(value, int) else self._float_format.format(value)

    def _drop_rows_after(self, path: Path, step: int) -> None:
        """Drop the rows after `step` and those that a crash cut off."""
        if not path.exists():
            return
        header, *lines = read_text(path, "replace").split("\n")
        if header and header != self._header:
            numbered = (path.with_suffix(f".{number}.csv") for number in itertools.count(1))
            aside = next(name for name in numbered if not name.exists())
            path.rename(aside)
            warn(f"{path}: has other columns ({header[:80]!r}); moved to {aside.name}")
            return
        kept = [self._header]
        for line in lines[:-1]:
            first, *others = line.split(",")
            complete = len(others) == len(self._columns) - 1 and first.isdecimal()
            if complete and int(first) <= step:
                kept.append(line)
        atomic_write_text(path, "\n".join(kept) + "\n")


def metrics_csv() -> CsvObserver:
    """Write one row per logged step, whose floats read back exactly."""
    return CsvObserver(METRICS_FILE, METRICS_COLUMNS, lambda record: [vars(record)], "{!r}")


def selection_csv(selector_loss: bool = False) -> CsvObserver:
    """Write one row per logged step and NSA layer; a dense run has no such file."""
    columns = (*SELECTION_COLUMNS, *(SELECTOR_STATISTICS if selector_loss else ()))

    def rows(record: StepRecord) -> list[Cells]:
        layers = enumerate(record.layers)
        return [{"step": record.step, "layer": index, **layer} for index, layer in layers]

    return CsvObserver(SELECTION_FILE, columns, rows)


def teacher_csv() -> CsvObserver:
    """Write one row per validation and range of positions of a run with a teacher."""

    def rows(record: StepRecord) -> list[Cells]:
        return [{"step": record.step, **row} for row in record.versus_teacher]

    return CsvObserver(TEACHER_FILE, ("step", *TEACHER_COLUMNS), rows)


class FallbacksCsv(Observer):
    """One row per operation and backend that `auto` could not use in this process, and why.

    Rewritten at logged steps if a count changed, and at the end.
    """

    def __init__(self, counts: Callable[[], Counts]) -> None:
        self._counts = counts
        self._path = Path()
        self._written: Counts = {}

    def on_start(self, run_dir: Path, start_step: int) -> None:
        self._path = run_dir / FALLBACKS_FILE

    def on_step(self, record: StepRecord) -> None:
        if self._counts() != self._written:
            self._write()

    def on_end(self, status: str) -> None:
        self._write()

    def _write(self) -> None:
        counts, text = dict(self._counts()), io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(FALLBACK_COLUMNS)
        for key, calls in sorted(counts.items()):
            writer.writerow([*key, calls])
        atomic_write_text(self._path, text.getvalue())
        self._written = counts


class TrackerObserver(Observer):
    """Writes the scalars of every logged step to DeepSpeed's `monitor`: TensorBoard and W&B.

    The run's `settings` go to W&B alone, the `texts` to TensorBoard alone.
    """

    def __init__(self, monitor: Any, settings: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        self._monitor, self._settings, self._texts = monitor, settings, texts
        self._board = getattr(getattr(monitor, "tb_monitor", None), "summary_writer", None)
        self._wandb: Any = None
        if getattr(monitor, "wandb_monitor", None) is not None:
            import wandb  # late: optional

            self._wandb = wandb

    def on_start(self, run_dir: Path, start_step: int) -> None:
        if self._wandb is not None:
            self._wandb.config.update(dict(self._settings))
        if self._board is not None:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # late: optional

            # TensorBoard drops the values of steps that run again. Even at step 0: an earlier
            # process may have logged steps but saved no checkpoint.
            restart = Event(session_log=SessionLog(status=SessionLog.START))
            self._board.file_writer.add_event(restart, start_step + 1)
            for name, text in self._texts.items():
                self._board.add_text(f"run/{name}", f"```\n{text}```", start_step + 1)
            self._board.flush()

    def on_end(self, status: str) -> None:
        """End W&B's run here: the process skips its exit handler."""
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(status.startswith(("failed", "no-go"))))

    def on_step(self, record: StepRecord) -> None:
        scalars = {tag: getattr(record, name) for name, tag in TAGS.items()}
        if record.versus_teacher:
            tokens = sum(row["tokens"] for row in record.versus_teacher)
            for name in ("teacher_loss", "kl"):
                total = sum(row[name] * row["tokens"] for row in record.versus_teacher)
                scalars[f"eval/{name}"] = total / tokens
        for branch in BRANCHES:
            gates = [layer[f"gate_{branch}"] for layer in record.layers]
            measured = [gate for gate in gates if gate is not None]
            scalars[f"gates/{branch}"] = fmean(measured) if measured else None
        for index, layer in enumerate(record.layers):
            for name, value in layer.items():
                group = "gates" if name.startswith("gate_") else "selection"
                scalars[f"{group}/layer{index:02}/{name.removeprefix('gate_')}"] = value
        self._monitor.write_events(
            [(tag, value, record.step) for tag, value in scalars.items() if value is not None]
        )
