"""Go/no-go gates of a run: their steps, their results, and the results' file, `gates.json`.

    preflight -> sanity -> smoke -> extended -> production

A run that fails a gate stops there.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from nsa.atomic_io import atomic_write_text
from nsa.constants import SHORT_RUN
from nsa.monitor.config import LadderConfig
from nsa.untrusted import matches, parse_json, text_or_empty

PREFLIGHT = "preflight"
GATE_NAMES = (PREFLIGHT, "sanity", "smoke", "extended", "production")
FILE_NAME = "gates.json"
_CRITERION = {
    "name": str,
    "ok": (bool, type(None)),
    "value": (float, int, type(None)),
    "limit": str,
    "evidence": str,
}
_SHAPE = {"gate": str, "step": int, "go": bool, "time": str, "criteria": [_CRITERION]}


@dataclass(frozen=True)
class Gate:
    """A step at which the run is judged."""

    name: str
    step: int


def schedule(config: LadderConfig, total_steps: int) -> list[Gate]:
    """Return the gates during a run of `total_steps`; production is at its last step."""
    steps = _gate_steps(config, total_steps)
    gates = [Gate(name, step) for name, step in steps.items() if 0 < step < total_steps]
    return [*gates, Gate("production", total_steps)]


def _gate_steps(config: LadderConfig, total_steps: int) -> dict[str, int]:
    return dict(zip(GATE_NAMES, (0, 1, config.smoke, config.extended, total_steps), strict=True))


def until_step(text: str, config: LadderConfig, total_steps: int) -> int:
    """Return the step that `--until` names: a number, or a gate; preflight is 0."""
    name = text.strip().lower()
    if name.isdecimal() and int(name) > 0:
        return min(int(name), total_steps)
    steps = _gate_steps(config, total_steps)
    if name not in steps:
        raise ValueError(
            f"--until {text}: neither a number of steps above 0 nor a go/no-go gate "
            f"(choose from {', '.join(steps)})"
        )
    step = steps[name]
    if step > total_steps:
        raise ValueError(
            f"--until {name}: this go/no-go gate is at step {step:,}, but the run ends at "
            f"{total_steps:,}; raise --steps, or use --until production"
        )
    return step


@dataclass(frozen=True)
class Criterion:
    """One criterion of a gate; one that was not measured (`ok` None) never fails the gate."""

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
    def of_short_run(self) -> bool:
        """Whether it is the `production` gate of a run too short to measure all its criteria."""
        return self.gate == "production" and self.step < SHORT_RUN

    @property
    def count_text(self) -> str:
        failed, unmeasured = len(self.failed), [x.ok for x in self.criteria].count(None)
        count = f"{len(self.criteria) - failed - unmeasured} criteria met"
        count += f", {failed} failed" if failed else ""
        return count + (f", {unmeasured} not measured" if unmeasured else "")

    @property
    def summary(self) -> str:
        """One line for the console: the decision and what failed."""
        gate, count = f"go/no-go gate {self.gate} at step {self.step:,}", self.count_text
        if self.go:
            steps = f" for {self.step:,} steps" if self.of_short_run else ""
            return f"{gate}: Go{steps} ({count})"
        reasons = []
        for failed in self.failed:
            value = "" if failed.value is None else f" {failed.value:.4g}"
            limit = f" (limit: {failed.limit})" if failed.limit else ""
            reasons.append(f"{failed.name}{value}{limit}: {failed.evidence}")
        return f"{gate}: No-Go ({count}): {'; '.join(reasons)}"


def gate_result(gate: str, step: int, criteria: list[Criterion]) -> GateResult:
    """Return the result of a gate: Go, unless a criterion failed."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    go = all(criterion.ok is not False for criterion in criteria)
    return GateResult(gate, step, go, now, tuple(criteria))


def record_result(run_dir: Path, result: GateResult) -> None:
    """Write the result to `gates.json`; it replaces an earlier result of the same gate."""
    results = [other for other in read_results(run_dir) if other.gate != result.gate] + [result]
    results.sort(key=lambda other: (GATE_NAMES.index(other.gate), other.step))
    text = json.dumps([asdict(other) for other in results], indent=2, allow_nan=False)
    atomic_write_text(run_dir / FILE_NAME, text + "\n")


def read_results(run_dir: Path) -> list[GateResult]:
    """Read the results so far, in the order of the gates; skip unreadable ones."""
    try:
        entries = parse_json(text_or_empty(run_dir / FILE_NAME) or "[]")
    except ValueError:
        return []
    results = []
    for entry in entries if isinstance(entries, list) else ():
        if matches(entry, _SHAPE) and entry["gate"] in GATE_NAMES:
            with contextlib.suppress(TypeError):  # more fields than this version knows
                criteria = tuple(Criterion(**criterion) for criterion in entry["criteria"])
                results.append(GateResult(**{**entry, "criteria": criteria}))
    return results
