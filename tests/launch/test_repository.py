"""Files for those who host, build or change the project: pinned versions, Dockerfiles, CI."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.launch.clone import capture, write_script
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
def test_a_failed_check_fails_ci_and_the_tests_run(failing: str, code: int, tmp_path: Path) -> None:
    for name in ("launch", ".ci"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "launch/setup.sh").write_text("")
    (tools := tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("ruff", "mypy", "python"):
        write_script(tools / name, f'#!/bin/sh\n[ "{name} $1" != "{failing}" ]\n')
    done = capture(tmp_path / ".ci/run", folder=Path("/"))
    assert done.returncode == code
    checks = [line.split()[1:3] for line in done.stdout.splitlines() if line.startswith("test: ")]
    assert checks == [["ruff", "format"], ["ruff", "check"], ["mypy"], ["python", "-m"]]


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# The virtual environment's, which need not be activated.
UV = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv")


def pinned() -> list[Requirement]:
    lines = (ROOT / "launch/constraints.txt").read_text().splitlines()
    stripped = (re.sub(r"(^|\s+)#.*", "", line) for line in lines)
    return [Requirement(line) for line in stripped if line]


def ranges() -> dict[str, Requirement]:
    project = PROJECT["project"]
    listed = project["dependencies"] + project["optional-dependencies"]["eval"]
    required = map(Requirement, listed)
    return {requirement.name: requirement for requirement in required}


def test_uv_sync_takes_the_tested_versions() -> None:
    listed = map(Requirement, PROJECT["tool"]["uv"]["constraint-dependencies"])
    assert sorted(map(str, listed)) == sorted(map(str, pinned()))


@pytest.mark.parametrize("requirement", [p for p in pinned() if p.name in ranges()], ids=str)
def test_a_tested_version_is_in_the_supported_range(requirement: Requirement) -> None:
    (pin,) = requirement.specifier
    assert pin.version in ranges()[requirement.name].specifier


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_without_constraints_the_newest_allowed_release_is_the_tested_one(name: str) -> None:
    """Each torch is built for one triton: a newer one of either would be an untested pair."""
    (version,) = (pin.version for p in pinned() if p.name == name for pin in p.specifier)
    major, minor, _ = map(int, version.split("."))
    assert f"{major}.{minor + 1}" not in ranges()[name].specifier


@pytest.mark.skipif(UV is None, reason="uv is not installed: pip install uv")
@pytest.mark.parametrize("constraints", [("-c", "launch/constraints.txt"), ()])
def test_uv_keeps_the_installed_torch_and_downloads_no_cuda(
    constraints: tuple[str, ...], tmp_path: Path
) -> None:
    """The second command of docs/start/install.md, where the first has installed torch."""
    assert UV is not None
    flags = ["--dry-run", "--offline", "--python", sys.executable, "--cache-dir", str(tmp_path)]
    run = capture(UV, "pip", "install", *flags, *constraints, "-e", ".", folder=ROOT)
    assert run.returncode == 0, run.stderr
    changes = re.findall(r"^ [-+~] ([\w-]+)", run.stderr, re.M)
    assert set(changes) == {"nsa-m7c"}, run.stderr
