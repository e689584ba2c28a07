"""The launch path stays short: a layer's host time is time that a fast GPU waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_a_layers_launches_take_few_python_calls() -> None:
    """Calls and not seconds, which other load on the machine changes; 1,937 a layer were slow."""
    pytest.importorskip("triton")
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton.host_time", "1"],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    figures = json.loads(process.stdout)
    assert figures["launches"] > 10
    assert figures["python_calls"] < 410
