"""Hang detection from heartbeats, and throughput collapse from metrics.csv.

Every check reads the run's folder, whose disk may hang, so the supervisor runs checks in a thread.
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
DISK_LIMIT_SECONDS = 10.0  # until a read or write of the run's folder counts as hanging
# A hang is checked again after this long, in which heartbeats that the disk delayed arrive.
CONFIRM_SECONDS = HEARTBEAT_SECONDS + 1


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
        self._disk_failed_at = float("-inf")  # when the disk last hung or refused a write
        self._file_versions: dict[str, tuple[int, int]] = {}
        self._has_warned = False  # of a collapse

    def check(self, running: Mapping[int, int]) -> HangReport | None:
        """Read the folder; return why to halt the run. `running`: pids of the running ranks."""
        start = time.monotonic()
        if self._has_changed("config.yaml"):
            self._read_limits()
        collapse = self._find_collapse() if running else None
        report = self._find_hang(running)
        beats = [self.beats[rank]["mono"] for rank in running if rank in self.beats]
        is_late = start - min(beats, default=start) > 3 * HEARTBEAT_SECONDS
        if report is not None or is_late:  # the disk may be the cause
            self._write_probe()
        if time.monotonic() - start > DISK_LIMIT_SECONDS:
            self._disk_failed_at = time.monotonic()
        if report is not None:
            time.sleep(CONFIRM_SECONDS)
            report = self._find_hang(running)
        if collapse is not None and self._limits.on_collapse == "warn":
            if not self._has_warned:
                self.messages.append(f"WARNING: {collapse.reason}")
            self._has_warned, collapse = True, None
        return report or collapse

    def _find_hang(self, running: Mapping[int, int]) -> HangReport | None:
        """Read the heartbeats; report the rank that is above its limit for longest."""
        now = time.monotonic()  # before the read: a slow read is no silence of a rank
        self.beats = last_beats(self.folder)
        reports = [
            self._check_rank(rank, beat, now)
            for rank, beat in self.beats.items()
            if running.get(rank) == beat["pid"]
        ]
        return max(filter(None, reports), key=lambda report: report.seconds or 0, default=None)

    def _check_rank(self, rank: int, beat: Mapping[str, Any], now: float) -> HangReport | None:
        """Compare a rank with its limit; time in which the disk hung or was full does not count."""
        phase, step = beat["phase"], int(beat["step"])
        seconds = now - max(beat["mono"], self._disk_failed_at)  # without a heartbeat
        silence = max(self._limits.silence, 3 * HEARTBEAT_SECONDS)
        detail = ""
        if beat["event"] == "end":
            setting, limit = "compute", self._limits.compute
            reason = f"rank {rank} has written its last heartbeat but not exited"
        elif self._limits.silence and seconds > silence:  # 0: no limit
            setting, limit = "silence", silence
            reason = f"no heartbeat from rank {rank}"
            detail = f", in {phase} after step {step}; its process is alive"
        else:
            setting = LIMIT_OF_PHASE.get(phase, "compute")
            limit = getattr(self._limits, setting)
            seconds = min(beat["since"], beat["mono"] - self._disk_failed_at)  # in this phase
            reason = f"rank {rank} has been in {phase} after step {step}"
        if not limit or seconds <= limit:
            return None
        reason += f" for {seconds:.0f} s (limit monitor.watch.{setting} = {limit:g}){detail}"
        return HangReport(reason, rank, phase, step, round(seconds, 1), limit)

    def _write_probe(self) -> None:
        """Write one block: a disk that hangs or is full takes no heartbeats either."""
        try:
            with tempfile.TemporaryFile(buffering=0, dir=self.folder) as file:
                file.write(bytes(4096))
                os.fsync(file.fileno())
        except OSError as error:
            self._disk_failed_at = time.monotonic()
            self.messages.append(
                f"{self.folder} cannot be written ({error.strerror}), so missing heartbeats prove "
                "nothing"
            )

    def _find_collapse(self) -> HangReport | None:
        """Report the collapse of a run that still makes progress."""
        if self._limits.on_collapse == "ignore" or not self._has_changed("metrics.csv"):
            return None
        rows = read_table(self.folder / "metrics.csv").rows
        rates = [row["tokens_per_s"] for row in rows if "tokens_per_s" in row]
        if len(rates) < 2 * WINDOW:
            return None
        median, best = statistics.median(rates), max(rates[-WINDOW:])
        if best >= COLLAPSE * median:
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
    beats = {}
    for path in folder.glob("heartbeat_rank*.jsonl"):
        rank = path.stem.removeprefix("heartbeat_rank")
        if rank.isdecimal() and (beat := last_beat(path)) is not None:
            beats[int(rank)] = beat
    return dict(sorted(beats.items()))
