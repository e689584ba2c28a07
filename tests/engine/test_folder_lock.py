"""FolderLock: two runs never write into one folder, and a refused run leaves none behind."""

import errno
import os
import re
import signal
from pathlib import Path

import pytest

from nsa.engine.run_dir import FolderLock, choose_run_dir
from tests.ranks import spawn_ranks, wait_for

HOLD = """
import sys, time
from pathlib import Path
from nsa.engine.run_dir import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_in_use_is_refused_naming_its_owner_until_the_owner_dies(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "hold.py").write_text(HOLD)
    owner = spawn_ranks(tmp_path / "hold.py", str(run_dir), ranks=0)
    wait_for(lambda: owner.text("out"), lambda: owner.text("err"))
    with pytest.raises(ValueError, match="in use by another run") as refused:
        FolderLock(run_dir)
    assert re.search(rf"\(process {owner.pids[0]} on .+, since 20", str(refused.value))
    assert "--run-dir" in str(refused.value)
    owner.end(signal.SIGKILL)
    FolderLock(run_dir)


def test_undoing_a_lock_removes_only_what_it_created(tmp_path: Path) -> None:
    FolderLock(tmp_path / "runs/deep/run").undo()
    assert list(tmp_path.iterdir()) == []
    existing = tmp_path / "runs/existing"
    existing.mkdir(parents=True)
    (existing / "config.yaml").write_text("model: {}\n")
    (existing / ".lock").touch()  # of the run
    (lock := FolderLock(existing)).undo()
    assert (existing / "config.yaml").read_text() == "model: {}\n"
    FolderLock(existing)  # is free, while `lock` exists
    assert lock
    (tmp_path / "runs/empty").mkdir()
    FolderLock(tmp_path / "runs/empty").undo()
    assert list((tmp_path / "runs/empty").iterdir()) == [], "no lone lock"
    (tmp_path / "runs/empty").rmdir()
    FolderLock(tmp_path / "runs/other").undo()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["existing"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file", "is a file"),
        ("file/below", "Not a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("dangling", "No such file or directory"),
        ("x" * 300, "File name too long"),
        ("/proc/x", "No such file or directory"),
        ("/proc", "No such file or directory"),
    ],
)
def test_an_unusable_folder_is_refused_and_undone(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("/proc/nothing")
    with pytest.raises(ValueError, match=reason) as refused:
        FolderLock(choose_run_dir(tmp_path / name, "m7c", resume=False))
    assert str(refused.value).startswith(f"--run-dir {tmp_path / name}: ")
    assert len(list(tmp_path.iterdir())) == 3


def test_resume_takes_the_highest_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="--resume: runs/m7c holds no run"):
        choose_run_dir(None, "m7c", resume=True)
    for name in ("m7c-2", "m7c-10", "m7c-11", "m7c-demo-12"):
        Path("runs", name).mkdir(parents=True)
    for name in ("m7c-2", "m7c-10", "m7c-demo-12"):  # m7c was deleted; m7c-11 holds no run
        Path("runs", name, "config.yaml").touch()
    assert choose_run_dir(None, "m7c", resume=True) == Path("runs/m7c-10")
    assert choose_run_dir(None, "m7c", resume=False) == Path("runs/m7c")
    Path("runs/m7c/checkpoints").mkdir(parents=True)  # a run, too
    assert choose_run_dir(None, "m7c", resume=False) == Path("runs/m7c-3")


@pytest.mark.parametrize(
    ("file", "resume", "problem"),
    [
        ("config.yaml", False, "already holds a run; add --resume"),
        ("checkpoints", False, "already holds a run; add --resume"),
        ("other", True, "holds no run; drop --resume"),
        ("model.safetensors", True, "holds model weights, not a run; .* train.start_from="),
        ("model.safetensors", False, "holds model weights, not a run; .* train.start_from="),
    ],
)
def test_a_run_takes_no_folder_of_something_else(
    file: str, resume: bool, problem: str, tmp_path: Path
) -> None:
    (tmp_path / file).touch()
    with pytest.raises(ValueError, match=f"--run-dir {tmp_path}: {problem}"):
        choose_run_dir(tmp_path, "m7c", resume)


def test_a_lock_that_is_a_symbolic_link_is_refused_and_its_target_kept(tmp_path: Path) -> None:
    (precious := tmp_path / "precious").write_text("content")
    (run_dir := tmp_path / "run").mkdir()
    (run_dir / ".lock").symlink_to(precious)
    with pytest.raises(ValueError, match=r"is a symbolic link, .* remove it"):
        FolderLock(run_dir)
    assert precious.read_text() == "content"


def test_the_lock_names_its_owner_and_no_earlier_one(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 1 on a node with a long name, since 2020\n" * 9)
    FolderLock(tmp_path)
    text = (tmp_path / ".lock").read_text()
    assert text.startswith(f"process {os.getpid()} on {os.uname().nodename}, since 20")
    assert "2020" not in text


def test_a_disk_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as NFS without its lock daemon; no file system here is without."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("nsa.engine.run_dir.fcntl.flock", unsupported)
    with pytest.raises(ValueError, match=r"cannot lock files \(No locks available\)") as refused:
        FolderLock(tmp_path / "run")
    assert "in use" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_folder_whose_name_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    with pytest.raises(ValueError, match=r"--run-dir .*caf\\udce9: is not UTF-8") as refused:
        choose_run_dir(folder, "m7c", resume=False)
    str(refused.value).encode()
