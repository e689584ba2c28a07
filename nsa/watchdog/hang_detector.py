"""Hang detection from heartbeats, and throughput collapse and dead gates from a run's tables."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
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
    """A rank's newest heartbeat, when it was received, and its process."""

    number: int
    beat: dict[str, Any]
    received: float  # time.monotonic() of this process
    process: psutil.Process | None  # None: it is already gone, or runs on another host
    remote: bool = False

    @property
    def running(self) -> bool:
        """Whether it runs; for another host, whether its last heartbeat is still to come."""
        if self.remote:
            return not self.ended
        return self.process is not None and is_alive(self.process)

    @property
    def ended(self) -> bool:
        return self.beat["event"] == "end"

    def age(self, now: float) -> float:
        """Seconds since the newest heartbeat; since its receipt where the clock is not shared."""
        same_clock = not self.remote and self.beat["mono"] <= now
        return now - (self.beat["mono"] if same_clock else self.received)


@dataclass(frozen=True)
class HangReport:
    """Why a run should be halted or warned about; all fields go into halt.json."""

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
        self._folder = folder
        self._log = log
        self._interval = 0.0  # seconds between two heartbeats
        self._unwritable = float("-inf")  # when the folder last could not be written
        self._file_versions: dict[str, tuple[int, int]] = {}
        self._ongoing: set[str] = set()  # problems that were reported and have not ended

    def find_hang(self, ranks: Mapping[int, WatchedRank], now: float) -> HangReport | None:
        """Report the first rank above its limit, unless the disk takes no heartbeats.

        `now` is from before the heartbeats were read, so a delay of this process counts for none.
        """
        self._read_limits()
        reports = [self._check(rank, ranks.values(), now) for rank in ranks.values()]
        report = next(filter(None, reports), None)
        if report is None or _is_writable(self._folder):
            return report
        if self._unwritable < 0:
            self._log(f"{self._folder} cannot be written, so missing heartbeats prove nothing")
        self._unwritable = time.monotonic()
        return None

    def find_degradation(self) -> list[tuple[HangReport, str]]:
        """Return new problems of a run that still moves, each with its action: warn or halt."""
        problems = []
        on_collapse, on_dead_gate = self.limits.on_collapse, self.limits.on_dead_gate
        if on_collapse != "ignore" and self._has_changed("metrics.csv"):
            problems += [(report, on_collapse) for report in self._find_collapse()]
        if on_dead_gate != "ignore" and self._has_changed("selection.csv"):
            problems += [(report, on_dead_gate) for report in self._find_dead_gates()]
        return problems

    def _check(
        self, rank: WatchedRank, ranks: Iterable[WatchedRank], now: float
    ) -> HangReport | None:
        beat, age = rank.beat, min(rank.age(now), now - self._unwritable)
        name, where = f"rank {rank.number}", f"{beat['phase']} after step {beat['step']}"
        silence = self.limits.silence and max(self.limits.silence, 3 * self._interval)
        if rank.ended:
            setting, limit, seconds = "compute", self.limits.compute, age
            reason, detail = f"{name} has written its last heartbeat but not exited", ""
        elif silence and age > silence:
            setting, limit, seconds = "silence", silence, age
            reason = f"no heartbeat from {name}"
            detail = f", in {where}" + ("" if rank.remote else "; its process is alive")
        else:
            setting = LIMIT_OF_PHASE[beat["phase"]]
            limit = getattr(self.limits, setting)
            # With `silence` on, a rank may have moved on since its last heartbeat.
            seconds = beat["since"] + (0.0 if silence else age)
            reason, detail = f"{name} has been in {where}", ""
        if not limit or seconds <= limit:
            return None
        reason += f" for {seconds:.0f} s (limit monitor.watch.{setting} = {limit:g}){detail}"
        active = [other for other in ranks if not other.ended]
        slowest = max(active, key=lambda other: other.beat["since"] + other.age(now), default=rank)
        if slowest is not rank and slowest.beat["since"] > beat["since"] + self._interval:
            reason += (
                f"; rank {slowest.number} has been in {slowest.beat['phase']} for longer, "
                f"{slowest.beat['since']:.0f} s, and may be the one it waits for"
            )
        phase, step = beat["phase"], int(beat["step"])
        return HangReport(reason, rank.number, phase, step, round(seconds, 1), limit)

    def _read_limits(self) -> None:
        if not self._has_changed("config.yaml"):
            return
        path = self._folder / "config.yaml"
        try:
            monitor = yaml.safe_load(path.read_text())["monitor"]
            self._interval = float(monitor["heartbeat"])
            names = {field.name for field in fields(WatchConfig)} & set(monitor["watch"])
            limits = WatchConfig(**{name: monitor["watch"][name] for name in names})
            limits.validate()
            self.limits = limits
        except (OSError, yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._log(f"{path}: monitor.watch cannot be read, so its limits stay: {error!r}")

    def _has_changed(self, name: str) -> bool:
        try:
            status = os.stat(self._folder / name)
        except OSError:
            return False
        version = (status.st_mtime_ns, status.st_size)
        changed = self._file_versions.get(name) != version
        self._file_versions[name] = version
        return changed

    def _find_collapse(self) -> list[HangReport]:
        rows = [r for r in read_table(self._folder / "metrics.csv").rows if "tokens_per_s" in r]
        speeds = [row["tokens_per_s"] for row in rows]
        if len(speeds) < 2 * WINDOW:
            return []
        median, best, limit = statistics.median(speeds), max(speeds[-WINDOW:]), self.limits.collapse
        if not self._is_new("collapse", best < limit * median):
            return []
        reason = (
            f"throughput has collapsed: at most {best:,.0f} tokens/s in the last {WINDOW} logged "
            f"steps, up to step {rows[-1]['step']:.0f}; the run's median is {median:,.0f} "
            f"(limit monitor.watch.collapse = {limit:g} of it)"
        )
        return [HangReport(reason, step=int(rows[-1]["step"]), limit=limit)]

    def _find_dead_gates(self) -> list[HangReport]:
        rows, limit = read_table(self._folder / "selection.csv").rows, self.limits.dead_gate
        reports = []
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
                    f"(limit monitor.watch.dead_gate = {limit:g})"
                )
                reports.append(HangReport(reason, step=step, limit=limit))
        return reports

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
