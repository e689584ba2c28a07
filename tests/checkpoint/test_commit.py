"""The commit of a checkpoint, cut short at every place, and what is kept afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa.checkpoint import newest_complete
from nsa.checkpoint.commit import (
    commit,
    draft_of,
    new_draft,
    prune,
    remove_drafts,
    wait_for_parts,
    write_failure,
    write_part,
)
from nsa.checkpoint.manifest import find_problem, list_checkpoints, manifest_text, read_manifest

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


def save(folder: Path, step: int, *, finite: bool = True, keep: int = 0) -> Path:
    """What two ranks do with files that stand for DeepSpeed's."""
    draft = new_draft(folder, step)
    for rank in (0, 1):
        names = [f"shard{rank}.pt", f"rng_rank{rank}.pt", *["state.json"] * (rank == 0)]
        for name in names:
            (draft / name).write_text(f"{name} of step {step}\n" * 100)
        write_part(draft, rank, names, {"finite": finite})
    path = commit(folder, step, wait_for_parts(draft, 2, threading.Event()), {})
    prune(folder, keep, 0, time.time())
    return path


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step")) for path in folder.glob("step*"))


def in_a_process(work: Callable[[], object]) -> int:
    """How a process ends that does `work`: 0, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_before(change: int, folder: Path, work: Callable[[], object]) -> int:
    """Do `work` in a process that is killed just before its change number `change` to `folder`."""

    def run() -> None:
        seen = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if event not in CHANGES or not str(arguments[0]).startswith(str(folder)):
                return
            seen += 1
            if seen == change:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()

    return in_a_process(run)


@pytest.mark.parametrize("there", [False, True])
def test_killed_anywhere_there_is_a_whole_checkpoint_and_the_next_run_cleans_up(
    tmp_path: Path, there: bool
) -> None:
    """Step 6 may be on disk already, damaged: a run that passed it over saves it once more."""
    before = tmp_path / "before"
    save(before, 3)
    if there:
        (save(before, 6) / "shard1.pt").unlink()
    found, change, code = [], 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        change += 1
        folder = Path(shutil.copytree(before, tmp_path / str(change)))
        code = killed_before(change, folder, lambda folder=folder: save(folder, 6, keep=1))
        path, notes = newest_complete(folder)
        assert path is not None, f"killed before change {change}: {notes}"
        named = [other for other in list_checkpoints(folder) if find_problem(other)]
        assert there or named == [], "half a checkpoint bears the name of a whole one"
        found.append(path.name)
        remove_drafts(folder)  # what the next run does first
        assert {item.name for item in folder.iterdir()} <= {"latest", *map_names(3, 6)}
        if change % 6 == 0:  # each sixth, for the time that it takes
            assert save(folder, 9) == newest_complete(folder)[0]
            assert (folder / "latest").read_text() == "step00000009"
    assert code == 0, "without a kill the save succeeds"
    turn = found.index("step00000006")
    assert turn > 10, "kills before the rename were tried"
    assert len(found) > turn + 5, "and kills after it, while the older one is removed"
    assert set(found[:turn]) == {"step00000003"}
    assert set(found[turn:]) == {"step00000006"}


def map_names(*numbers: int) -> list[str]:
    return [f"step{number:08d}" for number in numbers]


def test_a_rank_that_failed_is_named_and_its_room_given_back(tmp_path: Path) -> None:
    draft = new_draft(tmp_path, 3)
    (draft / "state.json").write_text("{}")
    (draft / "shard1.pt").write_text("half of it")
    write_part(draft, 0, ["state.json"], {"finite": True})
    write_failure(draft, 1, ["shard1.pt", "never written"], "shard1.pt: the disk is full")
    assert not (draft / "shard1.pt").exists()
    with pytest.raises(ValueError, match="the disk is full"):
        wait_for_parts(draft, 2, threading.Event())


def test_rank_0_waits_for_a_slow_rank_and_no_longer_than_it_is_told_to(tmp_path: Path) -> None:
    draft = new_draft(tmp_path, 3)
    write_part(draft, 0, [], {"finite": True})
    late = threading.Timer(0.1, write_part, [draft, 1, [], {"finite": False}])
    late.start()
    parts = wait_for_parts(draft, 2, threading.Event())
    assert [part["finite"] for part in parts] == [True, False]
    abort = threading.Event()
    threading.Timer(0.1, abort.set).start()
    with pytest.raises(ValueError, match="another rank failed"):
        wait_for_parts(draft, 3, abort)


def test_one_rank_that_is_not_finite_makes_the_checkpoint_not_finite(tmp_path: Path) -> None:
    draft = new_draft(tmp_path, 3)
    for rank, finite in ((0, True), (1, False)):
        names = [f"rng_rank{rank}.pt", *["state.json"] * (rank == 0)]
        for name in names:
            (draft / name).write_text("x")
        write_part(draft, rank, names, {"finite": finite})
    path = commit(tmp_path, 3, wait_for_parts(draft, 2, threading.Event()), {})
    assert newest_complete(tmp_path)[0] == path
    assert newest_complete(tmp_path, finite=True) == (
        None,
        ["step00000003: it holds numbers that are not finite"],
    )


def test_an_older_draft_of_the_step_is_not_mixed_in(tmp_path: Path) -> None:
    draft = new_draft(tmp_path, 3)
    (draft / "left.pt").write_text("of a crash")
    write_part(draft, 1, ["left.pt"], {"finite": True})
    assert list(new_draft(tmp_path, 3).iterdir()) == []


def made_at(path: Path, when: float) -> None:
    """Make a checkpoint older than it is."""
    content = read_manifest(path)
    (path / "manifest.json").write_text(manifest_text(content | {"time": when}))


@pytest.mark.parametrize(
    ("keep", "hours", "left"),
    [
        (0, 0, [1, 2, 3, 4, 5]),
        (1, 0, [5]),
        (3, 0, [3, 4, 5]),
        (9, 0, [1, 2, 3, 4, 5]),
        (0, 2.5, [3, 4, 5]),
        (2, 2.5, [4, 5]),
        (4, 0.5, [5]),
        (0, 1e-9, [5]),
    ],
)
def test_old_checkpoints_go_by_number_and_by_age(
    tmp_path: Path, keep: int, hours: float, left: list[int]
) -> None:
    now = 1e9
    for step in (1, 2, 3, 4, 5):
        made_at(save(tmp_path, step), now - 3600 * (5 - step) - 1)
    assert prune(tmp_path, keep, hours, now) == []
    assert steps(tmp_path) == left


def test_the_newest_finite_checkpoint_is_never_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, finite=step <= 2)
    prune(tmp_path, 1, 1e-9, time.time() + 1e6)
    assert steps(tmp_path) == [2, 4]


def test_a_broken_checkpoint_does_not_push_a_good_one_out(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step00000003/shard0.pt").write_text("short")
    prune(tmp_path, 1, 0, time.time())
    assert steps(tmp_path) == [2, 3]


def test_what_was_made_of_a_checkpoint_goes_with_it(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step00000001.universal").mkdir()
    prune(tmp_path, 1, 0, time.time())
    assert steps(tmp_path) == [2]
    assert not draft_of(tmp_path, 1).exists()


def test_a_checkpoint_that_cannot_be_removed_is_a_line_and_the_others_go(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / ".step00000001.removed.partial").write_text("a file where a folder should be")
    (told,) = prune(tmp_path, 1, 0, time.time())
    assert told == f"{tmp_path / 'step00000001'} could not be removed: Not a directory"
    assert steps(tmp_path) == [1, 3]
