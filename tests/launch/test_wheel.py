"""The wheel holds what a reader without a clone needs, and finds it where pip puts it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.ranks import ROOT

SHARE = "share/nsa-m7c"
BUILD = "import os; from setuptools.build_meta import build_wheel; build_wheel(os.environ['TO'])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built as pip does it, but with the packages that are here, from a copy of what it takes."""
    source, to = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("nsa", "recipes", "ds_configs"):
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    built = subprocess.run(
        [sys.executable, "-c", BUILD],
        cwd=source,
        env=os.environ | {"TO": str(to)},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr[-2_000:]
    (path,) = to.glob("*.whl")
    return zipfile.ZipFile(path)


def test_it_holds_every_module_the_types_the_recipes_and_the_configs(
    wheel: zipfile.ZipFile,
) -> None:
    names = set(wheel.namelist())
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "nsa").rglob("*.py")} <= names
    assert "nsa/py.typed" in names
    (data,) = {name.partition(SHARE)[0] for name in names if SHARE in name}
    for pattern in ("recipes/*.py", "ds_configs/*.json"):
        ours = {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)}
        assert ours
        assert {f"{data}{SHARE}/{path}" for path in ours} <= names
    packages = {name.split("/")[0] for name in names}
    assert {name for name in packages if "nsa_m7c" not in name} == {"nsa"}, "only ours on the path"


def test_without_a_clone_the_planner_and_the_recipe_find_their_files(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """Unpacked as pip does it, below a prefix of its own; the packages it needs are these."""
    packages = tmp_path / "site-packages"
    wheel.extractall(packages)
    (data,) = packages.glob("*.data/data")
    shutil.move(data / "share", tmp_path / "share")
    code = (
        "import sys, sysconfig\n"
        f"sysconfig.get_path = lambda name: {str(tmp_path)!r}\n"
        "import nsa; from nsa.cli import main\n"
        f"assert nsa.__file__.startswith({str(packages)!r}), nsa.__file__\n"
        "from nsa.shipped import shipped\n"
        "sys.exit(main(['plan', '--gpus', '2', '--link', 'pcie4', '--device', 'a100'])\n"
        "         or main(['check', str(shipped('ds_configs/zero2_pcie.json'))]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    assert "zero1_pcie" in done.stdout
    assert '"stage": 2' in done.stdout
