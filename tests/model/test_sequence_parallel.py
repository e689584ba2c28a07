"""Sequence parallelism: ranks that share a sequence compute what a single rank computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa.model.config import ACTIVATION_CHECKPOINTING
from tests.ranks import launch_rows

CASES = [
    ("mean", "reentrant", "documents", 2_048),
    ("mlp", "selective", "documents", 512),
    ("mean", "none", "rows", 512),
    ("dense", "non_reentrant", "documents", 512),
    ("mean", "none", "all ignored", 512),
    ("mean", "none", "teacher", 512),
    ("mean, selector loss", "reentrant", "documents", 512),
    ("pool, selector loss", "none", "rows", 512),
    ("mean, selector loss, imported", "reentrant", "documents", 512),
    ("index", "reentrant", "documents", 512),
    ("index, mean, imported", "none", "rows", 512),
]
FURTHER_CASES = [
    ("mean", "none", "one document", 2_048),
    ("mlp, selector loss", "none", "rows", 512),
    *(
        ("mean, selector loss", mode, "rows", 512)
        for mode in ACTIVATION_CHECKPOINTING
        if mode != "reentrant"
    ),
    *(("mlp", mode, "documents", 512) for mode in ACTIVATION_CHECKPOINTING if mode != "selective"),
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(FURTHER_CASES, marks=pytest.mark.full)])
def test_two_ranks_that_share_a_sequence_have_one_ranks_loss_and_gradients(
    cases: list[tuple[str, str, str, int]],
) -> None:
    """In float64, which shows a wrong sum but not a different order of summation."""
    for rows in launch_rows(Path(__file__).with_name("sequence_ranks.py"), json.dumps(cases)):
        assert [tuple(row["case"]) for row in rows] == cases
        assert [row for row in rows if row["error"] > 1e-10] == []
