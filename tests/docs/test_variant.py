"""The guide's attention variant: its diffs apply to this code and its tests pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import blocks
from tests.ranks import ROOT

PAGE = ROOT / "docs/guides/attention-variant.md"


def test_the_diffs_of_the_guide_apply_and_their_tests_pass(tmp_path: Path) -> None:
    for name in ("nsa", "tests"):
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for block in blocks(PAGE):
        if block.language == "diff":
            apply = ["git", "apply", "-"]
            done = subprocess.run(apply, cwd=tmp_path, input=block.text, text=True,
                                  capture_output=True)  # fmt: skip
            assert done.returncode == 0, f"line {block.line}: {done.stderr}"
    ruff = [sys.executable, "-m", "ruff"]
    for check in (["check"], ["format", "--check"]):
        lint = subprocess.run([*ruff, *check, "nsa/model", "tests/model"], cwd=tmp_path,
                              capture_output=True, text=True)  # fmt: skip
        assert lint.returncode == 0, lint.stdout
    files = ["tests/model/test_weighted.py", "tests/model/test_config.py"]
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert tests.returncode == 0, tests.stdout[-3_000:] + tests.stderr
