"""Shows the comment on a dataclass's field as its documentation, which it is."""

from __future__ import annotations

import griffe


class FieldComments(griffe.Extension):
    """For fields that have no docstring."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: object) -> None:
        if attr.docstring is None and attr.lineno is not None:
            comment = _behind(attr.lines) or _above(attr)
            if comment:
                attr.docstring = griffe.Docstring(comment, parent=attr)


def _behind(lines: list[str]) -> str:
    return "\n".join(lines).partition("  # ")[2].partition("\n")[0]


def _above(attr: griffe.Attribute) -> str:
    found: list[str] = []
    for line in reversed(attr.lines_collection[attr.filepath][: attr.lineno - 1]):
        if not line.strip().startswith("# "):
            break
        found.insert(0, line.strip().removeprefix("# "))
    return "\n".join(found)
