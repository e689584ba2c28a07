"""Outcomes of tested faults, kept for the table in docs/benchmarks/reliability.md."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path(__file__).parents[2] / ".pytest_cache" / "faults.json"


@dataclass(frozen=True)
class Outcome:
    """One fault, tested once."""

    fault: str  # a name in the catalogue
    variant: str
    codes: tuple[int | None, ...] = ()  # exit codes
    seconds: float | None = None  # from the fault to the end of all ranks
    lost: int | None = None  # steps that had to be repeated
    exact: bool = False  # losses and weights equal those of the uninterrupted run


class Outcomes:
    """The outcomes of this session."""

    def __init__(self) -> None:
        self._outcomes: list[Outcome] = []

    def record(self, fault: str, variant: str, **values: object) -> None:
        self._outcomes.append(Outcome(fault, variant, **values))  # type: ignore[arg-type]

    def write(self) -> None:
        """Write these outcomes, and keep earlier ones of faults that this session did not test."""
        tested = {(outcome.fault, outcome.variant) for outcome in self._outcomes}
        earlier = [old for old in read_outcomes() if (old.fault, old.variant) not in tested]
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps([asdict(one) for one in [*earlier, *self._outcomes]], indent=1))


def read_outcomes() -> list[Outcome]:
    """Return the outcomes of all sessions."""
    if not FILE.exists():
        return []
    rows = json.loads(FILE.read_text())
    return [Outcome(**{**row, "codes": tuple(row["codes"])}) for row in rows]
