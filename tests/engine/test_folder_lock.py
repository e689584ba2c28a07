"""Two runs never write into one folder, and a refused one leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nsa.engine.folder_lock import FolderLock
from tests.ranks import ROOT

HOLD = """
import sys, time
from pathlib import Path
from nsa.engine.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_folder_in_use_is_refused_with_its_owner_until_that_one_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match="is in use by another run") as refused:
            FolderLock(run_dir)
        assert re.search(rf"\(process {owner.pid} on .+, since 20", str(refused.value))
        assert "--run-dir" in str(refused.value)
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    FolderLock(run_dir)


def test_abandoning_leaves_what_was_there_and_removes_what_was_made(tmp_path: Path) -> None:
    FolderLock(tmp_path / "runs/deep/run").abandon()
    assert list(tmp_path.iterdir()) == []
    mine = tmp_path / "runs/mine"
    mine.mkdir(parents=True)
    (mine / "config.yaml").write_text("model: {}\n")
    FolderLock(mine).abandon()
    assert (mine / "config.yaml").read_text() == "model: {}\n"
    other = FolderLock(tmp_path / "runs/other")
    other.abandon()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]
