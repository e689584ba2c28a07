"""One finding about a machine or its ranks, and how a list of them is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"


@dataclass(frozen=True)
class Check:
    """What was looked at, how it stands, and what to do about it where it is not well."""

    name: str
    status: str  # ok, warn, fail or skip
    detail: str
    fix: str = ""


def lines(checks: Sequence[Check]) -> list[str]:
    """One line a check, aligned; the fix stands below what is not well."""
    width = max((len(check.name) for check in checks), default=0)
    shown = []
    for check in checks:
        shown.append(f"{check.status:<5}{check.name:<{width}}  {check.detail}")
        if check.fix and check.status in (WARN, FAIL):
            shown.append(f"{'':5}{'':{width}}  -> {check.fix}")
    return shown


def verdict(checks: Sequence[Check]) -> bool:
    """Whether a run may start: warnings let it, a failure does not."""
    return all(check.status != FAIL for check in checks)


def failures(checks: Sequence[Check]) -> str:
    """What failed, with the fixes, in one line, for an error message."""
    found = [check for check in checks if check.status == FAIL]
    return "; ".join(
        f"{check.name}: {check.detail}{f' ({check.fix})' if check.fix else ''}" for check in found
    )
