"""SIGTERM, SIGINT and a clock that jumps: the run saves and exits, or is not affected."""

from __future__ import annotations

import signal as signals
import time
from pathlib import Path

import pytest

from nsa.engine.shutdown import CTRL_C_AGAIN_SECONDS
from tests.engine.runs import losses, read_metrics
from tests.faults.conftest import CheckResumed, Golden
from tests.faults.harness import Run, fault_time, start_faulty, weights
from tests.faults.table import Outcomes

full = pytest.mark.full
ONE, BOTH = [1], [0, 1]


@pytest.mark.parametrize(
    ("signal", "where", "ranks"),
    [
        ("term", "eval", ONE),
        pytest.param("term", "forward", ONE, marks=full),
        pytest.param("int", "eval", BOTH, marks=full),
        pytest.param("term", "save", [0], marks=full),
        pytest.param("term", "data", ONE, marks=full),
        pytest.param("term", "backward", BOTH, marks=full),
        pytest.param("term", "step", [0], marks=full),
        pytest.param("term", "collective", ONE, marks=full),
        pytest.param("term", "file", BOTH, marks=full),
        pytest.param("int", "data", BOTH, marks=full),
    ],
)
def test_a_signalled_run_finishes_its_step_and_saves(
    signal: str, where: str, ranks: list[int], tmp_path: Path, check_resumed: CheckResumed
) -> None:
    step = 5 if where == "eval" else 8 if where in ("save", "file") else 6
    run = start_faulty(tmp_path, signal, where, step=step, ranks=ranks)
    assert run.ranks.codes(120) == [0, 0], run.output[-3_000:]
    ended = time.time()
    run.end()
    assert "preempted" in run.output
    resumed = check_resumed("signal", f"SIG{signal.upper()} {where}", run, fault_time(run), ended)
    ends = [beat for beat in run.beats(0) if beat["event"] == "end"]
    assert len(ends) == 2, "of the run and of the resumed one"
    assert ends[0]["status"].startswith("preempted")
    assert resumed.step == int(ends[0]["step"]), "no step is lost"
    if where == "eval":
        row = read_metrics(run.dir)[step - 1]
        assert (row["step"], row["val_loss"]) == (step, None), "the evaluation was finished first"


@pytest.mark.full
@pytest.mark.parametrize("jump", ["clock back", "clock forward"])
def test_a_clock_that_jumps_changes_nothing(
    jump: str, tmp_path: Path, golden: Golden, outcomes: Outcomes
) -> None:
    run = start_faulty(tmp_path, jump, "forward", ranks=[0]).end()
    fault_time(run)
    assert run.codes == [0, 0], run.output[-3_000:]
    assert losses(run.dir) == golden.losses
    assert weights(run.dir) == golden.weights
    outcomes.record("clock", jump, codes=run.codes, lost=0, exact=True)


def interrupt(run: Run) -> None:
    for rank in run.ranks.started:
        rank.kill(signals.SIGINT)


def test_ctrl_c_in_the_gradient_check_ends_the_run_without_a_traceback(tmp_path: Path) -> None:
    run = start_faulty(tmp_path, "hang", "forward", step=0, ranks=BOTH)
    run.wait_for(lambda: len(list(tmp_path.glob("happened.*"))) == 2, "no gradient check")
    interrupt(run)
    assert run.end().codes == [130, 130], run.output[-3_000:]
    line = "nsa: gradient check: one backward pass of 96 tokens"
    assert run.ranks.text("err").splitlines()[-1] == line
    assert not (run.dir / "config.yaml").exists(), "the run has not begun"


def test_a_second_ctrl_c_in_a_step_that_hangs_is_recorded_as_the_reason_of_the_end(
    tmp_path: Path,
) -> None:
    run = start_faulty(tmp_path, "hang", "forward", ranks=BOTH)
    run.wait_for(lambda: len(list(tmp_path.glob("happened.*"))) == 2, "no step 6")
    interrupt(run)
    time.sleep(CTRL_C_AGAIN_SECONDS + 0.5)
    assert run.ranks.codes() == [None, None], "the first one lets the step finish"
    interrupt(run)
    assert run.end().codes == [130, 130], run.output[-3_000:]
    assert "Traceback" not in run.output
    line = "nsa: SIGINT: the run saves after this step; Ctrl-C again ends it at once\n"
    assert run.ranks.text("err").count(line) == 1, "of rank 0 alone"
    ends = [run.beats(rank)[-1] for rank in BOTH]
    assert [end["event"] for end in ends] == ["end", "end"]
    assert [end["status"] for end in ends] == ["failed: KeyboardInterrupt"] * 2
    assert "| end | failed: KeyboardInterrupt |" in (run.dir / "report.md").read_text()
