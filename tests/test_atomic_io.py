"""Files and folders are written completely or not at all."""

import errno
import os
from pathlib import Path

import pytest

from nsa.atomic_io import append, atomic_write_text, draft_folder, fsync_dir, no_symlink
from nsa.system import with_timeout
from tests.disks import files_no_longer_than
from tests.ranks import PATIENCE


def test_a_failed_atomic_write_keeps_the_old_file_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write_text(path, "old")
    with files_no_longer_than(2), pytest.raises(OSError, match="too large"):
        atomic_write_text(path, "new and longer")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("file", "old")]
    atomic_write_text(path, "new and longer")
    assert path.read_text() == "new and longer"


def test_the_content_is_on_disk_before_the_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "file", list[tuple[str, int, str]]()
    path.write_text("old")

    def fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        synced.append((name, os.fstat(descriptor).st_size, path.read_text()))

    monkeypatch.setattr(os, "fsync", fsync)
    atomic_write_text(path, "new and longer")
    assert synced == [(f".file.{os.getpid()}", len("new and longer"), "old")]


def test_missing_folders_are_created(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "a/b/file", "text")
    for line in ("one\n", "two\n"):
        append(tmp_path / "c/d/table", line, header="header\n")
    with draft_folder(tmp_path / "e/f/folder"):
        pass
    assert (tmp_path / "a/b/file").read_text() == "text"
    assert (tmp_path / "c/d/table").read_text() == "header\none\ntwo\n"
    assert (tmp_path / "e/f/folder").is_dir()


@pytest.mark.parametrize(("code", "ignored"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_folder_that_cannot_be_synced_is_an_error_unless_its_file_system_never_can(
    code: int, ignored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    open_files = os.listdir("/proc/self/fd")
    if ignored:
        fsync_dir(tmp_path)
    else:
        with pytest.raises(OSError, match="Input/output error"):
            fsync_dir(tmp_path)
    assert synced == [str(tmp_path)]
    assert os.listdir("/proc/self/fd") == open_files, "the folder is closed"


def test_no_file_is_written_through_a_symbolic_link_and_no_pipe_blocks(tmp_path: Path) -> None:
    (target := tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / f".file.{os.getpid()}").symlink_to(target)  # the draft's name can be guessed
    with pytest.raises(OSError, match="is a symbolic link, whose target would be written"):
        no_symlink(str(tmp_path / "link"), os.O_WRONLY)
    with pytest.raises(OSError, match="is a symbolic link"):
        atomic_write_text(tmp_path / "file", "new")
    assert target.read_text() == "precious"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):  # it has no reader
        with_timeout(PATIENCE, lambda: no_symlink(str(tmp_path / "pipe"), os.O_WRONLY))
    with open(tmp_path / "new", "w", opener=no_symlink) as file:
        file.write("text")
    assert (tmp_path / "new").read_text() == "text"
    (tmp_path / "other").write_text("text")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_all_of_a_folder_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, synced = tmp_path / "new", list[str]()

    def fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        synced.append(f"{name}, {'published' if to.exists() else 'draft'}")

    monkeypatch.setattr(os, "fsync", fsync)
    with draft_folder(to) as draft:
        (draft / "inner").mkdir()
        (draft / "inner/file").touch()
    names = ("file", f".new.{os.getpid()}", "inner")
    assert synced == [*(f"{name}, draft" for name in names), f"{tmp_path.name}, published"]
    assert (to / "inner/file").exists()
    with pytest.raises(OSError, match="not empty"), draft_folder(to):
        pass
    assert (to / "inner/file").exists(), "another process was first"
    with pytest.raises(ZeroDivisionError), draft_folder(tmp_path / "other"):
        _ = 1 // 0
    assert os.listdir(tmp_path) == ["new"]
