"""`Check`: the result of one node or rank check, and the text of a list of checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    status: str  # ok, warn, fail or skip
    detail: str
    fix: str = ""


def lines(checks: Sequence[Check]) -> list[str]:
    """Return an aligned line per check, with the fix below each warning and failure."""
    width = max((len(check.name) for check in checks), default=0)
    texts = []
    for check in checks:
        texts.append(f"{check.status:<5}{check.name:<{width}}  {check.detail}")
        if check.fix and check.status in (WARN, FAIL):
            texts.append(f"{'':5}{'':{width}}  -> {check.fix}")
    return texts


def passed(checks: Sequence[Check]) -> bool:
    """Return whether a run may start; warnings do not prevent it."""
    return all(check.status != FAIL for check in checks)


def failures(checks: Sequence[Check]) -> str:
    """Return all failures with their fixes in one line, for an error message."""
    return "; ".join(
        f"{check.name}: {check.detail}{f' ({check.fix})' if check.fix else ''}"
        for check in checks
        if check.status == FAIL
    )
