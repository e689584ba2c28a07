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


def test_it_serves_the_runs_of_a_folder(real_packages: Path, tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path / "runs/mine/tensorboard")) as writer:
        writer.add_scalar("train/loss", 5.67, 1)
    port = free_port()
    process = start(real_packages, "tensorboard.sh", str(tmp_path / "runs"), "--port", str(port),
                    "--load_fast=false")  # fmt: skip
    try:
        found = {}
        deadline = time.monotonic() + 120
        while not found and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
            try:
                url = f"http://127.0.0.1:{port}/data/plugin/scalars/tags"
                with urllib.request.urlopen(url) as page:
                    found = json.load(page)
            except OSError:
                continue
        assert list(found) == ["mine/tensorboard"], process.poll()
        assert list(found["mine/tensorboard"]) == ["train/loss"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_folder_that_is_not_there_is_said_before_anything_starts(installed_clone: Path) -> None:
    call = run(installed_clone, "tensorboard.sh", "nowhere", "--port", "1")
    assert call.returncode == 2
    assert call.stderr == "tensorboard: nowhere: no such folder\n"
