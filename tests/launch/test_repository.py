"""Files for those who host, build or change the project: .github/, Dockerfiles, checks of CI."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

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


def test_a_lint_failure_fails_ci_and_the_tests_still_run_last(real_packages: Path) -> None:
    shutil.copytree(ROOT / ".ci", real_packages / ".ci")
    shutil.copy(ROOT / "pyproject.toml", real_packages)
    for name, text in {
        "nsa/sum.py": "def add(a: int, b: int) -> int:\n    return a + b\n",
        "recipes/m7c.py": "import os\n",
        "tests/test_sum.py": "from nsa.sum import add\n\n\n"
        "def test_add() -> None:\n    assert add(1, 2) == 3\n",
    }.items():
        (real_packages / name).parent.mkdir()
        (real_packages / name).write_text(text)

    call = subprocess.run([real_packages / ".ci/run"], cwd="/", capture_output=True, text=True)
    assert call.returncode == 1
    assert "F401" in call.stdout
    checks = [line for line in call.stdout.splitlines() if line.startswith("test: ")]
    assert [check.split()[1] for check in checks] == ["ruff", "ruff", "mypy", "python"]
    assert "1 passed" in call.stdout.splitlines()[-1]

    (real_packages / "recipes/m7c.py").write_text("")
    fixed = subprocess.run([real_packages / ".ci/run"], cwd="/", capture_output=True, text=True)
    assert fixed.returncode == 0, fixed.stdout
