"""Ranks that hang: the watchdog ends the run and reports which rank hung where."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.faults.conftest import CheckResumed
from tests.faults.harness import fault_time, start_faulty

LIMITS = {"compute": 3.0, "silence": 3.0}  # seconds
HALTED = 4
full = pytest.mark.full


@pytest.mark.parametrize(
    ("action", "where", "phase"),
    [
        ("hang", "forward", "forward"),
        pytest.param("hang", "data", "data", marks=full),
        pytest.param("hang", "collective", "data", marks=full),
        pytest.param("stop", "backward", None, marks=full),
    ],
)
def test_a_rank_that_hangs_is_reported_and_the_run_is_ended(
    action: str, where: str, phase: str | None, tmp_path: Path, check_resumed: CheckResumed
) -> None:
    limits = LIMITS
    if action == "stop":  # its silence must be noticed before its peer's wait for it
        limits = LIMITS | {"compute": 6.0}
    settings = [f"--set=monitor.watch.{name}={seconds:g}" for name, seconds in limits.items()]
    run = start_faulty(tmp_path, action, where, *settings, ranks=[1], watched=True).end()
    ended = time.time()
    assert run.codes == [HALTED], run.output[-3_000:]
    halt = json.loads((run.dir / "halt.json").read_text())
    assert halt["reason"] in run.output
    if action == "stop":  # no heartbeat says where
        assert (halt["rank"], halt["limit"]) == (1, LIMITS["silence"])
    elif where == "data":  # SIGTERM interrupts waiting for data, so the run saves
        assert (halt["phase"], halt["step"]) == (phase, 5)
        assert {run.beats(rank)[-1]["status"] for rank in (0, 1)} == {"preempted: SIGTERM"}
    else:
        rank = halt["ranks"]["1"]
        assert (rank["phase"], rank["step"]) == (phase, 5)
        assert halt["limit"] == LIMITS["compute"]
        assert "faulty.py" in (run.dir / "stacks/rank1.txt").read_text(), "where it hangs"
    check_resumed("stop" if action == "stop" else "hang", where, run, fault_time(run), ended)
