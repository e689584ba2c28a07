"""F1 and F2: what crashed or hung under DDP is refused before training starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa.engine.gradient_check import GradientReport
from tests.ranks import launch

PROGRAM = Path(__file__).with_name("gradient_check_ranks.py")


@pytest.fixture(scope="module")
def reports() -> dict[str, GradientReport]:
    by_rank = []
    for text in launch(PROGRAM, "inspect"):
        rows = [json.loads(line) for line in text.splitlines() if line[:1] == "{"]
        by_rank.append({row.pop("model"): GradientReport(**row) for row in rows})
    assert by_rank[0] == by_rank[1], "the ranks must agree, or one would stop and the other hang"
    return by_rank[0]


def test_a_sound_model_passes(reports: dict[str, GradientReport]) -> None:
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


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("shared block", "Expected to mark a variable ready only once"),
        ("sound", "backward passed"),
    ],
)
def test_ddp_fails_as_the_earlier_runs_did_where_a_parameter_fires_twice(
    model: str, expected: str
) -> None:
    for text in launch(PROGRAM, "ddp", model):
        assert expected in text
