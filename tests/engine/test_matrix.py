"""ZeRO stage x activation checkpointing x accumulation x dtype against a single process."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from nsa.model.config import ACTIVATION_CHECKPOINTING
from tests.engine.matrix_ranks import ZERO
from tests.ranks import launch_rows

Cell = tuple[str, str, int, str]

EVERYTHING: list[Cell] = list(
    itertools.product(ZERO, ACTIVATION_CHECKPOINTING, (1, 2), ("fp32", "bf16"))
)
# Every stage once; the modes, accumulation and dtype alternate.
STAGES: list[Cell] = [
    (zero, ACTIVATION_CHECKPOINTING[mode], 1 + row % 2, ("fp32", "bf16")[(row // 2) % 2])
    for (row, zero), mode in zip(enumerate(ZERO), (0, 1, 2, 3, 1, 4, 1), strict=True)
]
# A block that two segments share, which crashes DDP (test_checks.py).
SHARED: list[Cell] = [
    *((zero, "shared reentrant", 2, "fp32") for zero in ("0", "1", "1-fp32acc")),
    *((zero, "shared non_reentrant", 1, "fp32") for zero in ZERO if zero != "3"),
]
SOME_SHARED = [SHARED[2], SHARED[-1]]  # stages 1 and 2, either mode
BOUND = 3  # in multiples of the rounding error, see matrix_ranks.worst_error


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param([*STAGES, *SOME_SHARED], id="every stage"),
        pytest.param(SHARED, id="shared blocks", marks=pytest.mark.full),
        pytest.param(EVERYTHING, id="everything", marks=pytest.mark.full),
    ],
)
def test_two_ranks_end_with_the_parameters_of_one_process(cells: list[Cell]) -> None:
    program = Path(__file__).with_name("matrix_ranks.py")
    rows, other_rows = launch_rows(program, json.dumps(cells), timeout=900)
    assert rows == other_rows, "the ranks ended with different parameters"
    assert [tuple(row["cell"]) for row in rows] == cells
    assert [row for row in rows if row["error"] > BOUND] == []
    assert [row for row in rows if row["wrong"] < 2 * BOUND] == [], "a lost batch would pass"
