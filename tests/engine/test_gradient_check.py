"""F1 and F2: what DDP died of, and what is refused here before training starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa.engine.gradient_check import GradientReport
from tests.ranks import launch

WORKER = Path(__file__).with_name("gradient_check_ranks.py")


@pytest.fixture(scope="module")
def reports() -> dict[str, GradientReport]:
    output = launch(WORKER, "inspect")
    found = []
    for text in output:
        rows = [json.loads(line) for line in text.splitlines() if line[:1] == "{"]
        found.append({row.pop("model"): GradientReport(**row) for row in rows})
    assert found[0] == found[1], "the ranks must agree, or one would stop and the other hang"
    return found[0]


def test_a_model_that_keeps_the_rule_is_reported_clean(reports: dict[str, GradientReport]) -> None:
    assert reports["sound"] == GradientReport(twice=[], missing=[])


def test_a_block_shared_by_two_reentrant_segments_is_named(
    reports: dict[str, GradientReport],
) -> None:
    assert "blocks.0.mlp.down.weight" in reports["shared block"].twice
    assert reports["shared block"].missing == []


def test_a_tied_head_inside_a_reentrant_segment_is_named(
    reports: dict[str, GradientReport],
) -> None:
    assert reports["head inside"].twice == ["embed.weight"]


def test_a_parameter_that_one_rank_skips_is_named_on_both(
    reports: dict[str, GradientReport],
) -> None:
    missing = reports["skips on one rank"].missing
    assert missing
    assert all(name.startswith("blocks.1.") for name in missing)


def test_ddp_with_a_shared_block_dies_with_the_error_of_the_earlier_runs() -> None:
    for text in launch(WORKER, "ddp", "shared block", "reentrant"):
        assert "Expected to mark a variable ready only once" in text


def test_ddp_passes_where_no_parameter_fires_twice() -> None:
    for text in launch(WORKER, "ddp", "sound", "reentrant"):
        assert "backward passed" in text
