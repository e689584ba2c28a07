"""Clones with a finished .venv for the real scripts of `launch/`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.clone import make_installed_clone, with_real_packages


@pytest.fixture(scope="session")
def installed_clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with a finished .venv."""
    return make_installed_clone(tmp_path_factory.mktemp("installed"))


@pytest.fixture
def real_packages(tmp_path: Path) -> Path:
    """A clone whose .venv is the environment of this test, and whose setup.sh does nothing."""
    return with_real_packages(tmp_path)
