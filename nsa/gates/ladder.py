"""Go/no-go gates of a run, in order.

    preflight -> sanity -> smoke -> extended -> production

A run that fails a gate stops there; `gates.json` holds the criteria and their values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from nsa.doctor.check import FAIL, OK, SKIP, WARN, Check
from nsa.gates.criteria import Evidence, judge_criteria
from nsa.gates.result import NAMES, PREFLIGHT, Criterion, GateResult, conclude
from nsa.monitor.config import LadderConfig


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


def judge(gate: Gate, evidence: Evidence, config: LadderConfig) -> GateResult:
    """Return Go or No-Go for the run that `evidence` describes."""
    return conclude(gate.name, gate.step, judge_criteria(gate.name, evidence, config))


def preflight(checks: Iterable[Check]) -> GateResult:
    """Return the result of the node and rank checks; a skipped check is not measured."""
    ok = {OK: True, WARN: True, FAIL: False, SKIP: None}
    criteria = []
    for check in checks:
        evidence = check.detail
        if check.status in (WARN, FAIL):
            evidence = f"{check.status}: {evidence}" + (f"; {check.fix}" if check.fix else "")
        criteria.append(Criterion(check.name, ok[check.status], None, "", evidence))
    return conclude(PREFLIGHT, 0, criteria)
