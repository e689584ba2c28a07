"""The ladder: the gates that a run passes, and Go or No-Go at each, from recorded data alone.

    preflight -> sanity -> smoke -> extended -> production

A run that is judged unfit stops at its gate; what it was judged by stands in `gates.json`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from nsa.atomic_io import atomic_write_text
from nsa.gates import criteria
from nsa.gates.criteria import Criterion
from nsa.monitor.artifacts import last_step, number, ranks, read_text
from nsa.monitor.config import LadderConfig
from nsa.monitor.heartbeat import last_beat

FILE_NAME = "gates.json"
PREFLIGHT = "preflight"
_QUESTIONS = {
    "sanity": criteria.sanity,
    "smoke": criteria.smoke,
    "extended": criteria.extended,
    "production": criteria.production,
}
NAMES = (PREFLIGHT, *_QUESTIONS)
_ASK_AGAIN = 0.05  # seconds between two looks at whether the writers have caught up


@dataclass(frozen=True)
class Gate:
    """Where a run is judged: after so many steps."""

    name: str
    step: int


@dataclass(frozen=True)
class Verdict:
    """What was decided at a gate, and from what."""

    gate: str
    step: int
    go: bool
    time: str
    criteria: tuple[Criterion, ...]

    @property
    def failed(self) -> list[Criterion]:
        return [criterion for criterion in self.criteria if criterion.ok is False]

    @property
    def unmeasured(self) -> list[Criterion]:
        return [criterion for criterion in self.criteria if criterion.ok is None]

    @property
    def summary(self) -> str:
        """One line for the console: the decision, its reasons, and what it doesn't rest on."""
        passed = sum(criterion.ok is True for criterion in self.criteria)
        counted = f"{passed} of {len(self.criteria)} criteria met"
        if self.unmeasured:
            counted += f", {len(self.unmeasured)} not measured"
        if self.go:
            return f"gate {self.gate} at step {self.step:,}: Go ({counted})"
        reasons = "; ".join(_reason(criterion) for criterion in self.failed)
        return f"gate {self.gate} at step {self.step:,}: No-Go ({counted}): {reasons}"


class Check(Protocol):
    """One line of `nsa doctor`."""

    @property
    def name(self) -> str: ...
    @property
    def status(self) -> str: ...  # ok, warn, fail or skip
    @property
    def detail(self) -> str: ...
    @property
    def fix(self) -> str: ...


def ladder(config: LadderConfig, total_steps: int) -> list[Gate]:
    """The gates of a run of so many steps; production stands at its end."""
    early = [Gate(name, getattr(config, name)) for name in ("sanity", "smoke", "extended")]
    return [*(gate for gate in early if gate.step < total_steps), Gate("production", total_steps)]


def until(text: str, config: LadderConfig, total_steps: int) -> int:
    """The step that `--until` names: a number, or a gate; preflight is 0."""
    name = text.strip().lower()
    try:
        step = int(name)
    except ValueError:
        step = 0
        if name not in NAMES:
            near = get_close_matches(name, NAMES, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"--until {text}: not a number of steps, and no gate{hint} "
                f"(choose from {', '.join(NAMES)})"
            ) from None
        if name == PREFLIGHT:
            return 0
        step = total_steps if name == "production" else getattr(config, name)
        if step > total_steps:
            raise ValueError(
                f"--until {name}: that gate stands at step {step:,}, and this run ends at "
                f"{total_steps:,}; give it more --steps, or say --until production"
            ) from None
    if step < 1:
        raise ValueError(f"--until {text}: must be 1 or more, or a gate: {', '.join(NAMES)}")
    return min(step, total_steps)


def judge(run_dir: Path, gate: Gate, config: LadderConfig, *, patience: float = 10.0) -> Verdict:
    """Go or No-Go from the files in `run_dir`, once their writers have written of the gate's step.

    Writers work on threads of their own and may be behind: `patience` seconds are given to them.
    """
    deadline = time.monotonic() + patience
    while not _written(run_dir, gate.step) and time.monotonic() < deadline:
        time.sleep(_ASK_AGAIN)
    earlier = [other.step for other in ladder(config, gate.step) if other.step < gate.step]
    evidence = criteria.gather(run_dir, max(earlier, default=0), gate.step)
    return _verdict(gate, _QUESTIONS[gate.name](evidence, config))


def preflight(checks: Iterable[Check]) -> Verdict:
    """The verdict on a machine: a check that fails is a No-Go, a skipped one is not measured."""
    answers = {"ok": True, "warn": True, "fail": False, "skip": None}
    asked = []
    for check in checks:
        said = (
            f"{check.status}: {check.detail}" if check.status in ("warn", "fail") else check.detail
        )
        if check.fix and check.status in ("warn", "fail"):
            said += f"; {check.fix}"
        asked.append(Criterion(check.name, answers[check.status], None, "", said))
    return _verdict(Gate(PREFLIGHT, 0), asked)


def record(run_dir: Path, verdict: Verdict) -> None:
    """Write the verdict into `gates.json`, in place of an earlier one on the same gate."""
    kept = [other for other in read_gates(run_dir) if other.gate != verdict.gate]
    entries = sorted([*kept, verdict], key=lambda other: (NAMES.index(other.gate), other.step))
    text = json.dumps([asdict(entry) for entry in entries], indent=2, allow_nan=False)
    atomic_write_text(run_dir / FILE_NAME, text + "\n")


def read_gates(run_dir: Path) -> list[Verdict]:
    """The verdicts so far, in the ladder's order; what cannot be read counts as not judged."""
    try:
        entries = json.loads(read_text(run_dir / FILE_NAME) or "[]")
    except (ValueError, RecursionError):
        return []
    found = [_read(entry) for entry in entries] if isinstance(entries, list) else []
    return [verdict for verdict in found if verdict is not None]


def _verdict(gate: Gate, asked: list[Criterion]) -> Verdict:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    go = all(criterion.ok is not False for criterion in asked)
    return Verdict(gate.name, gate.step, go, now, tuple(asked))


def _written(run_dir: Path, step: int) -> bool:
    """Whether all files that are being written tell of `step`; one that isn't there never will."""
    files = [run_dir / f"heartbeat_rank{rank}.jsonl" for rank in ranks(run_dir)]
    beats = [beat for beat in map(last_beat, files) if beat is not None]
    metrics = run_dir / "metrics.csv"
    return (last_step(metrics) >= step or not metrics.exists()) and all(
        beat["step"] >= step for beat in beats
    )


def _reason(criterion: Criterion) -> str:
    value = "" if criterion.value is None else f" {criterion.value:.4g}"
    limit = f" (wanted: {criterion.limit})" if criterion.limit else ""
    return f"{criterion.name}{value}{limit}: {criterion.evidence}"


def _read(entry: Any) -> Verdict | None:
    try:
        asked = tuple(
            Criterion(
                name=str(one["name"]),
                ok=one["ok"] if one["ok"] is None else bool(one["ok"]),
                value=number(one["value"]),
                limit=str(one["limit"]),
                evidence=str(one["evidence"]),
            )
            for one in entry["criteria"]
        )
        verdict = Verdict(
            str(entry["gate"]), int(entry["step"]), bool(entry["go"]), str(entry["time"]), asked
        )
    except (KeyError, TypeError, ValueError):
        return None
    return verdict if verdict.gate in NAMES else None
