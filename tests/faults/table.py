"""Outcomes of the faults that are tested: the figures in the table of reliability.md.

python -m pytest tests/faults --full && python -m tests.faults.table
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path(__file__).parents[2] / ".pytest_cache" / "faults.json"
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks/reliability.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
# In the order of the table's rows.
FAULTS = (
    *("kill-rank", "kill-any-time", "kill-launched", "kill-launcher", "crash", "wrong-token"),
    *("hang", "stop", "nan-skip", "nan-abort", "damage", "disk-full", "disk-hangs", "read-only"),
    *("clock", "signal", "heartbeat", "two-runs", "json"),
)


@dataclass(frozen=True)
class Outcome:
    """One fault, tested once."""

    fault: str  # a name in FAULTS
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


def figures(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the cells of a row after its words, with the worst of the outcomes."""
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    lost = [outcome.lost for outcome in outcomes if outcome.lost is not None]
    codes = sorted({code for outcome in outcomes for code in outcome.codes if code is not None})
    exact = sum(outcome.exact for outcome in outcomes)
    return [
        f"{len(outcomes)}×",
        f"{max(seconds):.1f}" if any(seconds) else "–",
        str(max(lost)) if lost else "–",
        ", ".join(map(str, codes)),
        f"{exact} of {len(outcomes)}" if exact else "–",
    ]


def main() -> None:
    """Write the figures of all sessions into the page; raise ValueError for an untested fault."""
    before, rest = PAGE.read_text().split(BEGIN)
    table, after = rest.split(END)
    header, line, *rows = table.splitlines()
    lines, outcomes = [header, line], read_outcomes()
    for fault, row in zip(FAULTS, rows, strict=True):
        of_fault = [outcome for outcome in outcomes if outcome.fault == fault]
        if not of_fault:
            raise ValueError(f"{fault}: not tested; run pytest tests/faults --full first")
        words = row.split(" | ")[:2]  # what happens, what is promised
        lines.append(f"{' | '.join([*words, *figures(of_fault)])} |")
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


if __name__ == "__main__":
    main()
