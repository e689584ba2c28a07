"""`nsa bench recipe`: speed after the first row, and losses of the steps that a resume repeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa.bench.__main__ import main
from nsa.bench.recipe import Rows, figures


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
