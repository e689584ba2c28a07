"""Writes the table of docs/benchmarks/reliability.md from the outcomes of the tests.

python -m pytest tests/faults --full && python -m tests.faults.table
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.faults.catalogue import FAULTS
from tests.faults.outcomes import Outcome, read_outcomes

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks/reliability.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
HEAD = (
    "| fault | promise | tested | seconds to the end | steps repeated | exit codes "
    "| bit-exact |\n| --- | --- | ---: | ---: | ---: | --- | --- |\n"
)


def row(fault: str, outcomes: Sequence[Outcome]) -> str:
    """Return the row of one fault, with the worst of its outcomes."""
    description, promise = FAULTS[fault]
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    lost = [outcome.lost for outcome in outcomes if outcome.lost is not None]
    codes = sorted({code for outcome in outcomes for code in outcome.codes if code is not None})
    exact = sum(outcome.exact for outcome in outcomes)
    cells = (
        description,
        promise,
        f"{len(outcomes)}×",
        f"{max(seconds):.1f}" if any(seconds) else "–",
        str(max(lost)) if lost else "–",
        ", ".join(map(str, codes)),
        f"{exact} of {len(outcomes)}" if exact else "–",
    )
    return f"| {' | '.join(cells)} |\n"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table; raise ValueError if a fault of the catalogue was not tested."""
    rows = []
    for fault in FAULTS:
        of_fault = [outcome for outcome in outcomes if outcome.fault == fault]
        if not of_fault:
            raise ValueError(f"{fault}: not tested; run pytest tests/faults --full first")
        rows.append(row(fault, of_fault))
    return HEAD + "".join(rows)


def main() -> None:
    """Write the table into the page."""
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + table(read_outcomes()) + END + after)


if __name__ == "__main__":
    main()
