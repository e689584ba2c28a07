"""Clones that the real scripts of `launch/` have set up."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.launch.clone import make_clone, start
from tests.ranks import ROOT


@pytest.fixture(scope="session")
def first_set_ups(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A clone that two calls of setup.sh at the same time have installed, and what they said."""
    clone = make_clone(tmp_path_factory.mktemp("installed"))
    calls = [start(clone, "setup.sh") for _ in range(2)]
    said = ["".join(call.communicate(timeout=120)) for call in calls]
    assert [call.returncode for call in calls] == [0, 0], said
    return clone, said


@pytest.fixture
def installed_clone(first_set_ups: tuple[Path, list[str]]) -> Path:
    """A clone with a finished .venv."""
    return first_set_ups[0]


@pytest.fixture
def real_packages(tmp_path: Path) -> Path:
    """Scripts beside the packages that run this test, and a set-up that has nothing to do."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / "launch/setup.sh").write_text("")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path
