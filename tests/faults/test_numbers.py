"""Numbers that are none: on one rank alone, they keep all ranks from the step, as was declared."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.engine.runs import losses
from tests.faults.conftest import Aftermath, Golden
from tests.faults.harness import EVERY, Run, resume, start_faulty, suffered, weights
from tests.faults.outcomes import Outcomes

BAD = 6
full = pytest.mark.full
PLACES = [
    pytest.param("nan", "loss", 1, marks=full),
    ("inf", "gradient", 0),
    pytest.param("inf", "loss", 0, marks=full),
    pytest.param("nan", "gradient", 1, marks=full),
]


def suffer(folder: Path, policy: str, do: str, where: str, rank: int) -> Run:
    """A run that meets the number at step BAD, to its end."""
    settings = [
        f"--set=train.on_bad_step={policy}",
        "--set=monitor.log_every=5",  # a loss that is not finite is No-Go where it is logged
        "--set=monitor.ladder.max_skipped=0.1",  # one step of twelve
    ]
    run = start_faulty(folder, do, where, *settings, step=BAD, ranks=[rank]).end()
    suffered(run)
    return run


@pytest.mark.parametrize(("do", "where", "rank"), PLACES)
def test_a_bad_number_of_one_rank_is_left_out_by_all_or_ends_the_run_before_the_weights_see_it(
    do: str, where: str, rank: int, tmp_path: Path, golden: Golden, outcomes: Outcomes
) -> None:
    folders = {policy: tmp_path / policy for policy in ("skip", "abort")}
    for folder in folders.values():
        folder.mkdir()
    skipped = suffer(folders["skip"], "skip", do, where, rank)
    assert skipped.codes == [0, 0], skipped.said[-3_000:]
    assert f"step {BAD}: " in skipped.said
    assert "not finite" in skipped.said
    assert skipped.beats(0)[-1]["skipped"] == 1
    found = losses(skipped.dir)
    assert sorted(found) == [1, 5, 10, 12]
    same = {step for step in found if found[step] == golden.losses[step]}
    assert same == {1, 5}, "a step was left out"
    outcomes.tell("nan-skip", f"{do} {where}", codes=skipped.codes, lost=0)

    aborted = suffer(folders["abort"], "abort", do, where, rank)
    assert aborted.codes == [3, 3]
    ended = time.time()
    resumed = resume(folders["abort"])
    assert resumed.step == BAD, "a checkpoint was saved"
    assert resumed.losses == found
    assert resumed.weights == weights(skipped.dir)
    seconds = round(ended - suffered(aborted), 1)
    outcomes.tell(
        "nan-abort", f"{do} {where}", codes=aborted.codes, lost=0, seconds=seconds, exact=True
    )


@pytest.mark.parametrize(
    ("do", "where", "rank"), [("nan", "gradient", 1), pytest.param("inf", "loss", 0, marks=full)]
)
def test_a_rollback_goes_back_to_the_last_save_and_passes_the_samples_over(
    do: str, where: str, rank: int, tmp_path: Path, golden: Golden, outcomes: Outcomes
) -> None:
    run = suffer(tmp_path, "rollback", do, where, rank)
    assert run.codes == [0, 0], run.said[-3_000:]
    assert f"rolled back to step {EVERY}" in run.said
    found = losses(run.dir)
    assert sorted(found) == [1, 5, 10, 12]
    same = {step for step in found if found[step] == golden.losses[step]}
    assert same == {1, 5}, "other samples came after these"
    outcomes.tell("nan-rollback", f"{do} {where}", codes=run.codes, lost=BAD - EVERY)


def test_an_exception_of_one_rank_is_seen_first_and_ends_the_run(
    tmp_path: Path, aftermath: Aftermath
) -> None:
    run = start_faulty(tmp_path, "raise", "backward", ranks=[1]).end()
    ended = time.time()
    assert run.codes[1] == 1
    assert run.codes[0] not in (0, None)
    assert "RuntimeError: planted in backward" in run.ranks.started[1].text("err")
    aftermath("crash", "backward", run, suffered(run), ended)


def test_a_token_that_the_vocabulary_does_not_have_ends_the_run(
    tmp_path: Path, aftermath: Aftermath
) -> None:
    run = start_faulty(tmp_path, "wrong token", "tokens", ranks=[0]).end()
    ended = time.time()
    assert run.codes[0] == 1
    assert "index out of range" in run.ranks.started[0].text("err")
    aftermath("wrong-token", "forward", run, suffered(run), ended)
