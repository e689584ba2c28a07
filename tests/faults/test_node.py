"""Around a run: damaged checkpoints, bad disks, mistakes, a second run, the production start.

And the table of docs/benchmarks/reliability.md, and the soak test.
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from nsa.checkpoint.commit import newest_valid
from tests.disks import flip_a_bit, freezable_disk, frozen, mount, mounted, truncate
from tests.engine.runs import BIN, TINY, losses, on_one_rank, refused
from tests.faults import soak as soak_test
from tests.faults.conftest import CheckResumed, Golden
from tests.faults.harness import (
    EVERY,
    FAULTY,
    LAUNCHER,
    SETTINGS,
    STEPS,
    descendants,
    find,
    resume,
    start,
    weights,
)
from tests.faults.soak import Soak, launcher, run_and_compare
from tests.faults.table import BEGIN, END, FAULTS, PAGE, Outcomes
from tests.ranks import WITHOUT_COMPILER, user_environment, wait_for

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
    resumed = check_resumed("damage", f"{damage.__name__} {name}", run, run.ended)
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


@pytest.mark.parametrize("how", ["disk-full", pytest.param("read-only", marks=pytest.mark.full)])
def test_a_failing_disk_costs_checkpoints_and_not_the_run(
    how: str, tmp_path: Path, golden: Golden, outcomes: Outcomes
) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "tmpfs") as folder:
        run = start(folder)
        run.wait_for(lambda: (run.dir / "checkpoints/step00000004").exists(), "no checkpoint")
        spoil(how, folder, run.dir / "checkpoints")
        failed = time.time()
        run.end()
        assert not {0, -9, None} & {*run.codes}, "the last step could not be saved"
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
        seconds, lost = round(run.ended - failed, 1), STEPS - done
        outcomes.record(how, "", codes=run.codes, seconds=seconds, lost=lost, exact=True)


@pytest.mark.full  # tests/watchdog/test_watchdog.py: the same with toy ranks
def test_a_hanging_disk_costs_no_row(tmp_path: Path, golden: Golden, outcomes: Outcomes) -> None:
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
        seconds = round(run.ended - failed, 1)
        outcomes.record("disk-hangs", "", codes=run.codes, seconds=seconds, lost=0, exact=True)


def test_a_mistake_in_the_json_is_refused_in_one_line(tmp_path: Path, outcomes: Outcomes) -> None:
    """The other refusals: tests/engine/test_ds_config.py."""
    path = tmp_path / "config.json"
    path.write_text('{"zero_optimisation": {"stage": 1}}')
    result = on_one_rank("m7c.py", *TINY, f"--deepspeed_config={path}", folder=tmp_path)
    line = refused(result)
    assert line.startswith(f"m7c: {path}: zero_optimisation = ")
    assert list(tmp_path.iterdir()) == [path], "no run folder"
    outcomes.record("json", "", codes=[result.returncode])


def test_a_second_run_and_garbage_in_a_heartbeat_do_not_affect_the_first(
    tmp_path: Path, golden: Golden, outcomes: Outcomes
) -> None:
    run = start(tmp_path, "--until=4")
    run.wait_for_step(1)
    with (run.dir / "heartbeat_rank1.jsonl").open("ab") as file:
        file.write(b'{"event": "step_end", "step"\n\xff\xfe\x00[[[[[\n{"step": null}\n"torn')
    second = on_one_rank("m7c.py", *SETTINGS, "--resume", folder=tmp_path)
    line = refused(second)
    assert str(run.ranks.pids[0]) in line, "names the owner"
    assert "--run-dir" in line
    run.end()
    assert run.codes == [0, 0], run.output[-3_000:]
    assert losses(run.dir) == {step: golden.losses[step] for step in range(1, 5)}
    assert run.beats(1)[-1]["event"] == "end"
    assert os.listdir(tmp_path) == ["run"]
    outcomes.record("two-runs", "", codes=[second.returncode])
    outcomes.record("heartbeat", "", codes=run.codes, lost=0, exact=True)


# Slow enough to be hit.
SLOW = {"action": "slow", "where": "forward", "step": 6, "ranks": [0, 1], "mark": "/nowhere"}


@contextmanager
def watched(folder: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a slow run under a watchdog; kill what is left of it at the end."""
    environment = {"FAULT": json.dumps(SLOW), **WITHOUT_COMPILER}
    with (
        (folder / "output").open("wb") as output,
        subprocess.Popen(
            [str(BIN / "nsa"), "watch", *flags, "--", *launcher(FAULTY), *SETTINGS],
            cwd=folder,
            env=user_environment() | environment,
            stdout=output,
            stderr=output,
        ) as watchdog,
    ):
        try:
            yield watchdog
        finally:
            for process in descendants(watchdog.pid) if watchdog.poll() is None else []:
                process.kill()
            watchdog.kill()


def wait_for_checkpoint(folder: Path, watchdog: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while not (folder / "run/checkpoints" / f"step{EVERY:08d}").exists():
        ended = watchdog.poll() is not None or time.monotonic() > deadline
        assert not ended, (folder / "output").read_text()[-3_000:]
        time.sleep(0.01)


@pytest.mark.full  # tests/watchdog/test_watchdog.py: the same with toy ranks
def test_a_run_whose_rank_is_killed_is_restarted_and_repeats_the_uninterrupted_one(
    tmp_path: Path, golden: Golden, outcomes: Outcomes
) -> None:
    with watched(tmp_path, "--restart=2") as watchdog:
        wait_for_checkpoint(tmp_path, watchdog)
        os.kill(find(watchdog.pid, "1"), 9)
        killed = time.time()
        assert watchdog.wait(240) == 0, (tmp_path / "output").read_text()[-3_000:]
    seconds = round(time.time() - killed, 1)
    output = (tmp_path / "output").read_text()
    steps = re.findall(r"after step (\d+); restart", output)
    assert len(steps) == 1, output[-6_000:]
    assert losses(tmp_path / "run") == golden.losses
    assert weights(tmp_path / "run") == golden.weights
    lost = int(steps[0]) - EVERY
    outcomes.record("kill-launched", "", codes=[0], seconds=seconds, lost=lost, exact=True)


@pytest.mark.full
def test_ranks_of_killed_launchers_save(tmp_path: Path, golden: Golden, outcomes: Outcomes) -> None:
    with watched(tmp_path) as watchdog:
        wait_for_checkpoint(tmp_path, watchdog)
        os.kill(find(watchdog.pid, LAUNCHER), 9)
        killed = time.time()
        code = watchdog.wait(240)
    output = (tmp_path / "output").read_text()
    assert "launcher exited" in output, output[-3_000:]
    seconds = round(time.time() - killed, 1)
    resumed = resume(tmp_path)
    assert resumed.step > EVERY, "nothing was saved after the kill"
    assert resumed.losses == golden.losses
    assert resumed.weights == golden.weights
    outcomes.record("kill-launcher", "", codes=[code], seconds=seconds, lost=0, exact=True)


def test_every_fault_of_the_page_is_tested() -> None:
    rows = PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines()[2:]
    assert len(rows) == len(FAULTS)
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [fault for fault in FAULTS if f'"{fault}"' not in tests] == []


@pytest.mark.full
def test_a_run_under_faults_computes_what_an_undisturbed_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_test, "FAULTS", {"kill": soak_test.FAULTS["kill a rank"]})
    soak = Soak(tmp_path, 0, None)
    run_and_compare(soak, minutes=0.3)
    assert soak.faults.total() >= 1
