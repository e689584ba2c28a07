"""Hang detection from heartbeats, and throughput collapse and dead gates from a run's tables."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from nsa.constants import BRANCHES
from nsa.monitor.artifacts import read_table
from nsa.monitor.config import WatchConfig
from nsa.processes import is_alive

# Phase of a heartbeat -> the setting of `monitor.watch` that limits it.
LIMIT_OF_PHASE = {
    "setup": "setup",
    "data": "data",
    "forward": "compute",
    "backward": "compute",
    "step": "compute",
    "idle": "compute",
    "eval": "evaluation",
    "save": "save",
}
WINDOW = 10  # logged steps that a collapse or a dead gate has to last


@dataclass(eq=False)
class WatchedRank:
    """A rank of this host: its newest heartbeat and its process."""

    number: int
    beat: dict[str, Any]
    process: psutil.Process | None  # None: it had exited before it was found

    @property
    def running(self) -> bool:
        return self.process is not None and is_alive(self.process)

    @property
    def ended(self) -> bool:
        """Whether it has written its last heartbeat."""
        return self.beat["event"] == "end"


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
        self._ongoing: set[str] = set()  # problems that were reported and have not ended

    def find_hang(self, ranks: Mapping[int, WatchedRank], now: float) -> HangReport | None:
        """Report the first rank above its limit, unless the disk takes no heartbeats.

        `now` is from before the heartbeats were read, so that a delay of this process adds nothing.
        """
        if self._has_changed("config.yaml"):
            self._read_limits()
        reports = (self._check(rank, ranks, now) for rank in ranks.values())
        report = next(filter(None, reports), None)
        if report is None or _is_writable(self.folder):
            return report
        if self._unwritable < 0:
            self._log(f"{self.folder} cannot be written, so missing heartbeats prove nothing")
        self._unwritable = time.monotonic()
        return None

    def find_degradation(self) -> Iterator[tuple[HangReport, str]]:
        """Yield new problems of a run that still makes progress, with the action: warn or halt."""
        limits = self.limits
        if limits.on_collapse != "ignore" and self._has_changed("metrics.csv"):
            yield from ((report, limits.on_collapse) for report in self._find_collapse())
        if limits.on_dead_gate != "ignore" and self._has_changed("selection.csv"):
            yield from ((report, limits.on_dead_gate) for report in self._find_dead_gates())

    def _check(
        self, rank: WatchedRank, ranks: Mapping[int, WatchedRank], now: float
    ) -> HangReport | None:
        beat, age = rank.beat, now - max(rank.beat["mono"], self._unwritable)
        name, position = f"rank {rank.number}", f"{beat['phase']} after step {beat['step']}"
        silence = self.limits.silence and max(self.limits.silence, 3 * self._interval)
        setting, limit, seconds, detail = "compute", self.limits.compute, age, ""
        if rank.ended:
            reason = f"{name} has written its last heartbeat but not exited"
        elif silence and age > silence:
            setting, limit = "silence", silence
            reason, detail = f"no heartbeat from {name}", f", in {position}; its process is alive"
        else:
            setting = LIMIT_OF_PHASE[beat["phase"]]
            limit = getattr(self.limits, setting)
            # With `silence` on, a rank may have moved on since its last heartbeat.
            seconds = beat["since"] + (0.0 if silence else age)
            reason = f"{name} has been in {position}"
        if not limit or seconds <= limit:
            return None
        reason += f" for {seconds:.0f} s (limit monitor.watch.{setting} = {limit:g}){detail}"
        stuck = {
            other: other.beat["since"] + now - other.beat["mono"]
            for other in ranks.values()
            if not other.ended
        }
        slowest = max(stuck, key=stuck.__getitem__, default=rank)
        if slowest is not rank and slowest.beat["since"] > beat["since"] + self._interval:
            reason += (
                f"; rank {slowest.number} has been in {slowest.beat['phase']} for longer, "
                f"{slowest.beat['since']:.0f} s, and may be the cause"
            )
        phase, step = beat["phase"], int(beat["step"])
        return HangReport(reason, rank.number, phase, step, round(seconds, 1), limit)

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

    def _find_collapse(self) -> Iterator[HangReport]:
        rows = [r for r in read_table(self.folder / "metrics.csv").rows if "tokens_per_s" in r]
        rates = [row["tokens_per_s"] for row in rows]
        if len(rates) < 2 * WINDOW:
            return
        median, best, limit = statistics.median(rates), max(rates[-WINDOW:]), self.limits.collapse
        if self._is_new("collapse", best < limit * median):
            step = int(rows[-1]["step"])
            reason = (
                f"throughput has collapsed: at most {best:,.0f} tokens/s in the last {WINDOW} "
                f"logged steps, up to step {step}; the run's median is {median:,.0f} "
                f"(limit: monitor.watch.collapse = {limit:g} of it)"
            )
            yield HangReport(reason, step=step, limit=limit)

    def _find_dead_gates(self) -> Iterator[HangReport]:
        rows, limit = read_table(self.folder / "selection.csv").rows, self.limits.dead_gate
        for branch in BRANCHES:
            gates: dict[int, list[float]] = {}  # of each layer, by step
            for row in rows:
                if (gate := row.get(f"gate_{branch}")) is not None:
                    gates.setdefault(int(row["step"]), []).append(gate)
            means = [statistics.fmean(gates[step]) for step in sorted(gates)[-WINDOW:]]
            if self._is_new(branch, len(means) == WINDOW and max(means) < limit):
                step = max(gates)
                reason = (
                    f"the gate of branch {branch} is dead: its mean over all layers was at most "
                    f"{max(means):.2g} in the last {WINDOW} logged steps, up to step {step} "
                    f"(limit: monitor.watch.dead_gate = {limit:g})"
                )
                yield HangReport(reason, step=step, limit=limit)

    def _is_new(self, name: str, present: bool) -> bool:
        """Return whether a problem has just begun: each occurrence is reported once."""
        new = present and name not in self._ongoing
        (self._ongoing.add if present else self._ongoing.discard)(name)
        return new


def _is_writable(folder: Path) -> bool:
    """Try to write one block: a full disk takes no heartbeats."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(buffering=0, dir=folder) as file:
        file.write(bytes(4096))
        os.fsync(file.fileno())
        return True
    return False
