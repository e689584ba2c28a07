"""The compile check passes kernels within every limit of a chip and fails the others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT


def run(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the user's compile cache: the suite compiles unchanged kernels once."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**inherited, **env},
        capture_output=True,
        text=True,
        timeout=1200,
    )


def test_the_tests_in_uninterpreted_pass() -> None:
    flags = "-n", "0", "-rs", "--show-capture=no", "--noconftest", "-p", "no:cacheprovider"
    process = run("-m", "pytest", *flags, Path(__file__).with_name("uninterpreted.py"))
    assert process.returncode == 0, process.stdout
    assert "skipped" not in process.stdout, process.stdout


def test_the_command_compiles_what_its_flags_name(tmp_path: Path) -> None:
    """Also if Triton's interpreter is enabled, which compiles nothing."""
    out = tmp_path / "aot.json"
    command = "-m tests.bench aot --jobs 1 --arch sm_80 --operation swiglu"
    process = run(*command.split(), "--out", out, TRITON_INTERPRET="1")
    assert process.returncode == 0, process.stderr
    result = json.loads(out.read_text())
    assert result["failures"] == []
    assert result["triton"]
    assert len(result["rows"]) == 4  # two shapes, forward and backward
    assert {row["operation"] for row in result["rows"]} == {"swiglu"}
    assert {row["dtype"] for row in result["rows"]} == {"bf16"}


@pytest.mark.full
def test_every_operation_compiles_within_the_limits_of_every_chip(tmp_path: Path) -> None:
    out = tmp_path / "aot.json"
    process = run("-m", "tests.bench", "aot", "--jobs=2", "--out", out)
    assert process.returncode == 0, process.stdout
    rows = json.loads(out.read_text())["rows"]
    nvidia = {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"}
    assert {row["chip"] for row in rows} == {*nvidia, "gfx942"}
    assert {row["operation"] for row in rows} >= {"window_attention", "decode_attention"}
    for row in rows:
        assert not row["products"] or row["tensor_core"]
        if row["chip"] in ("sm_90", "sm_100") and row["operation"] != "decode_attention":
            assert row["asynchronous"] == row["tensor_core"]
