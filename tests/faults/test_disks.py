"""Damaged checkpoints, full disks and read-only disks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nsa.checkpoint.commit import newest_valid
from tests.disks import flip_a_bit, freezable_disk, frozen, mount, mounted, truncate
from tests.engine.runs import losses
from tests.faults.conftest import CheckResumed, Golden
from tests.faults.harness import EVERY, STEPS, resume, start, weights
from tests.faults.table import Outcomes
from tests.ranks import wait_for

full = pytest.mark.full
DISK_SIZE = "4g"  # enough for the preflight checks
FREE_BYTES = 64 * 1024  # on a full disk, too few for a checkpoint
MESSAGE = {
    "disk-full": "No space left on device; free some space",
    "read-only": "Read-only file system; fix the folder's permissions",
}


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (flip_a_bit, "mp_rank_00_model_states.pt"),
        pytest.param(truncate, "rng_rank1.pt", marks=full),
        pytest.param(Path.unlink, "manifest.json", marks=full),
        pytest.param(Path.unlink, "state.json", marks=full),
    ],
)
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(
    damage: Callable[[Path], None],
    name: str,
    golden: Golden,
    tmp_path: Path,
    check_resumed: CheckResumed,
) -> None:
    run = replace(golden.run, folder=shutil.copytree(golden.run.folder, tmp_path / "copy"))
    damage(run.dir / f"checkpoints/step{STEPS:08d}" / name)
    now = time.time()
    resumed = check_resumed("damage", f"{damage.__name__} {name}", run, now, now)
    assert resumed.step == STEPS - EVERY
    assert f"step{STEPS:08d}" in resumed.output
    assert name in resumed.output


def spoil(how: str, folder: Path, checkpoints: Path) -> None:
    """Shrink the disk to its contents, or make the checkpoints' folder read-only."""
    if how == "disk-full":
        disk = os.statvfs(folder)
        used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        mount("-o", f"remount,size={used + FREE_BYTES}", str(folder))
    else:
        mount("--bind", str(checkpoints), str(checkpoints))
        mount("-o", "remount,bind,ro", str(checkpoints))


def fix(how: str, folder: Path, checkpoints: Path) -> None:
    if how == "disk-full":
        mount("-o", f"remount,size={DISK_SIZE}", str(folder))
    else:
        subprocess.run(["umount", str(checkpoints)], check=True)


@pytest.mark.full  # tests/engine/test_gates_run.py, tests/checkpoint/test_saver.py
@pytest.mark.parametrize("how", ["disk-full", "read-only"])
def test_a_failing_disk_costs_checkpoints_and_not_the_run(
    how: str, tmp_path: Path, golden: Golden, outcomes: Outcomes
) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "tmpfs") as folder:
        run = start(folder)
        run.wait_for(lambda: (run.dir / "checkpoints/step00000004").exists(), "no checkpoint")
        spoil(how, folder, run.dir / "checkpoints")
        failed = time.time()
        run.end()
        ended = time.time()
        assert all(code not in (0, -9, None) for code in run.codes), (
            "the last step could not be saved"
        )
        lost = re.findall(r"NOT SAVED: (step\d+) was not saved", run.output)
        assert lost
        assert len(lost) == len(set(lost)), "each is logged once"
        assert MESSAGE[how] in run.output
        fix(how, folder, run.dir / "checkpoints")
        path, _ = newest_valid(run.dir / "checkpoints")
        assert path is not None
        done = int(path.name[4:])
        assert done in (EVERY, 2 * EVERY)
        resumed = resume(folder)
        assert resumed.step == done
        # metrics.csv lacks the rows that the disk refused; the others must not differ.
        kept = losses(run.dir)
        assert kept.items() <= golden.losses.items()
        assert set(range(done + 1, STEPS + 1)) <= set(kept)
        assert resumed.weights == golden.weights
        seconds, lost = round(ended - failed, 1), STEPS - done
        outcomes.record(how, "", codes=run.codes, seconds=seconds, lost=lost, exact=True)


@pytest.mark.full  # tests/watchdog/test_watchdog.py: the same with toy ranks
def test_a_disk_that_hangs_costs_neither_the_run_nor_a_row(
    tmp_path: Path, golden: Golden, outcomes: Outcomes
) -> None:
    limits = [f"--set=monitor.watch.{name}=3" for name in ("silence", "save", "compute")]
    with freezable_disk(tmp_path / "disk", megabytes=4_096) as folder:
        run = start(folder, *limits, watched=True)
        run.wait_for(lambda: (run.dir / "checkpoints/step00000004").exists(), "no checkpoint")
        with frozen(folder):
            failed = time.time()
            wait_for(lambda: "the disk hangs" in run.output, lambda: run.output)
            time.sleep(3)  # with the wait above, for longer than the limits
        run.end()
        assert run.codes == [0], run.output[-3_000:]
        assert "HALT" not in run.output
        assert losses(run.dir) == golden.losses
        assert weights(run.dir) == golden.weights
        seconds = round(time.time() - failed, 1)
        outcomes.record("disk-hangs", "", codes=run.codes, seconds=seconds, lost=0, exact=True)
