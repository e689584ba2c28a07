"""Installed versions: pip's constraints, uv's, and the ranges of pyproject.toml agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.ranks import ROOT

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
    command = [UV, "pip", "install", *flags, *constraints, "-e", "."]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    changes = re.findall(r"^ [-+~] ([\w-]+)", run.stderr, re.M)
    assert set(changes) == {"nsa-m7c"}, run.stderr
