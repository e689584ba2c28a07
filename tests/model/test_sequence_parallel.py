"""Ranks that share a sequence compute what one rank computes with all of it."""

from __future__ import annotations

import json
from pathlib import Path

from nsa.model.config import ACTIVATION_CHECKPOINTING
from tests.ranks import launch

CASES = [
    ("mean", "reentrant", "documents", 2_048),
    ("mean", "none", "one document", 2_048),
    *(("mlp", mode, "documents", 512) for mode in ACTIVATION_CHECKPOINTING),
    ("mean, shared", "none", "rows", 512),
    ("dense", "non_reentrant", "documents", 512),
    ("mean", "none", "nothing to learn", 512),
]


def test_two_ranks_that_share_a_sequence_have_one_ranks_loss_and_gradients() -> None:
    """In float64, where a difference in what is summed shows and one in its order does not."""
    output = launch(Path(__file__).with_name("sequence_ranks.py"), json.dumps(CASES))
    for text in output:
        rows = [json.loads(line) for line in text.splitlines() if line[:1] == "{"]
        assert [tuple(row["case"]) for row in rows] == CASES
        assert [row for row in rows if row["error"] > 1e-10] == []
