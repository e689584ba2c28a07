"""atomic_write_text: files are written completely or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa.atomic_io import atomic_write_text, row_json
from tests.monitor.records import files_no_longer_than


def test_a_failed_atomic_write_keeps_the_old_file_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write_text(path, "old")
    with files_no_longer_than(2), pytest.raises(OSError, match="too large"):
        atomic_write_text(path, "new and longer")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("file", "old")]
    atomic_write_text(path, "new and longer")
    assert path.read_text() == "new and longer"


def test_json_has_one_line_per_row() -> None:
    result = {"a": 1, "rows": [{"b": [1, 2]}, {"b": None}], "none": []}
    text = row_json(result)
    assert json.loads(text) == result
    assert text.splitlines()[2:5] == [' "rows": [', '  {"b": [1, 2]},', '  {"b": null}']
