"""`launch/gpu.sh` runs everything that needs a GPU; a failing stage does not stop the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from nsa.bench.__main__ import parser
from tests.ranks import ROOT

SANITIZER = "tests/ops/triton/test_gpu.py::test_compute_sanitizer_finds_nothing"


def gpu_sh(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", ROOT / "launch/gpu.sh", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=60,
    )


def test_the_script_only_runs_benchmarks_and_flags_that_exist(tmp_path: Path) -> None:
    for flags in ([], ["--rehearse"]):
        done = gpu_sh("--dry-run", "--out", str(tmp_path / "x"), *flags, PYTHON="python")
        assert done.returncode == 0, done.stderr
        commands = [line.split() for line in done.stdout.splitlines()]
        assert len(commands) == 8
        assert f"--deselect={SANITIZER}" in commands[0]
        limits = 0.0
        for words in commands:
            if words[:3] == ["python", "-m", "nsa.bench"]:
                limits += getattr(parser(words[3:]).parse_args(words[3:]), "limit", 0)
        assert 0 < limits < 600
    assert not (tmp_path / "x").exists()


NEEDED_FOR_TRAINING = """
import sys
for name in ("deepspeed", "datasets", "transformers", "tensorboard", "flash_attn", "matplotlib",
             "yaml", "psutil", "zstandard", "aiohttp", "tqdm", "safetensors", "tokenizers"):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(["--collect-only", *sys.argv[1:]]))
"""


def test_its_tests_are_all_gpu_tests_and_import_without_training_packages() -> None:
    printed = gpu_sh("--dry-run", "--stage", "tests", "--stage", "sanitizer").stdout
    tests, sanitizer = (line.split()[3:] for line in printed.splitlines())
    marked = {
        path
        for package in ("ops", "model", "bench")
        for path in (ROOT / "tests" / package).rglob("test_*.py")
        if "mark.gpu" in path.read_text()
    }
    roots = [ROOT / word for word in tests if word.startswith("tests/")]
    assert all(any(path.is_relative_to(root) for root in roots) for path in marked)
    done = subprocess.run([sys.executable, "-c", NEEDED_FOR_TRAINING, *tests],
                          capture_output=True, text=True, cwd=ROOT)  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "test_gpu.py::test_the_loss_of_precision" in done.stdout
    assert "sanitizer" not in done.stdout
    assert sanitizer[-1] == SANITIZER


def test_a_missing_package_is_reported_before_anything_runs(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    missing = (tmp_path / "none", "not found; set PYTHON to a Python interpreter")
    for path, message in ((python, "lacks torch: install it"), missing):
        done = gpu_sh("--rehearse", "--out", str(tmp_path / "out"), PYTHON=str(path))
        assert done.returncode == 2
        assert f"{path} {message}" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_stage_saves_its_results(tmp_path: Path) -> None:
    done = gpu_sh("--rehearse", "--stage", "kernels", "--out", str(tmp_path / "out"),
                  PYTHON=sys.executable)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out/kernels.json").read_text())
    assert results["finished"]
    assert "nsa_attention blockwise" in (tmp_path / "out/gpu.log").read_text()
    assert "kernels" in done.stdout.splitlines()[-1]


def test_a_stage_that_hangs_or_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    """Not even if it leaves a process behind that holds its output open."""
    python = tmp_path / "python"
    python.write_text(
        "#!/usr/bin/env bash\n"
        'case "$*" in\n'
        "*bench\\ tune*) setsid sleep 8 & sleep 60 ;;\n"
        "*bench\\ kernels*) exit 3 ;;\n"
        "*) echo reached ;;\n"
        "esac\n"
    )
    python.chmod(0o755)
    start = time.monotonic()
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(
            ["bash", ROOT / "launch/gpu.sh", "--rehearse", "--limit", "1", "--out", tmp_path / "o",
             "--stage", "tune", "--stage", "kernels", "--stage", "train"],
            stdout=log, env={**os.environ, "PYTHON": str(python)},
        )  # fmt: skip
    assert time.monotonic() - start < 7
    assert done.returncode == 1
    *_, tune, kernels, last = (tmp_path / "log").read_text().splitlines()
    assert "ENDED by its limit" in tune
    assert "FAILED with exit code 3" in kernels
    assert last.startswith("gpu: train")
    assert last.endswith("done")
    assert "reached" in (tmp_path / "log").read_text()
