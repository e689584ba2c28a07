"""`launch/setup.sh`: the first call creates .venv, later ones return at once; errors name fixes."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.clone import make_clone, run, start, write_script
from tests.ranks import ROOT

READY = "setup: .venv is ready\n"


@pytest.fixture(scope="module")
def concurrent_setups(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A clone that two concurrent calls of setup.sh installed, and the outputs of both."""
    clone = make_clone(tmp_path_factory.mktemp("concurrent"))
    calls = [start(clone, "setup.sh") for _ in range(2)]
    outputs = ["".join(call.communicate(timeout=120)) for call in calls]
    assert [call.returncode for call in calls] == [0, 0], outputs
    return clone, outputs


@pytest.fixture
def installed_clone(concurrent_setups: tuple[Path, list[str]]) -> Path:
    return concurrent_setups[0]


def assert_refused(call: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line on stderr that holds the words, and exit code 1."""
    assert (call.returncode, call.stdout) == (1, "")
    assert call.stderr.count("\n") == 1, call.stderr
    for word in words:
        assert word in call.stderr


def killed_at(clone: Path, line: str) -> None:
    """Kill setup.sh once it has printed a line."""
    call = start(clone, "setup.sh")
    assert call.stdout
    assert any(line in text for text in call.stdout)
    os.killpg(call.pid, signal.SIGKILL)
    call.communicate()


def torch_version(clone: Path) -> str:
    code = "from importlib.metadata import version; print(version('torch'))"
    return subprocess.check_output([clone / ".venv/bin/python", "-c", code], text=True).strip()


@pytest.mark.parametrize("script", [*sorted(ROOT.glob("launch/*.sh")), ROOT / ".ci/run"], ids=str)
def test_every_script_parses_and_can_be_executed(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)


def test_two_calls_at_once_make_one_venv(concurrent_setups: tuple[Path, list[str]]) -> None:
    clone, outputs = concurrent_setups
    assert sum("creating .venv with Python" in text for text in outputs) == 1
    assert all(text.endswith(READY) for text in outputs)
    assert torch_version(clone) == "2.13.0"


def test_a_second_call_does_not_need_pip(installed_clone: Path) -> None:
    (pip,) = installed_clone.glob(".venv/lib/python3*/site-packages/pip")
    hidden = pip.rename(pip.with_name("hidden"))
    try:
        call = run(installed_clone, "setup.sh")
    finally:
        hidden.rename(pip)
    assert (call.returncode, call.stdout, call.stderr) == (0, READY, "")


def test_new_pins_are_installed_into_the_existing_venv(installed_clone: Path) -> None:
    constraints = installed_clone / "launch/constraints.txt"
    mark = installed_clone / ".venv/mark"
    mark.touch()
    constraints.write_text("torch==2.13.1\n")
    call = run(installed_clone, "setup.sh")
    assert call.returncode == 0, call.stderr
    assert torch_version(installed_clone) == "2.13.1"
    assert mark.exists()


def test_a_killed_install_is_repaired_and_a_failed_one_says_why(installed_clone: Path) -> None:
    clone, constraints = installed_clone, installed_clone / "launch/constraints.txt"
    constraints.write_text("torch == 2.13.1\n")
    killed_at(clone, "installing torch")
    constraints.write_text("torch==2.13.0\n")

    wheel = next(clone.glob("wheels/nsa*"))
    hidden = wheel.rename(clone / "hidden")
    failed = run(clone, "setup.sh")
    hidden.rename(wheel)
    assert "rebuilding it" in failed.stdout
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith("setup: pip could not install")

    repaired = run(clone, "setup.sh")
    assert repaired.returncode == 0, repaired.stderr
    assert "rebuilding" not in repaired.stdout
    assert torch_version(clone) == "2.13.0"


def test_a_clone_that_was_moved_gets_a_new_venv(installed_clone: Path, tmp_path: Path) -> None:
    shutil.copytree(installed_clone, tmp_path / "moved", symlinks=True)
    killed_at(tmp_path / "moved", "unfinished, broken or from another folder: rebuilding it")


@pytest.mark.parametrize(
    ("python", "words"),
    [
        # A stand-in in which every check fails, as setup.sh's do in an old Python.
        ("echo 'Python 3.8.20'\nexit 1", ("Python 3.10 or newer", "python3-stand-in")),
        (
            'exec {} -c "import sys; sys.modules[\'ensurepip\'] = None; exec(sys.argv[2])" "$@"',
            ("ensurepip", "python3-venv"),
        ),
        (
            'exec {} -c "import sys, sysconfig; sysconfig.get_path = str; exec(sys.argv[2])" "$@"',
            ("Python.h", "python3-dev"),
        ),
    ],
    ids=["old", "no ensurepip", "no headers"],
)
def test_a_python_that_is_old_or_lacks_a_part_is_refused_in_one_line(
    tmp_path: Path, python: str, words: tuple[str, str]
) -> None:
    text = f"#!/bin/sh\n{python.format(sys.executable)}\n"
    path = write_script(tmp_path / "python3-stand-in", text)
    clone = make_clone(tmp_path)
    assert_refused(run(clone, "setup.sh", PYTHON=str(path)), *words)
    assert not (clone / ".venv").exists()


def test_a_machine_without_a_compiler_is_refused_in_one_line(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "cat", "cksum", "find", "grep", "rm", "touch", "flock"):
        if path := shutil.which(name):
            (tools / name).symlink_to(path)
    clone = make_clone(tmp_path)
    assert_refused(run(clone, "setup.sh", PATH=str(tools)), "C++ compiler", "g++")
    assert_refused(run(clone, "setup.sh", CXX="no-such-c++"), "C++ compiler", "no-such-c++")
    for script in ("m7c.sh", "test.sh"):
        assert_refused(run(clone, script, PATH=str(tools)), "C++ compiler")
