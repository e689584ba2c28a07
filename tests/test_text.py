"""Text of files: JSON that a diff can show row by row."""

from __future__ import annotations

import json

from nsa.text import row_json


def test_json_has_one_line_per_row() -> None:
    result = {"a": 1, "rows": [{"b": [1, 2]}, {"b": None}], "none": []}
    text = row_json(result)
    assert json.loads(text) == result
    assert text.splitlines()[2:5] == [' "rows": [', '  {"b": [1, 2]},', '  {"b": null}']
