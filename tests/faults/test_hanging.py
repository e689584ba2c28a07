"""Ranks that hang: the watchdog ends them, says who and where, and nothing else is lost."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.faults.conftest import Aftermath
from tests.faults.harness import start_faulty, suffered, watch

LIMITS = {"data": 5.0, "compute": 5.0, "silence": 3.0, "grace": 3.0}
SETTINGS = [f"--set=monitor.watch.{name}={seconds:g}" for name, seconds in LIMITS.items()]
HALTED = 4


@pytest.mark.parametrize(
    ("do", "where", "phase"),
    [
        ("hang", "forward", "forward"),
        pytest.param("hang", "data", "data", marks=pytest.mark.full),
        pytest.param("hang", "collective", "data", marks=pytest.mark.full),
        ("stop", "backward", None),
    ],
)
def test_a_rank_that_hangs_is_told_of_and_the_run_is_ended(
    do: str, where: str, phase: str | None, tmp_path: Path, aftermath: Aftermath
) -> None:
    run = start_faulty(tmp_path, do, where, *SETTINGS, ranks=[1])
    watchdog = watch(run)
    run.ranks.codes(120)
    ended = time.time()
    run.end()
    assert watchdog.codes(60) == [HALTED], watchdog.text("err")
    halt = json.loads((run.dir / "halt.json").read_text())
    assert halt["reason"] in watchdog.text("err")
    if do == "stop":  # nobody has heard of where it stopped
        assert (halt["rank"], halt["limit"]) == (1, LIMITS["silence"])
    elif where == "data":  # once it is asked to end it waits for data no longer, and saves
        assert (halt["phase"], halt["step"]) == (phase, 5)
        assert run.codes == [0, 0]
    else:
        rank = halt["ranks"]["1"]
        assert (rank["phase"], rank["step"]) == (phase, 5)
        assert halt["limit"] == LIMITS["compute"]
        assert "faulty.py" in (run.dir / "stacks/rank1.txt").read_text(), "where it hangs"
    aftermath("stop" if do == "stop" else "hang", where, run, suffered(run), ended)
