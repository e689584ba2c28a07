"""A run as it is started for production: DeepSpeed's launcher under `nsa watch --restart`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.engine.runs import BIN, losses
from tests.faults.conftest import Golden
from tests.faults.harness import SETTINGS, STEPS, weights
from tests.faults.outcomes import Outcomes
from tests.ranks import ROOT, free_port, started_programs_environment

LAUNCHER = "deepspeed.launcher.launch"


@pytest.mark.parametrize(
    "victim", ["kill-launched", pytest.param("kill-launcher", marks=pytest.mark.full)]
)
def test_a_run_whose_processes_are_killed_is_started_again_and_loses_nothing(
    victim: str, tmp_path: Path, golden: Golden, outcomes: Outcomes
) -> None:
    run_dir = tmp_path / "run"
    recipe = [str(ROOT / "recipes/m7c.py"), *SETTINGS]
    command = [str(BIN / "deepspeed"), "--num_gpus=2", f"--master_port={free_port()}", *recipe]
    errors = (tmp_path / "errors").open("wb")
    with (
        errors,
        subprocess.Popen(
            [str(BIN / "nsa"), "watch", "--restart=2", "--backoff=0.1", "--", *command],
            cwd=tmp_path,
            env=started_programs_environment() | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        ) as watchdog,
    ):
        try:
            wait_for_checkpoint(run_dir, watchdog)
            os.kill(find(watchdog.pid, LAUNCHER if victim == "kill-launcher" else None), 9)
            killed = time.time()
            assert watchdog.wait(240) == 0, (tmp_path / "errors").read_text()[-3_000:]
            ended = time.time()
        finally:
            watchdog.send_signal(signal.SIGTERM)
    (restart,) = json.loads((run_dir / "halt.json").read_text())["restarts"]
    assert losses(run_dir) == golden.losses
    assert weights(run_dir) == golden.weights
    lost = restart["step"] - first_step_again(run_dir)
    assert 0 <= lost < STEPS
    seconds = round(ended - killed, 1)
    outcomes.tell(victim, "", codes=[0], seconds=seconds, lost=lost, exact=True)


def wait_for_checkpoint(run_dir: Path, watchdog: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while not (run_dir / "checkpoints/step00000004").exists():
        assert watchdog.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def find(watchdog: int, name: str | None) -> int:
    """The launcher of that name, or the rank 1 that it has started."""
    processes = psutil.Process(watchdog).children(recursive=True)
    for process in processes:
        words = process.cmdline()
        rank = process.environ().get("RANK") if any("m7c.py" in word for word in words) else None
        if (name in words) if name else (rank == "1" and LAUNCHER not in words):
            return process.pid
    raise AssertionError([process.cmdline() for process in processes])


def first_step_again(run_dir: Path) -> int:
    """The steps that were done when the run began again."""
    lines = (run_dir / "heartbeat_rank0.jsonl").read_text().splitlines()
    beats = [json.loads(line) for line in lines]
    starts = [number for number, beat in enumerate(beats) if beat["event"] == "start"]
    return next(beat["step"] for beat in beats[starts[1] :] if beat["event"] == "step_start")
