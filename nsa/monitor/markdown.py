"""Tables of pages that programs write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = (header, ("---",) * len(header), *rows)
    return [f"| {' | '.join(plain(cell) for cell in line)} |" for line in lines]


def plain(value: object) -> str:
    """One line that cannot break out of its cell."""
    return " ".join(str(value).split()).replace("|", "/")
