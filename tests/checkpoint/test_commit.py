"""Atomic commit: killed before every file change; and pruning."""

import errno
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nsa.checkpoint.commit import (
    commit,
    draft_of,
    explain_write_errors,
    find_problem,
    list_checkpoints,
    new_draft,
    newest_valid,
    prune,
    remove_drafts,
    trial_commit,
    write_part,
)

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


def save(folder: Path, step: int, *, keep: int = 0) -> Path:
    """Save and prune as two ranks do, with small stand-ins for DeepSpeed's files."""
    draft = new_draft(folder, step)
    for rank in (0, 1):
        names = [f"shard{rank}.pt", f"rng_rank{rank}.pt", *["state.json"] * (rank == 0)]
        for name in names:
            (draft / name).write_text(f"{name} of step {step}\n" * 100)
        write_part(draft, rank, names)
    path = commit(folder, step, 2, {})
    prune(folder, keep)
    return path


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step")) for path in folder.glob("step*"))


def killed_before(change: int, folder: Path, work: Callable[[], object]) -> int:
    """Run `work` in a process that is killed before its change number `change` to `folder`.

    Return 0, or minus the signal that killed it.
    """
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    changes = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal changes
        if event in CHANGES and str(arguments[0]).startswith(str(folder)):
            changes += 1
            if changes == change:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("exists", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_kill_at_any_moment_leaves_a_valid_checkpoint_and_the_next_run_cleans_up(
    tmp_path: Path, exists: bool
) -> None:
    """With `exists`, a damaged step 6 is on disk, which a resumed run saves again."""
    before = tmp_path / "before"
    save(before, 3)
    if exists:
        (save(before, 6) / "shard1.pt").unlink()
    newest, change, code = [], 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        change += 1
        folder = Path(shutil.copytree(before, tmp_path / str(change)))
        code = killed_before(change, folder, lambda folder=folder: save(folder, 6, keep=1))
        path, notes = newest_valid(folder)
        assert path is not None, f"killed before change {change}: {notes}"
        damaged = [other for other in list_checkpoints(folder) if find_problem(other)]
        assert exists or damaged == [], "an unfinished checkpoint has its final name"
        newest.append(path.name)
        remove_drafts(folder)  # what the next run does first
        names = {item.name for item in folder.iterdir()}
        assert names <= {"latest", "step00000003", "step00000006"}
        if change % 6 == 0:  # every sixth, to save time
            assert save(folder, 9) == newest_valid(folder)[0]
            assert (folder / "latest").read_text() == "step00000009"
    assert code == 0, "without a kill the save succeeds"
    renamed = newest.index("step00000006")
    assert renamed > 10, "kills before the rename"
    assert len(newest) > renamed + 5, "kills after it, while the older one is removed"
    assert set(newest[:renamed]) == {"step00000003"}
    assert set(newest[renamed:]) == {"step00000006"}


def test_files_are_on_disk_before_the_checkpoint_and_it_before_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power loss, what was renamed or named by `latest` must be complete."""
    synced: list[str] = []
    checkpoint = tmp_path / "step00000003"

    def fsync(descriptor: int) -> None:
        path = os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path)
        stage = "latest" if (tmp_path / "latest").exists() else "checkpoint"
        synced.append(f"{path}, {stage if checkpoint.exists() else 'draft'}")

    monkeypatch.setattr(os, "fsync", fsync)
    save(tmp_path, 3)
    draft, own = ".step00000003.partial", os.getpid()
    files = ["shard0.pt", "rng_rank0.pt", "state.json", f"..part0.{own}"]
    files += ["shard1.pt", "rng_rank1.pt", f"..part1.{own}", f".manifest.json.{own}"]
    assert synced == [
        *(f"{draft}/{name}, draft" for name in files),
        f"{draft}, draft",
        "., checkpoint",
        f".latest.{own}, checkpoint",
        "., latest",
    ]


@pytest.mark.parametrize("exists", [False, True])
def test_the_trial_commit_leaves_nothing_and_names_a_disk_that_cannot_save(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ["checkpoints"] * exists
    for name in before:
        (tmp_path / name).mkdir()
    trial_commit(tmp_path)
    assert os.listdir(tmp_path) == before

    def fsync(descriptor: int) -> None:
        code = errno.EINVAL if stat.S_ISDIR(os.fstat(descriptor).st_mode) else 0
        code = code if only_folders else errno.EIO
        if code:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    only_folders = True  # as on some network file systems
    trial_commit(tmp_path)
    only_folders = False
    with pytest.raises(ValueError, match=r"can be saved there: .*Input/output error"):
        trial_commit(tmp_path)
    assert os.listdir(tmp_path) == before


def test_an_older_draft_of_the_step_is_removed(tmp_path: Path) -> None:
    draft = new_draft(tmp_path, 3)
    (draft / "left.pt").write_text("of a crash")
    write_part(draft, 1, ["left.pt"])
    assert list(new_draft(tmp_path, 3).iterdir()) == []


def test_a_damaged_checkpoint_is_replaced_by_the_next_of_its_step(tmp_path: Path) -> None:
    (save(tmp_path, 3) / "shard1.pt").unlink()
    assert find_problem(save(tmp_path, 3)) is None


@pytest.mark.parametrize(
    ("keep", "damaged", "left"),
    [
        (0, 0, [1, 2, 3, 4]),
        (1, 0, [4]),
        (3, 0, [2, 3, 4]),
        (9, 0, [1, 2, 3, 4]),
        (1, 4, [3, 4]),
    ],
)
def test_pruning_keeps_the_newest_and_does_not_count_damaged_ones(
    tmp_path: Path, keep: int, damaged: int, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step `damaged` is cut. The sizes of files suffice: hashing gigabytes takes minutes."""
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
        if step == damaged:
            (tmp_path / f"step{step:08d}/shard0.pt").write_text("short")
    monkeypatch.setattr("nsa.checkpoint.commit._sha256", Mock(side_effect=AssertionError))
    prune(tmp_path, keep)
    assert steps(tmp_path) == left


def test_the_universal_form_is_removed_with_its_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step00000001.universal").mkdir()
    prune(tmp_path, 1)
    assert steps(tmp_path) == [2]
    assert not draft_of(tmp_path, 1).exists()


def test_a_failed_removal_is_a_warning_and_the_others_are_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (left := tmp_path / ".step00000002.removed.partial").write_text("not a folder")
    with pytest.warns(UserWarning, match="step00000002 could not be removed: Not a directory"):
        prune(tmp_path, 1)
    assert steps(tmp_path) == [2, 4]
    left.unlink()
    (left / "of a removal that was cut off").mkdir(parents=True)
    prune(tmp_path, 1)
    assert steps(tmp_path) == [4]


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        (errno.ENOSPC, "; free some space, .* checkpoint.keep .* free inodes: delete"),
        (errno.EROFS, "; fix the folder's permissions or mount, or choose another folder"),
        (errno.EFBIG, "; raise the limit of a file's size"),
        (errno.EIO, "$"),
    ],
)
def test_an_error_of_the_disk_names_file_cause_and_fix(code: int, fix: str) -> None:
    cause = os.strerror(code)

    def fail() -> None:
        try:
            raise OSError(code, cause, "file")
        finally:
            raise RuntimeError("torch's writer, as it is closed")

    with pytest.raises(ValueError, match=f"^file: {cause}{fix}"), explain_write_errors(Path("a")):
        fail()
