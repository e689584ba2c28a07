"""Killed ranks: saved checkpoints stay valid, and a resumed run repeats the uninterrupted one."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.faults.conftest import CheckResumed, Golden
from tests.faults.harness import EVERY, STEPS, fault_time, start, start_faulty

full = pytest.mark.full


@pytest.mark.parametrize(
    ("where", "call", "rank"),
    [
        ("backward", 1, 1),
        ("file", 14, 0),  # the 14th of a save's fsync and rename calls
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
    ended = time.time()
    assert run.codes[rank] == -9
    assert run.codes[1 - rank] not in (0, None)
    last_saved = max(int(path.name[4:]) for path in (run.dir / "checkpoints").glob("step*"))
    resumed = check_resumed("kill-rank", f"{where} {call}", run, fault_time(run), ended)
    assert resumed.step == last_saved
    assert resumed.step >= EVERY


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=full) for n in range(1, 20))])
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
    ended = time.time()
    assert [run.codes[rank] for rank in victims] == [-9] * len(victims)
    check_resumed("kill-any-time", f"moment {seed}", run, killed, ended)
