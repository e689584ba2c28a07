"""Markdown tables."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence

from nsa.untrusted import printable


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table."""
    lines = (header, ("---",) * len(header), *rows)
    return [f"| {' | '.join(plain(cell) for cell in line)} |" for line in lines]


def mean_and_range(values: Sequence[float], form: str) -> str:
    """Format measurements: their mean, and their range if they differ."""
    if not values:
        return "–"
    mean, low, high = (
        format(value, form) for value in (statistics.fmean(values), min(values), max(values))
    )
    return mean if low == high else f"{mean} ({low} to {high})"


def plain(value: object) -> str:
    """Return the value as one line of text: no HTML, links, images or control characters.

    `|`, which would end a cell, becomes `/`.
    """
    text = printable(" ".join(str(value).split())).replace("|", "/")
    text = re.sub(r"[\\\[\]]", r"\\\g<0>", text).replace("<", "&lt;")
    return re.sub(r"(?i)\b(www)\.", r"\1&#46;", text.replace("://", ":&#47;/"))  # no bare links
