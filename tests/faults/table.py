"""Writes the table of docs/design/evidence.md from what the tests have seen.

python -m pytest tests/faults --full && python -m tests.faults.table
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.faults.catalogue import FAULTS
from tests.faults.outcomes import Outcome, read

PAGE = Path(__file__).parents[2] / "docs" / "design" / "evidence.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
HEAD = (
    "| fault | what is promised | tried | seconds to the end | steps taken again | exit codes "
    "| bit for bit |\n| --- | --- | ---: | ---: | ---: | --- | --- |\n"
)


def row(fault: str, outcomes: Sequence[Outcome]) -> str:
    """What was seen of one fault; the worst where it was tried often."""
    what, promise = FAULTS[fault]
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    lost = [outcome.lost for outcome in outcomes if outcome.lost is not None]
    codes = sorted({code for outcome in outcomes for code in outcome.codes if code is not None})
    exact = sum(outcome.exact for outcome in outcomes)
    cells = (
        what,
        promise,
        f"{len(outcomes)}×",
        f"{max(seconds):.1f}" if any(seconds) else "–",
        str(max(lost)) if lost else "–",
        ", ".join(map(str, codes)),
        f"{exact} of {len(outcomes)}" if exact else "–",
    )
    return f"| {' | '.join(cells)} |\n"


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each fault of the catalogue; a ValueError where one was not tried."""
    rows = []
    for fault in FAULTS:
        found = [outcome for outcome in outcomes if outcome.fault == fault]
        if not found:
            raise ValueError(f"{fault}: not tried; run pytest tests/faults --full first")
        rows.append(row(fault, found))
    return HEAD + "".join(rows)


def main() -> None:
    """Put the table into the page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + table(list(read())) + END + after)


if __name__ == "__main__":
    main()
