"""ZeRO stage x activation checkpointing x accumulation x dtype: the single-process parameters."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from nsa.model.config import ACTIVATION_CHECKPOINTING
from tests.engine.matrix_ranks import ZERO
from tests.ranks import launch

Cell = tuple[str, str, int, str]

EVERYTHING: list[Cell] = list(
    itertools.product(ZERO, ACTIVATION_CHECKPOINTING, (1, 2), ("fp32", "bf16"))
)
# Every stage meets every kind of checkpointing; accumulation and dtype change from cell to cell so
# that each pair of values of any two dimensions occurs.
COVERING: list[Cell] = [
    (zero, checkpointing, 1 + (row + column) % 2, ("fp32", "bf16")[(row + column // 2) % 2])
    for row, zero in enumerate(ZERO)
    for column, checkpointing in enumerate(ACTIVATION_CHECKPOINTING)
]
BOUND = 3  # in units of the error that rounding accounts for, see matrix_ranks.worst


def run(cells: list[Cell]) -> list[dict]:
    output = launch(Path(__file__).with_name("matrix_ranks.py"), json.dumps(cells), timeout=900)
    rows = [[json.loads(line) for line in text.splitlines() if line[:1] == "{"] for text in output]
    assert rows[0] == rows[1], "the ranks ended with different parameters"
    assert [tuple(row["cell"]) for row in rows[0]] == cells
    for row in rows[0]:
        print(row)
    return rows[0]


def check(cells: list[Cell]) -> None:
    rows = run(cells)
    assert [row for row in rows if row["error"] > BOUND] == []
    assert [row for row in rows if row["wrong"] < 2 * BOUND] == [], "a lost batch would pass"


def test_the_covering_cells_hold_every_pair_of_values() -> None:
    for first, second in itertools.combinations(range(4), 2):
        pairs = {(cell[first], cell[second]) for cell in EVERYTHING}
        assert {(cell[first], cell[second]) for cell in COVERING} == pairs


def test_two_ranks_end_with_the_parameters_of_one_process() -> None:
    check(COVERING)


@pytest.mark.full
def test_two_ranks_end_with_the_parameters_of_one_process_in_every_cell() -> None:
    check(EVERYTHING)


def test_stages_that_tolerate_it_train_a_block_shared_by_two_reentrant_segments() -> None:
    """The model that DDP dies of (test_preflight.py) gets its single-process gradients here."""
    tolerant = ("0", "1", "1-fp32acc")
    check([(zero, "shared reentrant", 2, "fp32") for zero in tolerant])


def test_every_stage_trains_a_shared_block_without_reentrant_checkpointing() -> None:
    check([(zero, "shared non_reentrant", 1, "fp32") for zero in ZERO if zero != "3"])
