"""Fixtures: sources of JSON lines, in a file and in a pipe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.texts import texts, write_lines


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write_lines(tmp_path / "a.jsonl", texts(200))


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """A source that hangs after what was written into it."""
    path = tmp_path / "slow.jsonl"
    os.mkfifo(path)
    with open(os.open(path, os.O_RDWR), "wb") as writer:
        yield str(path), writer
