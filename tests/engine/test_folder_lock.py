"""FolderLock: two runs never write into one folder, and a refused run leaves none behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nsa.engine.run_dir import FolderLock
from tests.ranks import ROOT

HOLD = """
import sys
from pathlib import Path
from nsa.engine.run_dir import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_is_refused_naming_its_owner_until_the_owner_dies(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match="in use by another run") as refused:
            FolderLock(run_dir)
        assert re.search(rf"\(process {owner.pid} on .+, since 20", str(refused.value))
        assert "--run-dir" in str(refused.value)
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    FolderLock(run_dir)


def test_abandon_removes_only_what_the_lock_created(tmp_path: Path) -> None:
    FolderLock(tmp_path / "runs/deep/run").abandon()
    assert list(tmp_path.iterdir()) == []
    existing = tmp_path / "runs/existing"
    existing.mkdir(parents=True)
    (existing / "config.yaml").write_text("model: {}\n")
    FolderLock(existing).abandon()
    assert (existing / "config.yaml").read_text() == "model: {}\n"
    FolderLock(tmp_path / "runs/other").abandon()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["existing"]
