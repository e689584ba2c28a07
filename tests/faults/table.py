"""The faults that are tested, their outcomes, and the table of docs/benchmarks/reliability.md.

python -m pytest tests/faults --full && python -m tests.faults.table
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path(__file__).parents[2] / ".pytest_cache" / "faults.json"
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks/reliability.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
HEAD = (
    "| fault | promise | tested | seconds to the end | steps repeated | exit codes "
    "| bit-exact |\n| --- | --- | ---: | ---: | ---: | --- | --- |\n"
)


EXACT = "resumes exactly."
RESUMABLE = f"Exit code 1; {EXACT}"
UNAFFECTED = "Not affected."

# Name of the fault: (what happens, what is promised).
FAULTS: dict[str, tuple[str, str]] = {
    "kill-rank": ("`kill -9` of one rank, in each phase and during a save", RESUMABLE),
    "kill-any-time": ("`kill -9` of one rank or all, at a random moment", RESUMABLE),
    "kill-launched": (
        "`kill -9` of a rank under `nsa watch --restart` and DeepSpeed's launcher",
        "Restarted from the newest checkpoint; exit code 0.",
    ),
    "kill-launcher": (
        "`kill -9` of DeepSpeed's launcher",
        f"Its ranks finish the step, save and exit; {EXACT}",
    ),
    "crash": ("an exception on one rank", f"Exit code 1, that rank's traceback; {EXACT}"),
    "wrong-token": ("a token outside the vocabulary, on one rank", RESUMABLE),
    "hang": (
        "a rank that hangs: in the loader, in forward, before a collective",
        f"`nsa watch` ends it, keeps its stacks and logs where each rank was; {EXACT}",
    ),
    "stop": ("a rank that is stopped (`kill -STOP`), all of its threads", "As for a hang."),
    "nan-skip": (
        "a NaN or inf loss or gradient on one rank, `train.on_bad_step=skip`",
        "All ranks skip the step and log it; the run finishes.",
    ),
    "nan-abort": (
        "the same, `train.on_bad_step=abort`",
        "Exit code 3 and a checkpoint; resumes as if it had skipped the step.",
    ),
    "damage": (
        "each file of the newest checkpoint truncated, with a bit flipped, deleted",
        f"The file is named, the checkpoint before it used; {EXACT}",
    ),
    "disk-full": (
        "a disk that fills up during training",
        "Training continues and logs what was not saved; the earlier checkpoint stays.",
    ),
    "disk-hangs": (
        "a disk that hangs (`fsfreeze`) for longer than the watchdog's limits",
        "The run waits, `nsa watch` reports it; no step or row is lost.",
    ),
    "read-only": ("a disk that turns read-only during training", "As for a full disk."),
    "clock": ("a clock that jumps an hour back or forward, on one rank", UNAFFECTED),
    "signal": (
        "SIGTERM or SIGINT in each phase, to one rank or all",
        f"The step is finished and saved, exit code 0; {EXACT}",
    ),
    "heartbeat": ("garbage in a rank's heartbeat file", UNAFFECTED),
    "two-runs": ("a second run in the same folder", "Refused; the first continues."),
    "json": ("each kind of mistake in DeepSpeed's JSON", "Refused."),
}


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
