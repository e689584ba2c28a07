"""What happened at each fault that was tried, kept for the table in docs/reliability.md."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path(__file__).parents[2] / ".pytest_cache" / "faults.json"


@dataclass(frozen=True)
class Outcome:
    """One fault, once."""

    fault: str  # a name of the catalogue
    variant: str
    codes: tuple[int | None, ...] = ()  # exit codes
    seconds: float | None = None  # from the fault to the end of all ranks
    lost: int | None = None  # steps that had to be taken again
    exact: bool = False  # the losses and weights in the end were the uninterrupted run's


class Outcomes:
    """Collects them."""

    def __init__(self) -> None:
        self.found: list[Outcome] = []

    def tell(self, fault: str, variant: str, **what: object) -> None:
        """Note what happened."""
        self.found.append(Outcome(fault, variant, **what))  # type: ignore[arg-type]

    def write(self) -> None:
        """Keep this session's, and of earlier ones those faults that it did not try."""
        tried = {(outcome.fault, outcome.variant) for outcome in self.found}
        earlier = [found for found in read() if (found.fault, found.variant) not in tried]
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps([asdict(one) for one in [*earlier, *self.found]], indent=1))


def read() -> Iterable[Outcome]:
    """What was kept."""
    if not FILE.exists():
        return []
    found = json.loads(FILE.read_text())
    return [Outcome(**{**one, "codes": tuple(one["codes"])}) for one in found]
