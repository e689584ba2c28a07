"""Fixtures: checkpoints of a real engine on two ranks, saved once for all tests here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import launch, launch_rows

Rows = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Rows]]:
    """The folder of saving_ranks.py, and for each rank what each of its trials returned."""
    root = tmp_path_factory.mktemp("saved")
    rows = launch_rows(Path(__file__).with_name("saving_ranks.py"), str(root))
    return root, [{row["name"]: row for row in trials} for trials in rows]


@pytest.fixture(scope="session")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of stage_ranks.py: checkpoints of each ZeRO stage, and copies with code."""
    folder = tmp_path_factory.mktemp("stages")
    launch(Path(__file__).with_name("stage_ranks.py"), str(folder))
    return folder
