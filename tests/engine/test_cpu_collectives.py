"""CpuCollectives: an error on one rank is raised on all."""

from __future__ import annotations

from pathlib import Path

from tests.ranks import launch


def test_an_error_of_one_rank_is_raised_on_both_and_they_stay_in_step() -> None:
    output = launch(Path(__file__).with_name("collectives_ranks.py"), timeout=120)
    seen = ["passed", "sum: 1 None", "stop: SIGTERM on rank 1"]
    seen += ["raised: rank 1 got no batch", "passed again\n"]
    assert output == ["\n".join(seen)] * 2
