"""Production start: DeepSpeed's launcher under `nsa watch`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.runs import BIN, losses
from tests.faults.conftest import Golden
from tests.faults.harness import (
    EVERY,
    FAULTY,
    LAUNCHER,
    SETTINGS,
    descendants,
    find,
    resume,
    weights,
)
from tests.faults.table import Outcomes
from tests.ranks import WITHOUT_COMPILER, free_port, user_environment

# Slow enough to be hit.
SLOW = {"action": "slow", "where": "forward", "step": 6, "ranks": [0, 1], "mark": "/nowhere"}


@contextmanager
def watched(folder: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a slow run under a watchdog; kill what is left of it at the end."""
    launcher = [str(BIN / "deepspeed"), "--num_gpus=2", f"--master_port={free_port()}"]
    environment = {"FAULT": json.dumps(SLOW), **WITHOUT_COMPILER}
    with (
        (folder / "output").open("wb") as output,
        subprocess.Popen(
            [str(BIN / "nsa"), "watch", *flags, "--", *launcher, str(FAULTY), *SETTINGS],
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
def test_the_ranks_of_a_killed_launcher_save_and_exit(
    tmp_path: Path, golden: Golden, outcomes: Outcomes
) -> None:
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
