"""Text for terminals, messages and Markdown: escapes, tables, errors in one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# Control characters, Unicode's line ends and marks that reorder text, and surrogates.
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, keep: str = "") -> str:
    """Escape control characters, which a terminal would obey, except those in `keep`."""
    return CONTROLS.sub(lambda match: match[0] if match[0] in keep else ascii(match[0])[1:-1], text)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the columns of a table: the first and last to the left, the others to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<", *[">"] * (len(widths) - 2), "<"]
    lines = []
    for row in rows:
        cells = zip(row, sides, widths, strict=True)
        lines.append("  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip())
    return lines


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; without a message, the error's type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def type_and_message(error: BaseException) -> str:
    """Return an error's type and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def as_one_line(error: OSError) -> ValueError:
    """Return the ValueError to show for an error of the file system, with a fix."""
    prefix = "" if error.filename is None else f"{printable(str(error.filename))}: "
    return ValueError(f"{prefix}{error.strerror or error}; check the disk, or use another file")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = (header, ("---",) * len(header), *rows)
    return [f"| {' | '.join(plain(cell) for cell in line)} |" for line in lines]


def plain(value: object) -> str:
    """Return the value as one line of text: no HTML, links, images or control characters.

    `|`, which would end a cell, becomes `/`.
    """
    text = printable(" ".join(str(value).split())).replace("|", "/")
    text = re.sub(r"[\\\[\]]", r"\\\g<0>", text).replace("<", "&lt;")
    text = text.replace("://", ":&#47;/")  # Markdown would make a link of a bare address
    return re.sub(r"(?i)\b(www)\.", r"\1&#46;", text)
