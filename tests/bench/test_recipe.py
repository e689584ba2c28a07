"""`recipe`: speed after the first row, and losses of the steps that a resume repeats."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench import recipe
from tests.bench.__main__ import main
from tests.bench.recipe import Rows, figures


def rows(*cells: tuple[int, float, float | None]) -> Rows:
    return [{"step": step, "loss": loss, "tokens_per_s": speed} for step, loss, speed in cells]


def test_steps_that_ran_twice_are_compared() -> None:
    before = rows((60, 3.5, 90.0), (70, 3.25, 90.0))  # after the checkpoint of step 50
    after = rows((50, 3.6, 80.0), (60, 3.5, 100.0), (70, 3.0, 120.0), (80, 2.9, 110.0))
    result = figures(after, before)
    assert result["tokens_per_s"] == 110.0  # without the first row, which warms up
    assert result["loss"] == 2.9
    assert (result["logged_twice"], result["largest_loss_difference"]) == (2, 0.25)


def test_a_run_that_logged_nothing_has_no_figures() -> None:
    result = figures([], [])
    assert result["tokens_per_s"] is None
    assert result["largest_loss_difference"] is None


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exists; name a new folder"):
        main(["recipe", "--run-dir", str(tmp_path)])


STUBBORN_RANK = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); " \
    "print('up', flush=True); time.sleep(60)"  # fmt: skip
LAUNCHER = (
    f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {STUBBORN_RANK!r}])"
)


def test_a_rank_that_outlives_its_launcher_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep the GPU's memory while the next stage runs."""
    monkeypatch.setattr(recipe, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(recipe, "POLL_SECONDS", 0.05)
    for launcher in (LAUNCHER, f"{LAUNCHER}; time.sleep(60)"):  # ends before the call, or by it
        with subprocess.Popen(
            [sys.executable, "-c", launcher], stdout=subprocess.PIPE, start_new_session=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            start = time.monotonic()
            recipe._end(process)
            assert process.stdout.read() == b""  # the rank held the other end
            assert 0.3 <= time.monotonic() - start < 8
            assert process.returncode is not None
