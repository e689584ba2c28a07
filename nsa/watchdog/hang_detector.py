"""Hang detection from heartbeats, and throughput collapse and dead gates from a run's tables."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nsa.constants import BRANCHES
from nsa.monitor.artifacts import Row, read_table
from nsa.monitor.config import WatchConfig

# Phase of a heartbeat -> the setting of `monitor.watch` that limits it; the others: `compute`.
LIMIT_OF_PHASE = {"setup": "setup", "data": "data", "eval": "evaluation", "save": "save"}
WINDOW = 10  # logged steps that a collapse or a dead gate has to last


@dataclass(frozen=True)
class HangReport:
    """Why a run is halted or warned about; all fields go into halt.json."""

    reason: str
    rank: int | None = None
    phase: str | None = None
    step: int | None = None
    seconds: float | None = None
    limit: float | None = None


class HangDetector:
    """Compares a run with the limits in its config.yaml; defaults apply until that is written."""

    def __init__(self, folder: Path, log: Callable[[str], None]) -> None:
        self.limits = WatchConfig()
        self.folder = folder
        self._log = log
        self._interval = 0.0  # seconds between two heartbeats
        self._unwritable = float("-inf")  # when the folder last could not be written
        self._file_versions: dict[str, tuple[int, int]] = {}
        self._ongoing: dict[str, set[str]] = {}  # problems that were reported and have not ended

    def find_hang(self, beats: Mapping[int, Mapping[str, Any]], now: float) -> HangReport | None:
        """Report the first running rank above its limit, unless the disk takes no heartbeats.

        `beats`: the newest heartbeats. `now` is from before they were read, so that a delay of this
        process adds nothing.
        """
        if self._has_changed("config.yaml"):
            self._read_limits()
        report = next(filter(None, (self._check(rank, beats, now) for rank in beats)), None)
        if report is None or _is_writable(self.folder):
            return report
        if self._unwritable < 0:
            self._log(f"{self.folder} cannot be written, so missing heartbeats prove nothing")
        self._unwritable = time.monotonic()
        return None

    def find_degradation(self) -> Iterator[tuple[HangReport, str]]:
        """Yield new problems of a run that still makes progress, with the action: warn or halt."""
        for name, file, find in (
            ("collapse", "metrics.csv", _find_collapse),
            ("dead_gate", "selection.csv", _find_dead_gates),
        ):
            action = getattr(self.limits, f"on_{name}")
            if action != "ignore" and self._has_changed(file):
                rows = read_table(self.folder / file).rows
                problems = dict(find(rows, getattr(self.limits, name)))
                known, self._ongoing[name] = self._ongoing.get(name, set()), set(problems)
                yield from ((problems[key], action) for key in problems if key not in known)

    def _check(
        self, rank: int, beats: Mapping[int, Mapping[str, Any]], now: float
    ) -> HangReport | None:
        beat, age = beats[rank], now - max(beats[rank]["mono"], self._unwritable)
        phase, step, since = beat["phase"], int(beat["step"]), beat["since"]
        silence = self.limits.silence and max(self.limits.silence, 3 * self._interval)
        setting, seconds, detail = "compute", age, ""
        if beat["event"] == "end":
            reason = f"rank {rank} has written its last heartbeat but not exited"
        elif silence and age > silence:
            setting, reason = "silence", f"no heartbeat from rank {rank}"
            detail = f", in {phase} after step {step}; its process is alive"
        else:
            setting = LIMIT_OF_PHASE.get(phase, "compute")
            # With `silence` on, a rank may have moved on since its last heartbeat.
            seconds = since + (0.0 if silence else age)
            reason = f"rank {rank} has been in {phase} after step {step}"
        limit = silence if setting == "silence" else getattr(self.limits, setting)
        if not limit or seconds <= limit:
            return None
        reason += f" for {seconds:.0f} s (limit monitor.watch.{setting} = {limit:g}){detail}"
        unfinished = [other for other in beats if beats[other]["event"] != "end"]
        slowest = max(unfinished, key=lambda n: beats[n]["since"] - beats[n]["mono"], default=rank)
        cause = beats[slowest]
        if slowest != rank and cause["since"] > since + self._interval:
            reason += (
                f"; rank {slowest} has been in {cause['phase']} for longer, {cause['since']:.0f} "
                "s, and may be the cause"
            )
        return HangReport(reason, rank, phase, step, round(seconds, 1), limit)

    def _read_limits(self) -> None:
        path = self.folder / "config.yaml"
        try:
            monitor = yaml.safe_load(path.read_text())["monitor"]
            self._interval = float(monitor["heartbeat"])
            limits = WatchConfig(**monitor["watch"])
            limits.validate()
            self.limits = limits
        except (OSError, yaml.YAMLError, ValueError, TypeError, KeyError) as error:
            self._log(f"{path}: monitor.watch cannot be read, so its limits stay: {error!r}")

    def _has_changed(self, name: str) -> bool:
        try:
            status = os.stat(self.folder / name)
        except OSError:
            return False
        version = (status.st_mtime_ns, status.st_size)
        changed = self._file_versions.get(name) != version
        self._file_versions[name] = version
        return changed


def _find_collapse(rows: Sequence[Row], limit: float) -> Iterator[tuple[str, HangReport]]:
    rows = [row for row in rows if "tokens_per_s" in row]
    rates = [row["tokens_per_s"] for row in rows]
    if len(rates) < 2 * WINDOW:
        return
    median, best, step = statistics.median(rates), max(rates[-WINDOW:]), int(rows[-1]["step"])
    if best < limit * median:
        reason = (
            f"throughput has collapsed: at most {best:,.0f} tokens/s in the last {WINDOW} logged "
            f"steps, up to step {step}; the run's median is {median:,.0f} "
            f"(limit: monitor.watch.collapse = {limit:g} of it)"
        )
        yield "", HangReport(reason, step=step, limit=limit)


def _find_dead_gates(rows: Sequence[Row], limit: float) -> Iterator[tuple[str, HangReport]]:
    for branch in BRANCHES:
        gates: dict[int, list[float]] = {}  # of each layer, by step
        for row in rows:
            if (gate := row.get(f"gate_{branch}")) is not None:
                gates.setdefault(int(row["step"]), []).append(gate)
        means = [statistics.fmean(gates[step]) for step in sorted(gates)[-WINDOW:]]
        if len(means) == WINDOW and max(means) < limit:
            step = max(gates)
            reason = (
                f"the attention gate of branch {branch} is dead: its mean over all layers was at "
                f"most {max(means):.2g} in the last {WINDOW} logged steps, up to step {step} "
                f"(limit: monitor.watch.dead_gate = {limit:g})"
            )
            yield branch, HangReport(reason, step=step, limit=limit)


def _is_writable(folder: Path) -> bool:
    """Try to write one block: a full disk takes no heartbeats."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(buffering=0, dir=folder) as file:
        file.write(bytes(4096))
        os.fsync(file.fileno())
        return True
    return False
