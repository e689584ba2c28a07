"""Go/no-go gates of a run, in order, and `gates.json`, which holds their results.

    preflight -> sanity -> smoke -> extended -> production

A run that fails a gate stops there.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from difflib import get_close_matches
from pathlib import Path

from nsa.atomic_io import atomic_write_text
from nsa.monitor.artifacts import number, try_read_text
from nsa.monitor.config import LadderConfig
from nsa.untrusted import parse_json

FILE_NAME = "gates.json"
PREFLIGHT = "preflight"
NAMES = (PREFLIGHT, "sanity", "smoke", "extended", "production")


@dataclass(frozen=True)
class Gate:
    """A step at which the run is judged."""

    name: str
    step: int
    since: int = 0  # step of the previous gate; speed is judged from there on


def ladder(config: LadderConfig, total_steps: int) -> list[Gate]:
    """Return the gates of a run of `total_steps`; production is at its last step."""
    early = {name: getattr(config, name) for name in ("sanity", "smoke", "extended")}
    steps = {name: step for name, step in early.items() if step < total_steps}
    steps["production"] = total_steps
    return [
        Gate(name, step, since)
        for (name, step), since in zip(steps.items(), (0, *steps.values()), strict=False)
    ]


def until(text: str, config: LadderConfig, total_steps: int) -> int:
    """Return the step that `--until` names: a number, or a gate; preflight is 0."""
    name = text.strip().lower()
    if name.isdecimal() and int(name) > 0:
        return min(int(name), total_steps)
    if name not in NAMES:
        near = get_close_matches(name, NAMES, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"--until {text}: neither a number of steps above 0 nor a go/no-go gate{hint} "
            f"(choose from {', '.join(NAMES)})"
        )
    if name == PREFLIGHT:
        return 0
    step: int = total_steps if name == "production" else getattr(config, name)
    if step > total_steps:
        raise ValueError(
            f"--until {name}: this go/no-go gate is at step {step:,}, but the run ends at "
            f"{total_steps:,}; raise --steps, or use --until production"
        )
    return step


@dataclass(frozen=True)
class Criterion:
    """One criterion of a gate; `ok` None: not measured, which never fails a gate."""

    name: str
    ok: bool | None
    value: float | None
    limit: str  # "at most 2"
    evidence: str  # where the value comes from, or why it was not measured


@dataclass(frozen=True)
class GateResult:
    """Decision at a gate, Go or No-Go, with all criteria."""

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
        """One line for the console: the decision and what failed."""
        passed = sum(criterion.ok is True for criterion in self.criteria)
        count = f"{passed} of {len(self.criteria)} criteria met"
        if self.unmeasured:
            count += f", {len(self.unmeasured)} not measured"
        gate = f"go/no-go gate {self.gate} at step {self.step:,}"
        if self.go:
            return f"{gate}: Go ({count})"
        reasons = []
        for failed in self.failed:
            value = "" if failed.value is None else f" {failed.value:.4g}"
            limit = f" (limit: {failed.limit})" if failed.limit else ""
            reasons.append(f"{failed.name}{value}{limit}: {failed.evidence}")
        return f"{gate}: No-Go ({count}): {'; '.join(reasons)}"


def conclude(gate: str, step: int, criteria: list[Criterion]) -> GateResult:
    """Return a Go unless a criterion failed."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    go = all(criterion.ok is not False for criterion in criteria)
    return GateResult(gate, step, go, now, tuple(criteria))


def record(run_dir: Path, result: GateResult) -> None:
    """Write the result to `gates.json`; it replaces an earlier result of the same gate."""
    results = [other for other in read_gates(run_dir) if other.gate != result.gate] + [result]
    results.sort(key=lambda other: (NAMES.index(other.gate), other.step))
    text = json.dumps([asdict(other) for other in results], indent=2, allow_nan=False)
    atomic_write_text(run_dir / FILE_NAME, text + "\n")


def read_gates(run_dir: Path) -> list[GateResult]:
    """Read the results so far, in the order of the gates; skip unreadable ones."""
    try:
        entries = parse_json(try_read_text(run_dir / FILE_NAME) or "[]")
    except ValueError:
        return []
    results = []
    for entry in entries if isinstance(entries, list) else ():
        with contextlib.suppress(KeyError, TypeError):
            criteria = tuple(Criterion(**criterion) for criterion in entry["criteria"])
            result = GateResult(**{**entry, "criteria": criteria})
            if _is_sound(result):
                results.append(result)
    return results


def _is_sound(result: GateResult) -> bool:
    """Return whether the values have the types that a report can format."""
    return (
        result.gate in NAMES
        and type(result.step) is int
        and type(result.go) is bool
        and all(
            type(criterion.ok) in (bool, type(None))
            and (criterion.value is None or number(criterion.value) is not None)
            for criterion in result.criteria
        )
    )
