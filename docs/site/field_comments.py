"""Shows the comment behind a dataclass's field as its documentation, which it is."""

from __future__ import annotations

import griffe


class FieldComments(griffe.Extension):
    """Of each field that has no docstring: what stands behind it."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: object) -> None:
        if attr.docstring is None and attr.lines:
            comment = "\n".join(attr.lines).partition("  # ")[2].partition("\n")[0]
            if comment:
                attr.docstring = griffe.Docstring(comment, parent=attr)
