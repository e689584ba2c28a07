"""`launch/tensorboard.sh`: serves on this machine only by default."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from tests.launch.clone import run, start
from tests.ranks import free_port


def write_event(run: Path) -> None:
    if not (run / "tensorboard").exists():
        with SummaryWriter(str(run / "tensorboard")) as writer:
            writer.add_scalar("train/loss", 5.67, 1)


def test_it_serves_the_runs_of_a_folder_under_their_names(
    real_packages: Path, tmp_path: Path
) -> None:
    script = real_packages / "launch/tensorboard.sh"
    script.write_text(script.read_text().replace("sleep 5\n", "sleep 0.5\n"))
    write_event(tmp_path / "runs/mine")
    port = free_port()
    process = start(real_packages, "tensorboard.sh", str(tmp_path / "runs"), "--port", str(port),
                    "--load_fast=false", "--reload_interval=1", TMPDIR=str(tmp_path))  # fmt: skip
    try:
        tags = {}
        deadline = time.monotonic() + 120
        while len(tags) < 2 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
            try:
                url = f"http://127.0.0.1:{port}/data/plugin/scalars/tags"
                with urllib.request.urlopen(url) as page:
                    tags = json.load(page)
            except OSError:
                continue
            if list(tags) == ["mine"]:  # a run that starts while the server runs
                write_event(tmp_path / "runs/sweep/other")
        assert sorted(tags) == ["mine", "sweep/other"], process.poll()
        assert list(tags["mine"]) == ["train/loss"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_missing_folder_is_reported_before_anything_starts(installed_clone: Path) -> None:
    call = run(installed_clone, "tensorboard.sh", "nowhere", "--port", "1")
    assert call.returncode == 2
    assert call.stderr == "tensorboard: nowhere: no such folder\n"
