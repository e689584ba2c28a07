"""Files for those who host, build or change the project: .github/, Dockerfiles, checks of CI."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.launch.clone import write_script
from tests.ranks import ROOT

DOCKERFILES = sorted(ROOT.glob("launch/*.Dockerfile"))


def lines(dockerfile: Path) -> list[tuple[str, str]]:
    """Return instruction and arguments, with continuations joined."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.M).replace("\\\n", "")
    words = (line.split(None, 1) for line in text.splitlines() if line)
    return [(first, rest) for first, rest in words]


def test_pre_commit_runs_the_checks_of_the_test_script() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]
    checks = re.findall(r"^check (.+)$", (ROOT / "launch/test.sh").read_text(), re.M)
    assert hooks == [f".venv/bin/{check}" for check in checks if "pytest" not in check]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_installs_the_tested_versions_from_files_that_exist(dockerfile: Path) -> None:
    instructions = lines(dockerfile)
    installs = [rest for first, rest in instructions if rest.startswith("pip install")]
    assert len(installs) == 2
    assert all("-c launch/constraints.txt" in install for install in installs)
    assert " torch" in installs[0]  # first and alone, so that the rest keeps its build
    assert ("whl/cpu" in installs[0]) == (dockerfile.stem == "cpu")
    copied = [word for first, rest in instructions if first == "COPY" for word in rest.split()[:-1]]
    assert {"nsa", "recipes", "ds_configs", "pyproject.toml"} <= set(copied)
    assert all((ROOT / word).exists() for word in copied)
    assert instructions[0][1].startswith("python:3.11-")  # the version that all tests ran with


@pytest.mark.parametrize(("failing", "code"), [("ruff check", 1), ("python -m", 1), ("", 0)])
def test_a_failed_check_fails_ci_and_the_tests_still_run_last(
    failing: str, code: int, tmp_path: Path
) -> None:
    for name in ("launch", ".ci"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "launch/setup.sh").write_text("")
    (tools := tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("ruff", "mypy", "python"):
        write_script(tools / name, f'#!/bin/sh\n[ "{name} $1" != "{failing}" ]\n')
    call = subprocess.run([tmp_path / ".ci/run"], cwd="/", capture_output=True, text=True)
    assert call.returncode == code
    checks = [line.split()[1:3] for line in call.stdout.splitlines() if line.startswith("test: ")]
    assert checks == [["ruff", "format"], ["ruff", "check"], ["mypy"], ["python", "-m"]]
