"""The block selection kernel selects as the definition does, up to rounding of scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from nsa.ops import compressed_attention, select_blocks
from nsa.ops.triton.configs import Config, override_choices
from nsa.spec import NSASpec
from tests.ops.cases import (
    Case,
    default,
    exact_score,
    random_cases,
    same_selection,
    selection,
)
from tests.ops.triton.parity import DEVICE, inputs, reference_blocks

RANDOM = random_cases(14 if DEVICE.type == "cpu" else 7, longest=36, seed=2)
PATTERNS = [
    Case(NSASpec(32, 16, 64, 3, 1, 1, 512), (400,), kv_heads=1, group=6, key_dim=16),
    Case(NSASpec(32, 16, 64, 4, 1, 2, 512), (150, 0, 1, 350), kv_heads=1, key_dim=8),
    Case(NSASpec(4, 2, 4, 1, 0, 1, 5), (50,), batch=2, group=3),
    Case(NSASpec(4, 3, 4, 2, 0, 1, 5), (75,), kv_heads=1, group=1),
    Case(NSASpec(9, 7, 5, 7, 2, 1, 5), (80,), kv_heads=1, group=4),
    Case(NSASpec(2, 1, 11, 3, 0, 1, 5), (90,), kv_heads=1),
    Case(NSASpec(30, 3, 2, 5, 1, 1, 5), (29,)),
    Case(NSASpec(4, 4, 3, 35, 1, 2, 5), (131,), kv_heads=1, group=1),
    # Tiles of sixteen blocks that every query of a tile sees.
    Case(NSASpec(5, 2, 2, 4, 1, 1, 5), (121,), kv_heads=1, group=2),
    Case(NSASpec(3, 3, 4, 3, 0, 1, 5), (150, 1, 47), kv_heads=1, group=1),
    Case(NSASpec(20, 2, 2, 4, 0, 2, 5), (113,), kv_heads=1, group=1),
]


@pytest.fixture
def small_tiles() -> Iterator[None]:
    """Several tiles of blocks, so that later blocks compete with the best so far."""
    with override_choices(lambda *_: Config(16, 16, 4, 1)):
        yield


@pytest.fixture(params=["default tiles", "small tiles"])
def tiles(request: pytest.FixtureRequest) -> None:
    if request.param == "small tiles":
        request.getfixturevalue("small_tiles")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", default(5, RANDOM) + default(9, PATTERNS[1:]), ids=str)
def test_the_selected_blocks_are_as_good_as_the_definitions(case: Case) -> None:
    x = inputs(case)
    index = selection(x, case, "triton")
    assert index.dtype == torch.int32
    assert index.shape == (case.batch, case.seq_len, case.kv_heads, case.spec.select_top)
    assert same_selection(exact_score(x, case), index.cpu(), reference_blocks(case).cpu())


def assert_selects_as_well(case: Case, logits: float = 1) -> None:
    """Without an lse, as the definition's normalized importance does; scores up to `logits`."""
    x = inputs(case)
    x.q *= logits
    with override_choices(lambda *_: Config(16, 16, 4, 1)):
        index = selection(x, case, "triton", normalized=False)
    wide = x.to(torch.float64)
    expected = selection(wide, case, "reference", normalized=False).cpu()
    assert same_selection(exact_score(wide, case, normalized=False), index.cpu(), expected)


@pytest.mark.parametrize("logits", [1, 300])
@pytest.mark.parametrize(
    "case", default(5, [replace(case, group=1) for case in PATTERNS[3:] + RANDOM]), ids=str
)
def test_one_head_selects_as_the_definition_without_an_lse(case: Case, logits: float) -> None:
    assert_selects_as_well(case, logits)


@pytest.mark.usefixtures("tiles")
def test_exact_ties_go_to_the_lower_index() -> None:
    """Equal keys make every compressed block equally probable, and all inner blocks tie."""
    case = Case(NSASpec(4, 4, 4, 4, 1, 1, 5), (100,), group=6)
    x = inputs(case)
    x.k_cmp[:] = x.k_cmp[:, :1].clone()
    index = selection(x, case, "triton")
    for t in range(100):
        own = t // 4
        # A query sees its own block's compressed key only at the block's end: before, importance 0.
        expected = [j if j <= own else -1 for j in range(4)] if own < 4 else [0, 1, 2, own]
        assert index[0, t].tolist() == [expected, expected], t


@pytest.mark.usefixtures("tiles")
def test_blocks_inside_one_compressed_block_tie_exactly() -> None:
    """Four selection blocks share a compressed block's probability: the lowest two are selected."""
    case = Case(NSASpec(8, 8, 2, 3, 0, 1, 5), (64,), kv_heads=3, group=3)
    index = selection(inputs(case), case, "triton")
    best = index[0, -1, :, :2]
    assert torch.equal(best % 4, torch.tensor([0, 1], device=DEVICE).expand(3, 2))


def test_the_first_and_last_blocks_are_selected_whatever_their_importance() -> None:
    """Also past 128 blocks, where nearly all importance is another block's."""
    case = Case(NSASpec(4, 2, 2, 5, 2, 2, 7), (290,), kv_heads=1, group=2, key_dim=2)
    x = inputs(case)
    x.k_cmp[:, 50] = 10 * x.q.mean((0, 1, 2))
    index = selection(x, case, "triton")
    for t in range(2, 290):
        assert {0, t // 2 - 1, t // 2} <= set(index[0, t, 0].tolist()), f"query {t}"
        assert t < 4 or 1 in index[0, t, 0].tolist(), f"query {t}"


@pytest.mark.parametrize("queries", default(2, [1, 13, 2, 49]))
def test_selection_of_the_last_positions_is_the_tail_of_the_full_selection(queries: int) -> None:
    case = Case(NSASpec(4, 3, 5, 3, 1, 1, 5), (49,), batch=2, group=3)
    x = inputs(case)
    _, lse = compressed_attention(x.q, x.k_cmp, x.v_cmp, case.spec, backend="triton")
    last = slice(case.seq_len - queries, None)
    index = select_blocks(
        x.q[:, last],
        x.k_cmp,
        lse[:, last],
        case.spec,
        seq_len=case.seq_len,
        backend="triton",
    )
    full, score = reference_blocks(case).cpu(), exact_score(x, case)
    assert same_selection(score[:, last], index.cpu(), full[:, last])


def test_selecting_again_selects_the_same_blocks() -> None:
    x = inputs(PATTERNS[2])
    first = selection(x, PATTERNS[2], "triton")
    selection(inputs(PATTERNS[3]), PATTERNS[3], "triton")
    assert torch.equal(selection(x, PATTERNS[2], "triton"), first)
