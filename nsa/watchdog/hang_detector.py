"""Hang detection from heartbeats, and throughput collapse from metrics.csv.

All of it touches the run's folder, so the supervisor calls it in threads: the disk may hang.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.monitor.artifacts import last_beat, read_table
from nsa.monitor.config import HEARTBEAT_SECONDS, WatchConfig
from nsa.untrusted import parse_yaml, read_text

# Phase of a heartbeat -> the setting of `monitor.watch` that limits it; the others: `compute`.
LIMIT_OF_PHASE = {"setup": "setup", "eval": "save", "save": "save"}
WINDOW = 10  # logged steps that a collapse has to last
COLLAPSE = 0.2  # of the run's median tokens/s
LIMIT_SECONDS = 5.0  # until a read or write of the run's folder counts as hanging
# A hang must last this long while the disk takes writes: heartbeats that it held up arrive first.
CONFIRM_SECONDS = 2.0


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
    """Compares a run with the limits in its config.yaml; until that exists, with the defaults."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.beats: dict[int, dict[str, Any]] = {}  # last heartbeat of each rank that ever ran
        self.messages: list[str] = []  # for the log
        self._limits = WatchConfig()
        self._disk_ok_since = float("-inf")  # since then, no hang of the disk and no refused write
        self._suspected_at: float | None = None  # since then, each check has found a hanging rank
        self._file_versions: dict[str, tuple[int, int]] = {}
        self._has_warned = False  # of a collapse that has not ended

    def check(self, running: Mapping[int, int]) -> HangReport | None:
        """Read the folder; return why to halt the `running` ranks, given with their pids."""
        now = time.monotonic()
        self.beats = last_beats(self.folder)
        self._record_disk_hang(now)
        own = {rank: beat for rank, beat in self.beats.items() if running.get(rank) == beat["pid"]}
        report = self._find_hang(own, now)
        collapse = self._find_collapse() if running else None
        if collapse is not None and self._limits.on_collapse == "halt":
            report = report or collapse
        elif collapse is not None:
            self.messages.append(f"WARNING: {collapse.reason}")
        self._record_disk_hang(now)
        return report

    def _find_hang(self, beats: Mapping[int, Mapping[str, Any]], now: float) -> HangReport | None:
        """Report the rank that is above its limit for longest, unless the disk takes no writes.

        `beats`: the last heartbeats; `now`: the time before they were read, so that a slow read
        does not count as silence. A disk that has just hung or been full holds old heartbeats: a
        hang is reported only if it is still there after CONFIRM_SECONDS of successful writes.
        """
        if self._has_changed("config.yaml"):
            self._read_limits()
        reports = [self._check_rank(rank, beat, now) for rank, beat in beats.items()]
        report = max(filter(None, reports), key=lambda report: report.seconds or 0, default=None)
        late = min((beat["mono"] for beat in beats.values()), default=now)
        if report is not None or now - late > 3 * HEARTBEAT_SECONDS:
            self._probe_write()
        if report is None or self._disk_ok_since > now:
            self._suspected_at = None
            return None
        self._suspected_at = self._suspected_at or now
        return report if now - self._suspected_at >= CONFIRM_SECONDS else None

    def _check_rank(self, rank: int, beat: Mapping[str, Any], now: float) -> HangReport | None:
        """Compare a rank with its limit; time in which the disk hung or was full does not count."""
        written = max(beat["mono"], self._disk_ok_since)
        phase, step, since = beat["phase"], int(beat["step"]), beat["since"]
        silence = self._limits.silence and max(self._limits.silence, 3 * HEARTBEAT_SECONDS)
        setting, seconds, detail = "compute", now - written, ""
        if beat["event"] == "end":
            reason = f"rank {rank} has written its last heartbeat but not exited"
        elif silence and seconds > silence:
            setting, reason = "silence", f"no heartbeat from rank {rank}"
            detail = f", in {phase} after step {step}; its process is alive"
        else:
            setting = LIMIT_OF_PHASE.get(phase, "compute")
            # With `silence` on, a rank may have moved on since its last heartbeat.
            until = beat["mono"] if silence else now
            seconds = until - max(beat["mono"] - since, self._disk_ok_since)
            reason = f"rank {rank} has been in {phase} after step {step}"
        limit = silence if setting == "silence" else getattr(self._limits, setting)
        if not limit or seconds <= limit:
            return None
        reason += f" for {seconds:.0f} s (limit monitor.watch.{setting} = {limit:g}){detail}"
        return HangReport(reason, rank, phase, step, round(seconds, 1), limit)

    def _probe_write(self) -> None:
        """Try to write one block: a disk that hangs or is full takes no heartbeats either."""
        start = time.monotonic()
        try:
            with tempfile.TemporaryFile(buffering=0, dir=self.folder) as file:
                file.write(bytes(4096))
                os.fsync(file.fileno())
        except OSError as error:
            self._disk_ok_since = time.monotonic()
            self.messages.append(
                f"{self.folder} cannot be written ({error.strerror}), so missing heartbeats prove "
                "nothing"
            )
        self._record_disk_hang(start)

    def _record_disk_hang(self, start: float) -> None:
        """Note whether the disk has hung since `start`: the work took longer than the limit."""
        if (now := time.monotonic()) - start > LIMIT_SECONDS:
            self._disk_ok_since = now

    def _find_collapse(self) -> HangReport | None:
        """Report the collapse of a run that still makes progress; warn of each collapse once."""
        if self._limits.on_collapse == "ignore" or not self._has_changed("metrics.csv"):
            return None
        rows = read_table(self.folder / "metrics.csv").rows
        rows = [row for row in rows if "tokens_per_s" in row]
        if len(rows) < 2 * WINDOW:
            return None
        rates = [row["tokens_per_s"] for row in rows]
        median, best = statistics.median(rates), max(rates[-WINDOW:])
        collapsed, warned = best < COLLAPSE * median, self._has_warned
        self._has_warned = collapsed and self._limits.on_collapse == "warn"
        if not collapsed or warned:
            return None
        step = int(rows[-1]["step"])
        reason = (
            f"throughput has collapsed: at most {best:,.0f} tokens/s in the last {WINDOW} logged "
            f"steps, up to step {step}; the run's median is {median:,.0f} (limit: {COLLAPSE:g} of "
            "it)"
        )
        return HangReport(reason, step=step, limit=COLLAPSE)

    def _read_limits(self) -> None:
        path = self.folder / "config.yaml"
        try:
            limits = WatchConfig(**parse_yaml(read_text(path))["monitor"]["watch"])
            limits.validate()
            self._limits = limits
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
            self.messages.append(
                f"{path}: monitor.watch cannot be read, so its limits stay: {error!r}"
            )

    def _has_changed(self, name: str) -> bool:
        try:
            status = os.stat(self.folder / name)
        except OSError:
            return False
        version = (status.st_mtime_ns, status.st_size)
        changed = self._file_versions.get(name) != version
        self._file_versions[name] = version
        return changed


def last_beats(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the last heartbeat of each rank, by rank."""
    beats = {}
    for path in folder.glob("heartbeat_rank*.jsonl"):
        rank = path.stem.removeprefix("heartbeat_rank")
        if rank.isdecimal() and (beat := last_beat(path)) is not None:
            beats[int(rank)] = beat
    return dict(sorted(beats.items()))
