"""Clones with a finished .venv for the real scripts of `launch/`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.clone import make_clone, start, with_real_packages


@pytest.fixture(scope="session")
def concurrent_setups(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A clone that two concurrent calls of setup.sh installed, and the outputs of both."""
    clone = make_clone(tmp_path_factory.mktemp("installed"))
    calls = [start(clone, "setup.sh") for _ in range(2)]
    outputs = ["".join(call.communicate(timeout=120)) for call in calls]
    assert [call.returncode for call in calls] == [0, 0], outputs
    return clone, outputs


@pytest.fixture
def installed_clone(concurrent_setups: tuple[Path, list[str]]) -> Path:
    """A clone with a finished .venv."""
    return concurrent_setups[0]


@pytest.fixture
def real_packages(tmp_path: Path) -> Path:
    """A clone whose .venv is the environment of this test, and whose setup.sh does nothing."""
    return with_real_packages(tmp_path)
