"""Ranks that are killed, hang, raise, get signals or compute NaN.

What the others do, and what is resumed.
"""

import json
import random
import re
import signal as signals
import sys
import time
from pathlib import Path

import pytest

from nsa.engine.shutdown import CTRL_C_AGAIN_SECONDS
from tests.engine.runs import LIMIT, losses, read_metrics
from tests.faults.conftest import CheckResumed, Golden
from tests.faults.harness import EVERY, STEPS, Run, fault_time, resume, start, start_faulty, weights
from tests.faults.table import Outcomes

full = pytest.mark.full


@pytest.mark.parametrize(
    ("where", "call", "rank"),
    [
        ("backward", 1, 1),
        ("file", 14, 0),  # the n-th of a save's fsync and rename calls
        *(
            pytest.param(where, call, rank, marks=full)
            for where, call, rank in (
                ("data", 1, 1),
                ("forward", 1, 0),
                ("step", 1, 0),
                ("collective", 2, 1),
                ("eval", 1, 1),
                ("save", 1, 0),
                ("file", 3, 1),
                *(("file", call, 0) for call in (1, 6, 9, 12, 13, 15, 16)),
            )
        ),
    ],
)
def test_a_killed_rank_ends_the_run_and_loses_only_the_steps_since_the_last_save(
    where: str, call: int, rank: int, tmp_path: Path, check_resumed: CheckResumed
) -> None:
    step = 8 if where in ("file", "save") else 6
    run = start_faulty(tmp_path, "kill", where, step=step, ranks=[rank], call=call).end()
    assert run.codes[rank] == -9
    assert run.codes[1 - rank] not in (0, None)
    last_saved = max(int(path.name[4:]) for path in (run.dir / "checkpoints").glob("step*"))
    resumed = check_resumed("kill-rank", f"{where} {call}", run)
    assert resumed.step == last_saved
    assert resumed.step >= EVERY


@full
@pytest.mark.parametrize("seed", range(20))
def test_ranks_can_be_killed_at_any_moment(
    seed: int, tmp_path: Path, golden: Golden, check_resumed: CheckResumed
) -> None:
    rng = random.Random(seed)
    victims = rng.choice([[0], [1], [0, 1]])
    run = start(tmp_path)
    run.wait_for_step(rng.randint(1, STEPS - 2))
    time.sleep(rng.uniform(0, golden.seconds / STEPS))
    killed = time.time()
    for rank in victims:
        run.ranks.started[rank].kill()
    run.end()
    assert [run.codes[rank] for rank in victims] == [-9] * len(victims)
    check_resumed("kill-any-time", f"moment {seed}", run, killed)


LIMITS = {"compute": 3.0, "silence": 3.0}  # seconds
HALTED = 4


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
    assert run.codes == [HALTED], run.output[-3_000:]
    halt = json.loads((run.dir / "halt.json").read_text())
    assert halt["reason"] in run.output
    if action == "stop":  # no heartbeat says where
        assert (halt["rank"], halt["limit"]) == (1, LIMITS["silence"])
    elif where == "data":  # SIGTERM interrupts waiting for data, so the run saves
        assert (halt["phase"], halt["step"]) == (phase, 5)
        for rank in (0, 1):
            assert run.beats(rank)[-1]["status"].startswith("preempted: SIGTERM")
    else:
        rank = halt["ranks"]["1"]
        assert (rank["phase"], rank["step"]) == (phase, 5)
        assert halt["limit"] == LIMITS["compute"]
        assert "faulty.py" in (run.dir / "stacks/rank1.txt").read_text(), "where it hangs"
    check_resumed("stop" if action == "stop" else "hang", where, run)


BAD_STEP = 6


def run_with(folder: Path, policy: str, value: str, where: str, rank: int) -> Run:
    """Run to the end, with a bad value at BAD_STEP."""
    settings = [
        f"--set=train.on_bad_step={policy}",
        "--set=monitor.log_every=5",  # a logged loss that is not finite is a No-Go
    ]
    run = start_faulty(folder, value, where, *settings, step=BAD_STEP, ranks=[rank]).end()
    fault_time(run)
    return run


@pytest.mark.parametrize(
    ("value", "where", "rank"),
    [
        ("inf", "gradient", 0),
        pytest.param("nan", "loss", 1, marks=full),
        pytest.param("inf", "loss", 0, marks=full),
        pytest.param("nan", "gradient", 1, marks=full),
    ],
)
def test_a_bad_value_on_one_rank_is_skipped_by_all_or_aborts_before_the_update(
    value: str, where: str, rank: int, tmp_path: Path, golden: Golden, outcomes: Outcomes
) -> None:
    folders = {policy: tmp_path / policy for policy in ("skip", "abort")}
    for folder in folders.values():
        folder.mkdir()
    skipped = run_with(folders["skip"], "skip", value, where, rank)
    assert skipped.codes == [0, 0], skipped.output[-3_000:]
    assert f"step {BAD_STEP}: " in skipped.output
    assert "not finite" in skipped.output
    assert skipped.beats(0)[-1]["skipped"] == 1
    by_step = losses(skipped.dir)
    assert sorted(by_step) == [1, 5, 10, 12]
    assert {step for step in by_step if by_step[step] == golden.losses[step]} == {1, 5}
    assert skipped.beats(0)[-1]["loss"] == pytest.approx(by_step[12])
    outcomes.record("nan-skip", f"{value} {where}", codes=skipped.codes, lost=0)

    aborted = run_with(folders["abort"], "abort", value, where, rank)
    assert aborted.codes == [3, 3]
    resumed = resume(folders["abort"])
    assert resumed.step == BAD_STEP, "a checkpoint was saved"
    assert resumed.losses == by_step
    assert resumed.weights == weights(skipped.dir)
    starts = [beat for beat in aborted.beats(0) if beat["event"] == "start"]
    first, second = ((beat["step"], beat["skipped"], beat["tokens"]) for beat in starts)
    assert first == (0, 0, 0)
    assert second == (BAD_STEP, 1, aborted.beats(0)[-1]["tokens"] // STEPS * BAD_STEP)
    outcomes.record(
        "nan-abort",
        f"{value} {where}",
        codes=aborted.codes,
        lost=0,
        seconds=round(aborted.ended - fault_time(aborted), 1),
        exact=True,
    )


def test_an_exception_on_one_rank_ends_the_run(tmp_path: Path, check_resumed: CheckResumed) -> None:
    run = start_faulty(tmp_path, "raise", "backward", ranks=[1]).end()
    assert run.codes[1] == 1, "not 2, as a user's mistake: it may be restarted"
    assert run.codes[0] not in (0, None)
    errors = run.ranks.started[1].text("err")
    assert "ValueError: planted in backward" in errors
    if sys.version_info >= (3, 11):
        assert errors.endswith("\nresume: --run-dir run --resume\n")
    check_resumed("crash", "backward", run)


@pytest.mark.full
def test_an_unknown_token_ends_the_run(tmp_path: Path, check_resumed: CheckResumed) -> None:
    run = start_faulty(tmp_path, "wrong token", "tokens", ranks=[0]).end()
    assert run.codes[0] == 1
    error = run.ranks.started[0].text("err")
    assert "Traceback" in error
    assert re.search(r"ValueError: input_ids contains 1\d{4}; ids are 0 to", error)
    check_resumed("wrong-token", "forward", run)


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
    run.end()
    assert "preempted" in run.output
    resumed = check_resumed("signal", f"SIG{signal.upper()} {where}", run)
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
    codes = [rank.wait(LIMIT) for rank in run.ranks.started]  # `end` would terminate the slower one
    assert run.end().codes == codes == [130, 130], run.output[-3_000:]
    line = "nsa: gradient check: one backward pass of 96 tokens"
    assert run.ranks.text("err").splitlines()[-1] == line
    assert not (run.dir / "config.yaml").exists(), "the run has not begun"


def test_a_second_ctrl_c_in_a_step_that_hangs_is_recorded_as_the_reason(tmp_path: Path) -> None:
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
