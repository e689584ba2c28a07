"""Clones with a finished .venv for the real scripts of `launch/`."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.launch.clone import make_installed_clone
from tests.ranks import ROOT


@pytest.fixture(scope="session")
def installed_clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_installed_clone(tmp_path_factory.mktemp("installed"))


@pytest.fixture
def real_packages(tmp_path: Path) -> Path:
    """A clone whose .venv is the environment of this test, and whose setup.sh does nothing."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / "launch/setup.sh").write_text("")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path
