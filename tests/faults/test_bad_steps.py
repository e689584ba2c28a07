"""Bad steps on one rank: NaN and inf skip or abort all ranks; an exception ends them."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from tests.engine.runs import losses
from tests.faults.conftest import CheckResumed, Golden
from tests.faults.harness import Run, fault_time, resume, start_faulty, weights
from tests.faults.table import Outcomes

BAD_STEP = 6
full = pytest.mark.full


def run_with(folder: Path, policy: str, value: str, where: str, rank: int) -> Run:
    """Run to the end, with a bad value at BAD_STEP."""
    settings = [
        f"--set=train.on_bad_step={policy}",
        "--set=monitor.log_every=5",  # a logged loss that is not finite is a No-Go
    ]
    run = start_faulty(folder, value, where, *settings, step=BAD_STEP, ranks=[rank]).end()
    fault_time(run)
    return run


def assert_differs_after_bad_step(by_step: dict[int, float], golden: Golden) -> None:
    assert sorted(by_step) == [1, 5, 10, 12]
    assert {step for step in by_step if by_step[step] == golden.losses[step]} == {1, 5}


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
    assert_differs_after_bad_step(by_step, golden)
    outcomes.record("nan-skip", f"{value} {where}", codes=skipped.codes, lost=0)

    aborted = run_with(folders["abort"], "abort", value, where, rank)
    assert aborted.codes == [3, 3]
    ended = time.time()
    resumed = resume(folders["abort"])
    assert resumed.step == BAD_STEP, "a checkpoint was saved"
    assert resumed.losses == by_step
    assert resumed.weights == weights(skipped.dir)
    outcomes.record(
        "nan-abort",
        f"{value} {where}",
        codes=aborted.codes,
        lost=0,
        seconds=round(ended - fault_time(aborted), 1),
        exact=True,
    )


def test_an_exception_on_one_rank_is_reported_and_ends_the_run(
    tmp_path: Path, check_resumed: CheckResumed
) -> None:
    run = start_faulty(tmp_path, "raise", "backward", ranks=[1]).end()
    ended = time.time()
    assert run.codes[1] == 1
    assert run.codes[0] not in (0, None)
    errors = run.ranks.started[1].text("err")
    assert "RuntimeError: planted in backward" in errors
    if sys.version_info >= (3, 11):
        assert errors.endswith("\nresume: --run-dir run --resume\n")
    check_resumed("crash", "backward", run, fault_time(run), ended)


@pytest.mark.full
def test_a_token_outside_the_vocabulary_ends_the_run(
    tmp_path: Path, check_resumed: CheckResumed
) -> None:
    run = start_faulty(tmp_path, "wrong token", "tokens", ranks=[0]).end()
    ended = time.time()
    assert run.codes[0] == 1
    error = run.ranks.started[0].text("err")
    assert "Traceback" in error
    assert re.search(r"ValueError: input_ids contains 1\d{4}; ids are 0 to", error)
    check_resumed("wrong-token", "forward", run, fault_time(run), ended)
