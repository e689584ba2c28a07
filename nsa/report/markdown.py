"""Markdown tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from nsa.untrusted import printable


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table."""
    lines = (header, ("---",) * len(header), *rows)
    return [f"| {' | '.join(plain(cell) for cell in line)} |" for line in lines]


def plain(value: object) -> str:
    """Return the value as one line of text: no HTML, links, images or control characters.

    `|`, which would end a cell, becomes `/`.
    """
    text = printable(" ".join(str(value).split())).replace("|", "/")
    text = re.sub(r"[\\\[\]]", r"\\\g<0>", text).replace("<", "&lt;")
    return re.sub(r"(?i)\b(www)\.", r"\1&#46;", text.replace("://", ":&#47;/"))  # no bare links
