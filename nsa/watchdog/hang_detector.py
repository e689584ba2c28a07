"""Is a run well? Judged by what it has written down, and by clocks that nobody can set."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import yaml

from nsa.monitor.artifacts import read_table
from nsa.monitor.config import WatchConfig
from nsa.monitor.observer import BRANCHES
from nsa.processes import is_alive

# The setting of `monitor.watch` that limits each phase.
LIMIT_OF = {
    "setup": "setup",
    "data": "data",
    "forward": "compute",
    "backward": "compute",
    "step": "compute",
    "idle": "compute",
    "eval": "evaluation",
    "save": "save",
}
LOGGED = 10  # logged steps that a sickness has to last
_PROBE = b"\0" * 4096


@dataclass
class Rank:
    """What is known of a rank: its newest line, when that came, and its process."""

    number: int
    beat: dict[str, Any]
    received: float  # monotonic, of this process
    process: psutil.Process | None  # None: it died young, or runs on another host
    far: bool = False  # it runs on another host

    @property
    def lives(self) -> bool:
        """Whether it is at work; of another host's only its lines tell."""
        if self.far:
            return not self.ended
        return self.process is not None and is_alive(self.process)

    @property
    def ended(self) -> bool:
        """Whether it has said that it ends."""
        return self.beat["event"] == "end"

    def age(self, now: float) -> float:
        """Seconds since its newest line; hosts share no clock, so that there receipt counts."""
        known = not self.far and self.beat["mono"] <= now
        return now - (self.beat["mono"] if known else self.received)


@dataclass(frozen=True)
class Verdict:
    """Why a run should end, or be looked at."""

    reason: str
    rank: int | None = None
    phase: str | None = None
    step: int | None = None
    seconds: float | None = None
    limit: float | None = None


class Judge:
    """Holds a run to the limits in its config.yaml, and to the defaults until that is written."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.limits = WatchConfig()
        self._folder = folder
        self._say = say
        self._interval = 0.0  # between two heartbeats
        self._blind = float("-inf")  # when the folder could last not be written
        self._warned_blind = False
        self._seen: dict[str, tuple[int, int]] = {}
        self._sick: set[str] = set()

    def stall(self, ranks: Mapping[int, Rank], now: float) -> Verdict | None:
        """The first rank that is stuck; a full disk silences ranks and proves nothing.

        `now` is from before their lines were read: that this process was held up counts for nobody.
        """
        self._read_limits()
        running = [rank for rank in ranks.values() if not rank.ended]
        found = [self._judge(rank, running, now) for rank in ranks.values()]
        verdict = next(filter(None, found), None)
        if verdict is not None and not _can_write(self._folder):
            self._blind = time.monotonic()
            if not self._warned_blind:
                self._say(f"{self._folder} cannot be written, so that heartbeats prove nothing")
            self._warned_blind = True
            return None
        return verdict

    def sicknesses(self) -> list[tuple[Verdict, str]]:
        """What begins to ail a run that moves, each with the action for it: warn or halt."""
        found: dict[str, Verdict] = {}
        if self.limits.on_collapse != "ignore" and self._changed("metrics.csv"):
            found |= self._collapse()
        if self.limits.on_dead_gate != "ignore" and self._changed("selection.csv"):
            found |= self._dead_gates()
        return [
            (verdict, self.limits.on_collapse if name == "collapse" else self.limits.on_dead_gate)
            for name, verdict in found.items()
        ]

    def _judge(self, rank: Rank, running: list[Rank], now: float) -> Verdict | None:
        beat, age = rank.beat, min(rank.age(now), now - self._blind)
        phase, name = beat["phase"], f"rank {rank.number}"
        silence = self.limits.silence and max(self.limits.silence, 3 * self._interval)
        if rank.ended:
            limit, seconds = self.limits.compute, age
            what, setting = f"{name} has said its end and does not go", "compute"
        elif silence and age > silence:
            limit, seconds, setting = silence, age, "silence"
            lives = "" if rank.far else ", though its process lives,"
            what = f"{name}{lives} has written nothing in {phase} after step {beat['step']}"
        else:
            # The newest line itself tells how long: a rank may have moved on since, untold.
            seconds = beat["since"] + (0.0 if silence else age)
            setting = LIMIT_OF[phase]
            limit = getattr(self.limits, setting)
            what = f"{name} has been in {phase} after step {beat['step']}"
        if not limit or seconds <= limit:
            return None
        reason = f"{what} for {seconds:.0f} s; monitor.watch.{setting} is {limit:g}"
        longest = max(running, key=lambda other: other.beat["since"] + other.age(now), default=rank)
        if longest is not rank and longest.beat["since"] > beat["since"] + self._interval:
            reason += (
                f"; rank {longest.number} has been in {longest.beat['phase']} for longer still, "
                f"{longest.beat['since']:.0f} s, and may be what it waits for"
            )
        return Verdict(reason, rank.number, phase, int(beat["step"]), round(seconds, 1), limit)

    def _read_limits(self) -> None:
        if not self._changed("config.yaml"):
            return
        try:
            monitor = yaml.safe_load((self._folder / "config.yaml").read_text())["monitor"]
            self._interval = float(monitor["heartbeat"])
            known = {field.name for field in fields(WatchConfig)}
            asked = {name: value for name, value in monitor["watch"].items() if name in known}
            limits = WatchConfig(**asked)
            limits.validate()
            self.limits = limits
        except (OSError, yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._say(f"{self._folder / 'config.yaml'} has no limits that can be read: {error!r}")

    def _changed(self, name: str) -> bool:
        """Whether a file is another than at the last call."""
        try:
            status = os.stat(self._folder / name)
        except OSError:
            return False
        now = (status.st_mtime_ns, status.st_size)
        before, self._seen[name] = self._seen.get(name), now
        return now != before

    def _collapse(self) -> dict[str, Verdict]:
        rows = read_table(self._folder / "metrics.csv").rows
        speeds = [row["tokens_per_s"] for row in rows if "tokens_per_s" in row]
        if not self.limits.collapse or len(speeds) < 2 * LOGGED:
            return {}
        usual, limit = statistics.median(speeds), self.limits.collapse
        fastest = max(speeds[-LOGGED:])
        if not self._begins("collapse", fastest < limit * usual):
            return {}
        step = int(rows[-1]["step"])
        reason = (
            f"throughput has collapsed: at most {fastest:,.0f} tokens/s in the last {LOGGED} "
            f"logged steps, up to step {step}, where {usual:,.0f} are usual"
        )
        return {"collapse": Verdict(reason, step=step, limit=limit)}

    def _dead_gates(self) -> dict[str, Verdict]:
        rows = read_table(self._folder / "selection.csv").rows
        gates: dict[str, dict[int, list[float]]] = {}
        for row in rows:
            for branch in BRANCHES:
                if (mean := row.get(f"gate_{branch}")) is not None:
                    gates.setdefault(branch, {}).setdefault(int(row["step"]), []).append(mean)
        found = {}
        for branch, steps in gates.items():
            means = [statistics.fmean(layers) for _, layers in sorted(steps.items())][-LOGGED:]
            low = len(means) == LOGGED and max(means) < self.limits.dead_gate
            if self._begins(f"gate {branch}", low):
                step = max(steps)
                reason = (
                    f"the gate of branch {branch} is dead: its mean over all layers was at most "
                    f"{max(means):.2g} in the last {LOGGED} logged steps, up to step {step}; "
                    f"monitor.watch.dead_gate is {self.limits.dead_gate:g}"
                )
                found[branch] = Verdict(reason, step=step, limit=self.limits.dead_gate)
        return found

    def _begins(self, name: str, sick: bool) -> bool:
        """Whether this is the first look at an episode: each is told once."""
        begins = sick and name not in self._sick
        (self._sick.add if sick else self._sick.discard)(name)
        return begins


def _can_write(folder: Path) -> bool:
    probe = folder / f".watch.{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(_PROBE)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return True
