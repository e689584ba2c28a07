"""What one rank cannot do, none does."""

from __future__ import annotations

from pathlib import Path

from tests.ranks import launch


def test_an_error_of_one_rank_is_raised_on_both_and_they_stay_in_step() -> None:
    said = launch(Path(__file__).with_name("consensus_ranks.py"), timeout=120)
    assert said == ["went on\nraised: rank 1 got no batch\nstill together\n"] * 2
