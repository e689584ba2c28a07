"""Checkpoints that are damaged, and disks that take no more."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nsa import checkpoint
from tests.engine.runs import losses
from tests.faults.conftest import Aftermath, Golden
from tests.faults.harness import EVERY, STEPS, Run, resume, start, start_faulty, suffered
from tests.faults.outcomes import Outcomes

full = pytest.mark.full
ROOMY = "4g"  # what the checks before a run want
SCRAPS = 64 * 1024  # bytes that a full disk still has, too few for a checkpoint
MESSAGE = {"disk-full": "No space left", "read-only": "Read-only"}


def truncate(path: Path) -> None:
    """Cut a file's second half off."""
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Turn one bit round in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, golden: Golden) -> Run:
    """A run that was ended in step 11; its newest checkpoint is of step 8."""
    run = start_faulty(tmp_path_factory.mktemp("saved"), "kill", "forward", step=11).end()
    suffered(run)
    assert sorted(path.name for path in (run.dir / "checkpoints").glob("step*")) == [
        "step00000004",
        "step00000008",
    ]
    return run


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_damage_to_any_file_of_a_checkpoint_is_found_and_the_one_before_is_taken(
    damage: Callable[[Path], None], saved: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    names = [path.name for path in (saved.dir / "checkpoints/step00000008").iterdir()]
    assert len(names) >= 8
    for name in names:
        shutil.copytree(saved.dir / "checkpoints", folder)
        damage(folder / "step00000008" / name)
        found, notes = checkpoint.newest_complete(folder)
        assert found == folder / "step00000004", name
        assert any("step00000008" in note for note in notes)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (flip, "mp_rank_00_model_states.pt"),
        pytest.param(truncate, "rng_rank1.pt", marks=full),
        pytest.param(Path.unlink, "manifest.json", marks=full),
        pytest.param(Path.unlink, "state.json", marks=full),
    ],
)
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    damage: Callable[[Path], None], name: str, saved: Run, tmp_path: Path, aftermath: Aftermath
) -> None:
    shutil.copytree(saved.folder, tmp_path / "copy")
    run = Run(tmp_path / "copy", saved.ranks, saved.codes)
    damage(run.dir / "checkpoints/step00000008" / name)
    now = time.time()
    resumed = aftermath("damage", f"{damage.__name__} {name}", run, now, now)
    assert resumed.step == 4
    assert "step00000008" in resumed.said
    assert name in resumed.said


@contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """A file system of its own, in memory."""
    folder.mkdir()
    asked = ["mount", "-t", "tmpfs", "-o", f"size={ROOMY}", "tmpfs", str(folder)]
    mounted = subprocess.run(asked, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def mount(*arguments: str) -> None:
    """Change what is mounted."""
    subprocess.run(["mount", *arguments], check=True)


def spoil(how: str, folder: Path, checkpoints: Path) -> None:
    """Have a disk shrink to what is on it, more or less, or a folder on it take no more."""
    if how == "disk-full":
        room = os.statvfs(folder)
        used = (room.f_blocks - room.f_bfree) * room.f_frsize
        mount("-o", f"remount,size={used + SCRAPS}", str(folder))
    else:
        mount("--bind", str(checkpoints), str(checkpoints))
        mount("-o", "remount,bind,ro", str(checkpoints))


def fix(how: str, folder: Path, checkpoints: Path) -> None:
    """Put it right again."""
    if how == "disk-full":
        mount("-o", f"remount,size={ROOMY}", str(folder))
    else:
        subprocess.run(["umount", str(checkpoints)], check=True)


@pytest.mark.parametrize("how", ["disk-full", pytest.param("read-only", marks=full)])
def test_a_disk_that_takes_no_more_costs_checkpoints_and_not_the_run(
    how: str, tmp_path: Path, golden: Golden, outcomes: Outcomes
) -> None:
    with disk(tmp_path / "disk") as folder:
        run = start(folder)
        run.wait_for(lambda: (run.dir / "checkpoints/step00000004").exists(), "no checkpoint came")
        spoil(how, folder, run.dir / "checkpoints")
        failed = time.time()
        run.end()
        ended = time.time()
        assert all(code not in (0, -9, None) for code in run.codes), "its end was not saved"
        assert "not saved" in run.said.lower()
        assert MESSAGE[how] in run.said
        fix(how, folder, run.dir / "checkpoints")
        found, _ = checkpoint.newest_complete(run.dir / "checkpoints")
        assert found is not None
        done = int(found.name[4:])
        assert done in (EVERY, 2 * EVERY)
        resumed = resume(folder)
        assert resumed.step == done
        # Rows of metrics.csv that the disk refused are gone; none of the others may differ.
        kept = losses(run.dir)
        assert kept.items() <= golden.losses.items()
        assert set(range(done + 1, STEPS + 1)) <= set(kept)
        assert resumed.weights == golden.weights
        seconds, lost = round(ended - failed, 1), STEPS - done
        outcomes.tell(how, "", codes=run.codes, seconds=seconds, lost=lost, exact=True)
