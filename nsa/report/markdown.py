"""Tables of pages that programs write."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = (header, ("---",) * len(header), *rows)
    return [f"| {' | '.join(plain(cell) for cell in line)} |" for line in lines]


def spread(values: Sequence[float], form: str) -> str:
    """A cell of several measurements: the mean, and from where to where if they differ."""
    if not values:
        return "–"
    mean, least, most = (
        format(value, form) for value in (statistics.fmean(values), min(values), max(values))
    )
    return mean if least == most else f"{mean} ({least} to {most})"


def plain(value: object) -> str:
    """One line that cannot break out of its cell."""
    return " ".join(str(value).split()).replace("|", "/")
