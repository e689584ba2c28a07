"""Small stand-ins for the repository, in which tests run the real scripts of `launch/`."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

from tests.ranks import ROOT

PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """\
import shutil

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return shutil.copy("wheels/nsa_m7c-0-py3-none-any.whl", wheel_directory).rpartition("/")[2]
"""
TORCH = {
    "torch.py": "import os\nclass cuda:\n"
    "    device_count = staticmethod(lambda: int(os.environ['TOY_GPUS']))\n",
    "deepspeed/launcher.py": "import sys\ndef main():\n    print('launched with', sys.argv[1:])\n",
    "torch-{version}.dist-info/entry_points.txt": "[console_scripts]\n"
    "deepspeed = deepspeed.launcher:main\n",
}


NSA = {
    "nsa/__init__.py": "",
    "nsa/cli.py": "import os, sys\ndef main():\n"
    "    print('called with', sys.argv[1:], flush=True)\n"
    "    if '--' in sys.argv:\n"
    "        command = sys.argv[sys.argv.index('--') + 1 :]\n"
    "        os.execvp(command[0], command)\n",
    "nsa_m7c-{version}.dist-info/entry_points.txt": "[console_scripts]\nnsa = nsa.cli:main\n",
}


def capture(
    *words: str | Path, folder: Path | None = None, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program, with more environment variables, and capture its output."""
    env = os.environ | variables
    return subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout
    )


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Write the smallest wheel that pip installs."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: dev\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path.format(version=version), text)
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def write_script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def make_clone(folder: Path) -> Path:
    """Create a clone with the real scripts and toy packages that install in a second, offline."""
    clone = folder / "a clone"  # people's folders have spaces
    shutil.copytree(ROOT / "launch", clone / "launch")
    (clone / "launch/constraints.txt").write_text("torch==2.13.0\n")
    (clone / "pyproject.toml").write_text(PYPROJECT)
    (clone / "backend.py").write_text(BACKEND)
    (clone / "wheels").mkdir()
    write_wheel(clone / "wheels", "torch", "2.13.0", TORCH)
    write_wheel(clone / "wheels", "torch", "2.13.1", TORCH)
    write_wheel(clone / "wheels", "nsa_m7c", "0", NSA)
    return clone


def make_installed_clone(folder: Path) -> Path:
    """Create a clone as its setup.sh would leave it, without the seconds of pip."""
    clone = make_clone(folder)
    (clone / "launch/setup.sh").write_text("echo 'setup: .venv is ready'\n")
    venv.create(clone / ".venv", symlinks=True)
    (packages,) = (clone / ".venv").glob("lib/python3*/site-packages")
    for wheel in ("torch-2.13.0", "nsa_m7c-0"):
        zipfile.ZipFile(clone / f"wheels/{wheel}-py3-none-any.whl").extractall(packages)
    for name, module in (("nsa", "nsa.cli"), ("deepspeed", "deepspeed.launcher")):
        text = f"#!/usr/bin/env python\nfrom {module} import main\nmain()\n"
        write_script(clone / ".venv/bin" / name, text)
    return clone


def environment(clone: Path, **changes: str) -> dict[str, str]:
    """Return os.environ without a selected compiler, Python or GPU; pip finds only the wheels."""
    selectors = ("CXX", "PYTHON", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")
    env = {key: value for key, value in os.environ.items() if key not in selectors}
    pip = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": (clone / "wheels").as_uri(),
        "PIP_CONFIG_FILE": os.devnull,
    }
    return {**env, **pip, "PYTHON": sys.executable, "TOY_GPUS": "0", **changes}


def start(clone: Path, script: str, *args: str, **changes: str) -> subprocess.Popen[str]:
    """Start a script of the clone from another folder, in a new process group."""
    return subprocess.Popen(
        ["bash", str(clone / "launch" / script), *args],
        cwd="/",
        env=environment(clone, **changes),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(clone: Path, script: str, *args: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the clone from another folder to its end."""
    process = start(clone, script, *args, **changes)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
