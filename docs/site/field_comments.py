"""Griffe extension: document a dataclass field by its comment."""

from __future__ import annotations

import griffe


class FieldComments(griffe.Extension):
    """Use the comment on a field's line, or above it, as its docstring if it has none."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: object) -> None:
        if attr.docstring is None and attr.lineno is not None:
            comment = _comment_on_line(attr.lines) or _comment_above(attr)
            if comment:
                attr.docstring = griffe.Docstring(comment, parent=attr)


def _comment_on_line(lines: list[str]) -> str:
    return "\n".join(lines).partition("  # ")[2].partition("\n")[0]


def _comment_above(attr: griffe.Attribute) -> str:
    comment: list[str] = []
    for line in reversed(attr.lines_collection[attr.filepath][: attr.lineno - 1]):
        if not line.strip().startswith("# "):
            break
        comment.insert(0, line.strip().removeprefix("# "))
    return "\n".join(comment)
