"""env.json: hardware and code, without secrets; dtypes.txt: what the first step used."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from nsa.monitor.environment import cpu_model, driver_version, git_commit, write_dtypes, write_env


def test_env_json_records_hardware_and_code_but_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    secrets = "API_KEY AUTH CREDENTIALS DSN HUB_TOKEN PASSWORD PROXY SECRET URI URL"
    for name in ("HF_TOKEN", *(f"NCCL_{secret}" for secret in secrets.split())):
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
    models = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    assert not models or cpu_model() == models[0].strip()
    assert env["cpu"]["memory_gb"] == pytest.approx(psutil.virtual_memory().total / 1e9)
    assert env["command"] == [sys.executable, *sys.argv]
    assert {"date", "git_commit", "python", "host", "cuda"} <= env.keys()


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


class Model(torch.nn.Module):
    """Two equal bf16 layers, an fp32 head, and a module that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2)).bfloat16()
        self.head = torch.nn.Linear(4, 1)
        self.tied = torch.nn.Linear(4, 1, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.float()).sum()


def dtypes_of(run_dir: Path) -> dict[str, list[str]]:
    """Return the cells of dtypes.txt, by the first of a row."""
    lines = (run_dir / "dtypes.txt").read_text().splitlines()
    cells = (line.split() for line in lines if line)
    return {first: rest for first, *rest in cells}


def test_the_table_holds_the_dtypes_of_each_kind_of_module(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4, dtype=torch.bfloat16)).backward()
    optimizer.step()
    write_dtypes(tmp_path / "dtypes.txt", model, optimizer)
    table = dtypes_of(tmp_path)
    assert table["layers.*"] == ["(2)", "Linear", "bfloat16"]
    assert table["head"] == table["tied"] == ["Linear", "float32"]
    assert table["updated"][-1] == "bfloat16+float32"
    assert table["exp_avg"] == ["bfloat16+float32"]


@pytest.mark.parametrize("name", ["grad_acc_dtype", "gradient_accumulation_dtype"])
def test_layers_with_different_dtypes_are_counted_separately(name: str, tmp_path: Path) -> None:
    """And the dtype in which DeepSpeed's wrappers accumulate, each under a name of its own."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    model[1].bfloat16()
    model[3].bias = torch.nn.Parameter(model[3].bias.bfloat16())
    adamw = torch.optim.AdamW(model.parameters())
    wrapper = SimpleNamespace(optimizer=adamw, **{name: torch.float64})
    write_dtypes(tmp_path / "dtypes.txt", model, wrapper)
    table = dtypes_of(tmp_path)
    lines = (tmp_path / "dtypes.txt").read_text().splitlines()[1:4]
    assert [line.split() for line in lines] == [
        ["*", "(2)", "Linear", "float32"],
        ["*", "Linear", "bfloat16"],
        ["*", "Linear", "bfloat16+float32"],
    ]
    assert table["accumulated"][-1] == "float64"
    assert table["optimizer:"] == ["SimpleNamespace", ">", "AdamW"]
