from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path

import pytest

from nsa.monitor.environment import driver_version, git_commit, write_env


def test_env_json_records_hardware_and_code_but_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    for name in ("HF_TOKEN", "TORCH_HUB_TOKEN", "NCCL_API_KEY", "TORCH_PROXY"):
        monkeypatch.setenv(name, "hf_do_not_tell")
    returned = write_env(tmp_path, hosts=["one", "two"])
    text = (tmp_path / "env.json").read_text()
    env = json.loads(text)
    assert env == returned
    for package in ("torch", "deepspeed", "numpy"):
        assert env["packages"][package] == importlib.metadata.version(package)
    assert env["hosts"] == ["one", "two"]
    assert env["environment"]["NCCL_P2P_DISABLE"] == "1"
    assert "hf_do_not_tell" not in text
    assert env["cpu"]["cores"] >= 1
    assert env["cpu"]["memory_gb"] > 0
    assert {"date", "command", "git_commit", "python", "host", "cuda"} <= env.keys()


@pytest.mark.parametrize(
    "kind", ["x86_64 Kernel Module  550.54.15", "Open Kernel Module for x86_64  550.54.15"]
)
def test_the_driver_version_is_read_from_both_formats(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "version"
    assert driver_version(file) is None
    file.write_text(f"NVRM version: NVIDIA UNIX {kind}  Tue Mar  5 22:23:56 UTC 2024\n")
    assert driver_version(file) == "550.54.15"


def test_the_commit_is_read_from_the_checkout_of_the_code(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ["git", "-C", str(tmp_path), *names, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    source, installed = tmp_path / "code.py", tmp_path / "installed.py"
    source.write_text("1\n")
    installed.write_text("1\n")
    assert git_commit(source) is None
    git("init", "-q")
    git("add", "code.py")
    git("commit", "-q", "-m", "one")
    head = git("rev-parse", "HEAD")
    assert git_commit(source) == head
    assert git_commit(installed) is None, "an untracked copy inside a checkout"
    source.write_text("2\n")
    assert git_commit(source) == f"{head}+changes"
