"""FolderLock: two runs never write into one folder, and a refused run leaves none behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nsa.engine.run_dir import FolderLock, choose_run_dir
from tests.disks import mounted
from tests.engine.runs import on_one_rank
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


def test_undoing_a_lock_removes_only_what_it_created(tmp_path: Path) -> None:
    FolderLock(tmp_path / "runs/deep/run").undo()
    assert list(tmp_path.iterdir()) == []
    existing = tmp_path / "runs/existing"
    existing.mkdir(parents=True)
    (existing / "config.yaml").write_text("model: {}\n")
    FolderLock(existing).undo()
    assert (existing / "config.yaml").read_text() == "model: {}\n"
    (tmp_path / "runs/empty").mkdir()
    FolderLock(tmp_path / "runs/empty").undo()
    assert list((tmp_path / "runs/empty").iterdir()) == [], "no lone lock"
    (tmp_path / "runs/empty").rmdir()
    FolderLock(tmp_path / "runs/other").undo()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["existing"]


UNUSABLE = {
    "file": "is a file",
    "file/below": "Not a directory",
    "loop": "Too many levels of symbolic links",
    "dangling": "No such file or directory",
    "x" * 300: "File name too long",
    "/proc/x": "No such file or directory",
}


@pytest.fixture
def unusable(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("/proc/nothing")
    return tmp_path


@pytest.mark.parametrize(("name", "reason"), UNUSABLE.items())
def test_an_unusable_folder_is_refused_and_nothing_is_left(
    name: str, reason: str, unusable: Path
) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        FolderLock(choose_run_dir(unusable / name, "m7c", resume=False))
    assert str(refused.value).startswith(f"--run-dir {unusable / name}: ")
    assert len(list(unusable.iterdir())) == 3


def test_resume_takes_the_run_with_the_highest_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="--resume: runs/m7c holds no run"):
        choose_run_dir(None, "m7c", resume=True)
    for name in ("m7c-2", "m7c-10", "m7c-11", "m7c-demo-12"):
        Path("runs", name).mkdir(parents=True)
    for name in ("m7c-2", "m7c-10", "m7c-demo-12"):  # m7c was deleted; m7c-11 holds no run
        Path("runs", name, "config.yaml").touch()
    assert choose_run_dir(None, "m7c", resume=True) == Path("runs/m7c-10")
    assert choose_run_dir(None, "m7c", resume=False) == Path("runs/m7c")


def test_a_read_only_disk_is_refused(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "ro", "tmpfs") as disk:
        for folder in (disk, disk / "runs/new"):
            with pytest.raises(ValueError, match="Read-only file system"):
                FolderLock(folder)


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_an_unusable_folder_is_one_line_and_exit_code_2_also_in_a_dry_run(
    flags: list[str], tmp_path: Path
) -> None:
    result = on_one_rank("m7c.py", "--run-dir=/proc/x", *flags, folder=tmp_path)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        "m7c: --run-dir /proc/x: no files can be written there (No such file or directory); "
        "choose another folder"
    )
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("exists", [False, True])
def test_a_private_folder_is_closed_to_others_and_otherwise_the_umask_decides(
    exists: bool, tmp_path: Path
) -> None:
    before = os.umask(0o022)
    try:
        for name, private, mode in (("a", True, 0o700), ("b", False, 0o755)):
            if exists:
                (tmp_path / name).mkdir()
            FolderLock(tmp_path / name, private=private)
            assert (tmp_path / name).stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)
