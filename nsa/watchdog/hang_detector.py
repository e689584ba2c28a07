"""Hang detection from heartbeats, and throughput collapse from metrics.csv.

All of it touches the run's folder, so the supervisor calls it in threads: the disk may hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.atomic_io import atomic_write_text
from nsa.monitor.artifacts import Row, last_beat, read_json, read_table
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


@dataclass(frozen=True)
class FolderState:
    """What a check of the run's folder has found."""

    beats: dict[int, dict[str, Any]]  # last heartbeat of each rank that ever ran
    report: HangReport | None  # why the run has to be halted
    messages: list[str]  # for the log


class HangDetector:
    """Compares a run with the limits in its config.yaml; until that exists, with the defaults."""

    def __init__(self, folder: Path) -> None:
        self.limits = WatchConfig()
        self.folder = folder
        self._disk_ok_since = float("-inf")  # since then, no hang of the disk and no refused write
        self._suspected_at: float | None = None  # since then, each check has found a hanging rank
        self._file_versions: dict[str, tuple[int, int]] = {}
        self._has_collapsed = False  # was reported and has not ended
        self._messages: list[str] = []

    def check(self, running: Mapping[int, int]) -> FolderState:
        """Read the folder and judge the `running` ranks, given with their pids."""
        now = time.monotonic()
        beats = last_beats(self.folder)
        self._record_disk_hang(now)
        own = {n: beat for n, beat in beats.items() if running.get(n) == beat["pid"]}
        report = self.find_hang(own, now)
        if running and (collapse := self.find_collapse()) is not None:
            if self.limits.on_collapse == "halt":
                report = report or collapse
            else:
                self._messages.append(f"WARNING: {collapse.reason}")
        if self._record_disk_hang(now):  # the caller drops late results, so report again
            self._has_collapsed = False
        messages, self._messages = self._messages, []
        return FolderState(beats, report, messages)

    def find_hang(self, beats: Mapping[int, Mapping[str, Any]], now: float) -> HangReport | None:
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

    def find_collapse(self) -> HangReport | None:
        """Report a new collapse of a run that still makes progress."""
        if self.limits.on_collapse == "ignore" or not self._has_changed("metrics.csv"):
            return None
        report = _collapse(read_table(self.folder / "metrics.csv").rows)
        is_new = report is not None and not self._has_collapsed
        self._has_collapsed = report is not None
        return report if is_new else None

    def update_halt(self, changes: Mapping[str, Any]) -> None:
        """Set keys of halt.json and keep the others."""
        path = self.folder / "halt.json"
        atomic_write_text(path, json.dumps({**read_json(path), **changes}, indent=2) + "\n")

    def add_restart(self, entry: Mapping[str, Any]) -> bool:
        """Record a restart in halt.json; return whether the run can be resumed."""
        with contextlib.suppress(OSError):  # a full disk costs only the record
            earlier = read_json(self.folder / "halt.json").get("restarts", [])
            self.update_halt({"restarts": [*earlier, entry]})
        return (self.folder / "config.yaml").exists()  # else a recipe refuses --resume

    def _check_rank(self, rank: int, beat: Mapping[str, Any], now: float) -> HangReport | None:
        """Compare a rank with its limit; time in which the disk hung or was full does not count."""
        written = max(beat["mono"], self._disk_ok_since)
        phase, step, since = beat["phase"], int(beat["step"]), beat["since"]
        silence = self.limits.silence and max(self.limits.silence, 3 * HEARTBEAT_SECONDS)
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
        limit = silence if setting == "silence" else getattr(self.limits, setting)
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
            self._messages.append(
                f"{self.folder} cannot be written ({error.strerror}), so missing heartbeats prove "
                "nothing"
            )
        self._record_disk_hang(start)

    def _record_disk_hang(self, start: float) -> bool:
        """Return whether the disk has hung since `start`: the work took longer than the limit."""
        now = time.monotonic()
        if now - start > LIMIT_SECONDS:
            self._disk_ok_since = now
        return now - start > LIMIT_SECONDS

    def _read_limits(self) -> None:
        path = self.folder / "config.yaml"
        try:
            limits = WatchConfig(**parse_yaml(read_text(path))["monitor"]["watch"])
            limits.validate()
            self.limits = limits
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
            self._messages.append(
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


def _collapse(rows: Sequence[Row]) -> HangReport | None:
    rows = [row for row in rows if "tokens_per_s" in row]
    rates = [row["tokens_per_s"] for row in rows]
    if len(rates) < 2 * WINDOW:
        return None
    median, best, step = statistics.median(rates), max(rates[-WINDOW:]), int(rows[-1]["step"])
    if best >= COLLAPSE * median:
        return None
    return HangReport(
        f"throughput has collapsed: at most {best:,.0f} tokens/s in the last {WINDOW} logged "
        f"steps, up to step {step}; the run's median is {median:,.0f} (limit: {COLLAPSE:g} of it)",
        step=step,
        limit=COLLAPSE,
    )
