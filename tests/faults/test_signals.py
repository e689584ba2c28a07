"""SIGTERM, SIGINT and a clock that jumps: the run ends in good order, or does not notice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.engine.runs import losses
from tests.faults.conftest import Aftermath, Golden
from tests.faults.harness import Run, start_faulty, suffered, weights
from tests.faults.outcomes import Outcomes

full = pytest.mark.full
ONE, BOTH = [1], [0, 1]


@pytest.mark.parametrize(
    ("do", "where", "ranks"),
    [
        ("term", "forward", ONE),
        ("int", "eval", BOTH),
        ("term", "save", [0]),
        pytest.param("term", "data", ONE, marks=full),
        pytest.param("term", "backward", BOTH, marks=full),
        pytest.param("term", "step", [0], marks=full),
        pytest.param("term", "collective", ONE, marks=full),
        pytest.param("term", "file", BOTH, marks=full),
        pytest.param("int", "data", BOTH, marks=full),
    ],
)
def test_a_run_that_is_asked_to_end_finishes_its_step_and_saves(
    do: str, where: str, ranks: list[int], tmp_path: Path, aftermath: Aftermath
) -> None:
    step = 5 if where == "eval" else 8 if where in ("save", "file") else 6
    run = start_faulty(tmp_path, do, where, step=step, ranks=ranks)
    assert run.ranks.codes(120) == [0, 0], run.said[-3_000:]
    ended = time.time()
    run.end()
    assert "preempted" in run.said
    resumed = aftermath("signal", f"SIG{do.upper()} {where}", run, suffered(run), ended)
    assert resumed.step == run_ended_at(run)


def run_ended_at(run: Run) -> int:
    """The step in the last heartbeat: nothing done is lost."""
    ends = [beat for beat in run.beats(0) if beat["event"] == "end"]
    assert len(ends) == 2, "of the run and of the resumed one"
    assert ends[0]["status"].startswith("preempted")
    return int(ends[0]["step"])


@pytest.mark.parametrize("do", ["clock back", pytest.param("clock on", marks=full)])
def test_a_clock_that_jumps_changes_nothing(
    do: str, tmp_path: Path, golden: Golden, outcomes: Outcomes
) -> None:
    run = start_faulty(tmp_path, do, "forward", ranks=[0]).end()
    suffered(run)
    assert run.codes == [0, 0], run.said[-3_000:]
    assert losses(run.dir) == golden.losses
    assert weights(run.dir) == golden.weights
    outcomes.tell("clock", do, codes=run.codes, lost=0, exact=True)
