"""The wheel contains recipes and DeepSpeed configs, and the package finds them without a clone."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from functools import partial
from pathlib import Path

import pytest

from tests.engine.runs import TINY
from tests.launch.clone import capture
from tests.ranks import ROOT

SHARE = "share/nsa-m7c"
BUILD = "import os; from setuptools.build_meta import build_wheel; build_wheel(os.environ['TO'])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build as pip does, but with the installed packages and from a copy of the sources."""
    source, to = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("nsa", "recipes", "ds_configs"):
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    built = capture(sys.executable, "-c", BUILD, folder=source, TO=str(to))
    assert built.returncode == 0, built.stderr[-2_000:]
    (path,) = to.glob("*.whl")
    return zipfile.ZipFile(path)


def test_it_holds_all_modules_types_recipes_and_configs(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "nsa").rglob("*.py")} <= names
    assert "nsa/py.typed" in names
    (scripts,) = (name for name in names if name.endswith("entry_points.txt"))
    assert b"nsa = nsa.cli:main\n" in wheel.read(scripts) + b"\n"
    (data,) = {name.partition(SHARE)[0] for name in names if SHARE in name}
    for pattern in ("recipes/*.py", "ds_configs/*.json"):
        ours = {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)}
        assert ours
        assert {f"{data}{SHARE}/{path}" for path in ours} <= names
    packages = {name.split("/")[0] for name in names}
    assert {name for name in packages if "nsa_m7c" not in name} == {"nsa"}, "only ours on the path"


@pytest.mark.parametrize(
    ("packages", "share", "scheme"),
    [
        ("usr/lib/python3/site-packages", "data", "data"),
        (".local/lib/python3/site-packages", ".local", "usr"),  # --user
        ("target", "target", "usr"),  # --target
    ],
)
def test_without_a_clone_the_files_are_found_where_pip_puts_them(
    packages: str, share: str, scheme: str, wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path / packages)
    (data,) = (tmp_path / packages).glob("*.data/data")
    shutil.copytree(data / "share", tmp_path / share / "share")
    code = (
        "import sysconfig, nsa\n"
        f"sysconfig.get_path = lambda name: {str(tmp_path / scheme)!r}\n"
        "from nsa.system import resource_path\n"
        "for name in ('recipes/m7c.py', 'ds_configs', 'ds_configs/zero1_pcie.json'):\n"
        "    print(resource_path(name))\n"
    )
    done = capture(sys.executable, "-c", code, folder=tmp_path, PYTHONPATH=str(tmp_path / packages))
    assert done.returncode == 0, done.stderr
    paths = done.stdout.split()
    assert all(Path(path).exists() for path in paths)
    assert all(Path(path).is_relative_to(tmp_path / share / "share") for path in paths)


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin/` of an environment with the wheel, and of this project nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    packages = folder / sysconfig.get_path("purelib", "venv", {"base": ""}).lstrip("/")
    # A path in a .pth file is searched, but the .pth files in it, an editable install's, are not.
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    assert wheel.filename is not None
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python")]
    pip += ["install", "--quiet", "--no-deps", "--no-index", wheel.filename]
    subprocess.run(pip, check=True)
    return folder / "bin"


def run(installed: Path, folder: Path, program: str, *words: str) -> str:
    """Run a program of the environment in a folder; return what it prints."""
    path = f"{installed}:{os.environ['PATH']}"
    result = capture(installed / program, *words, folder=folder, PATH=path, PYTHONPATH="")
    assert result.returncode == 0, result.stdout[-2_000:] + result.stderr[-2_000:]
    return result.stdout


@pytest.mark.full
def test_an_installed_wheel_trains_resumes_and_reports(installed: Path, tmp_path: Path) -> None:
    """From an empty folder, by the names that the pages have."""
    path = run(installed, tmp_path, "python", "-c", "import nsa; print(nsa.__file__)")
    assert Path(path).is_relative_to(installed.parent)
    nsa = partial(run, installed, tmp_path, "nsa")
    files = ("--recipe=recipes/m7c_dense.py", "--deepspeed_config=ds_configs/zero2_pcie.json")
    assert nsa("plan", *files).startswith("zero2_pcie: 122,407,680 parameters")
    train = ("train", "--num_gpus", "1", "m7c", "--profile=demo", "--run-dir=run", *TINY)
    nsa(*train, "--dry-run")
    assert not [*tmp_path.iterdir()]
    config = "--deepspeed_config=ds_configs/zero0_debug.json"
    assert "step 3/3" in nsa(*train, "--steps=3", config)
    assert "step 5/5" in nsa(*train, "--steps=5", "--resume")
    assert nsa("report", "run") == "run/report.md\n"
    assert "Go for 5 steps" in (tmp_path / "run/report.md").read_text()
