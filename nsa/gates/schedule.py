"""Go/no-go gates of a run and their steps.

    preflight -> sanity -> smoke -> extended -> production

A run that fails a gate stops there.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from nsa.monitor.config import LadderConfig

PREFLIGHT = "preflight"
SANITY_STEP = 1
GATE_NAMES = (PREFLIGHT, "sanity", "smoke", "extended", "production")


@dataclass(frozen=True)
class Gate:
    """A step at which the run is judged."""

    name: str
    step: int


def schedule(config: LadderConfig, total_steps: int) -> list[Gate]:
    """Return the gates of a run of `total_steps`; production is at its last step."""
    gates = [Gate(name, _step(name, config)) for name in ("sanity", "smoke", "extended")]
    gates = [gate for gate in gates if gate.step < total_steps]
    return [*gates, Gate("production", total_steps)]


def _step(name: str, config: LadderConfig) -> int:
    return {"sanity": SANITY_STEP, "smoke": config.smoke, "extended": config.extended}[name]


def until_step(text: str, config: LadderConfig, total_steps: int) -> int:
    """Return the step that `--until` names: a number, or a gate; preflight is 0."""
    name = text.strip().lower()
    if name.isdecimal() and int(name) > 0:
        return min(int(name), total_steps)
    if name not in GATE_NAMES:
        near = get_close_matches(name, GATE_NAMES, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"--until {text}: neither a number of steps above 0 nor a go/no-go gate{hint} "
            f"(choose from {', '.join(GATE_NAMES)})"
        )
    if name == PREFLIGHT:
        return 0
    step = total_steps if name == "production" else _step(name, config)
    if step > total_steps:
        raise ValueError(
            f"--until {name}: this go/no-go gate is at step {step:,}, but the run ends at "
            f"{total_steps:,}; raise --steps, or use --until production"
        )
    return step
