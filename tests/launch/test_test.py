"""`launch/test.sh`, by way of `.ci/run`: every check runs, and any that fails fails the whole."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.ranks import ROOT


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
