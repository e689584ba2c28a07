"""Fixtures: checkpoints of a real engine on two ranks, saved once for all tests here."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa.checkpoint import universal
from tests.ranks import launch, launch_rows, spawn_ranks

Rows = dict[str, dict[str, Any]]


@contextmanager
def forked_converter() -> Iterator[None]:
    """Let DeepSpeed's converter run in a forked process, without the seconds of its imports."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        program = Path(__file__).with_name("converter.py")
        (forked,) = spawn_ranks(program, *command[3:], ranks=0).started
        code = forked.wait() or 0
        return subprocess.CompletedProcess(command, code, forked.text("out"), forked.text("err"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(universal, "subprocess", SimpleNamespace(run=run, DEVNULL=None))
        yield


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
