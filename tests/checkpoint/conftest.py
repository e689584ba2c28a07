"""Fixtures: checkpoints of a real engine on two ranks, saved once for all tests here."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import launch

Rows = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Two small file systems, to fill up and to make read-only; none without root."""
    folders = [tmp_path_factory.mktemp(name) for name in ("full", "read_only")]
    mounted = []
    try:
        for folder in folders if os.geteuid() == 0 else ():
            command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
            if subprocess.run(command, capture_output=True).returncode == 0:
                mounted.append(folder)
        yield mounted if len(mounted) == len(folders) else []
    finally:
        for folder in mounted:
            subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, mounts: list[Path]) -> tuple[Path, list[Rows]]:
    """The folder of saving_ranks.py, and for each rank what each of its trials returned."""
    root = tmp_path_factory.mktemp("saved")
    worker = Path(__file__).with_name("saving_ranks.py")
    output = launch(worker, str(root), *map(str, mounts))
    rows = [[json.loads(line) for line in text.splitlines() if line[:1] == "{"] for text in output]
    return root, [{row["name"]: row for row in trials} for trials in rows]


@pytest.fixture(scope="session")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of stage_ranks.py: checkpoints of each ZeRO stage, and copies with code."""
    folder = tmp_path_factory.mktemp("stages")
    launch(Path(__file__).with_name("stage_ranks.py"), str(folder))
    return folder
