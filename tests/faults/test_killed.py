"""Processes that are killed: what is saved stays whole, and a resumed run repeats the other."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.faults.conftest import Aftermath, Golden
from tests.faults.harness import EVERY, STEPS, start, start_faulty, suffered

full = pytest.mark.full
# The number is that of the call: of these, a save brings its files to disk and names them by.
MOMENTS = [
    ("data", 1, 1),
    pytest.param("forward", 1, 0, marks=full),
    ("backward", 1, 1),
    pytest.param("step", 1, 0, marks=full),
    pytest.param("collective", 2, 1, marks=full),
    pytest.param("eval", 1, 1, marks=full),
    pytest.param("save", 1, 0, marks=full),
    ("file", 3, 1),
    *(pytest.param("file", number, 0, marks=full) for number in (1, 6, 9, 12, 13, 14, 15, 16)),
    ("file", 14, 0),
]


@pytest.mark.parametrize(("where", "number", "rank"), MOMENTS)
def test_a_killed_rank_ends_the_run_and_costs_no_more_than_the_steps_since_the_last_save(
    where: str, number: int, rank: int, tmp_path: Path, aftermath: Aftermath
) -> None:
    step = 8 if where in ("file", "save") else 6
    run = start_faulty(tmp_path, "kill", where, step=step, ranks=[rank], number=number).end()
    ended = time.time()
    assert run.codes[rank] == -9
    assert run.codes[1 - rank] not in (0, None)
    last_saved = max(int(path.name[4:]) for path in (run.dir / "checkpoints").glob("step*"))
    resumed = aftermath("kill-rank", f"{where} {number}", run, suffered(run), ended)
    assert resumed.step == last_saved
    assert resumed.step >= (EVERY if step < 8 else 4)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=full) for n in range(3, 20))])
def test_at_a_random_moment_it_does_not_matter_who_is_killed(
    seed: int, tmp_path: Path, golden: Golden, aftermath: Aftermath
) -> None:
    chance = random.Random(seed)
    victims = chance.choice([[0], [1], [0, 1]])
    run = start(tmp_path)
    run.wait_for_step(chance.randint(1, STEPS - 2))
    time.sleep(chance.uniform(0, golden.seconds / STEPS))
    killed = time.time()
    for rank in victims:
        run.ranks.started[rank].kill()
    run.end()
    ended = time.time()
    assert [run.codes[rank] for rank in victims] == [-9] * len(victims)
    aftermath("kill-any-time", f"moment {seed}", run, killed, ended)
