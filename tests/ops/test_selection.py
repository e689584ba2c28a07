"""Block selection: every backend selects as the definition does, up to rounding of scores."""

from dataclasses import replace

import pytest
import torch

from nsa.ops import compressed_attention, select_blocks
from nsa.spec import NSASpec
from tests.ops.cases import (
    Case,
    default,
    exact_score,
    random_cases,
    same_selection,
    selection,
)
from tests.ops.tiles import small_tiles
from tests.ops.triton.parity import DEVICE, inputs, reference_blocks

RANDOM = random_cases(14 if DEVICE.type == "cpu" else 7, longest=36, seed=2)
PATTERNS = [
    Case(NSASpec(32, 16, 64, 4, 1, 2, 512), (150, 0, 1, 350), kv_heads=1, key_dim=8),
    Case(NSASpec(4, 2, 4, 1, 0, 1, 5), (50,), batch=2, group=3),
    Case(NSASpec(4, 3, 4, 2, 0, 1, 5), (75,), kv_heads=1, group=1),
    Case(NSASpec(9, 7, 5, 7, 2, 1, 5), (80,), kv_heads=1, group=4),
    Case(NSASpec(2, 1, 11, 3, 0, 1, 5), (90,), kv_heads=1),
    Case(NSASpec(30, 3, 2, 5, 1, 1, 5), (29,)),
    Case(NSASpec(4, 4, 3, 33, 1, 2, 5), (106,), kv_heads=1, group=1),
    # Tiles of sixteen blocks that every query of a tile sees.
    Case(NSASpec(5, 2, 2, 4, 1, 1, 5), (121,), kv_heads=1, group=2),
    Case(NSASpec(3, 3, 4, 3, 0, 1, 5), (150, 1, 47), kv_heads=1, group=1),
    Case(NSASpec(20, 2, 2, 4, 0, 2, 5), (113,), kv_heads=1, group=1),
]
EVERY = ["reference", "blockwise", "triton"]
backends = pytest.mark.parametrize("backend", EVERY)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", default(5, RANDOM) + default(9, PATTERNS), ids=str)
def test_the_selected_blocks_are_as_good_as_the_definitions(case: Case) -> None:
    x = inputs(case)
    index = selection(x, case, "triton")
    assert index.dtype == torch.int32
    assert index.shape == (case.batch, case.seq_len, case.kv_heads, case.spec.select_top)
    assert same_selection(exact_score(x, case), index.cpu(), reference_blocks(case).cpu())


def assert_selects_as_well(case: Case, logits: float = 1, backend: str = "triton") -> None:
    """Without an lse, as the definition's normalized importance does; scores up to `logits`."""
    x = inputs(case)
    x.q *= logits
    with small_tiles():
        index = selection(x, case, backend, normalized=False)
    wide = x.to(torch.float64)
    expected = selection(wide, case, "reference", normalized=False).cpu()
    assert same_selection(exact_score(wide, case, normalized=False), index.cpu(), expected)


@pytest.mark.parametrize("logits", [1, 300])
@pytest.mark.parametrize("backend", ["blockwise", "triton"])
@pytest.mark.parametrize(
    "case", default(5, [replace(case, group=1) for case in PATTERNS[2:] + RANDOM]), ids=str
)
def test_one_head_selects_as_the_definition_without_an_lse(
    case: Case, backend: str, logits: float
) -> None:
    """Exponentials of scores up to a thousand over- and underflow."""
    assert_selects_as_well(case, logits, backend)


@pytest.mark.usefixtures("any_tiles")
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        *((name, torch.float32) for name in EVERY),
        ("blockwise", torch.float64),
        ("blockwise", torch.bfloat16),
    ],
    ids=str,
)
def test_exact_ties_go_to_the_lower_index(backend: str, dtype: torch.dtype) -> None:
    """Equal keys make every compressed block equally probable, and all inner blocks tie."""
    case = Case(NSASpec(4, 4, 4, 4, 1, 1, 5), (100,), group=6)
    x = inputs(case, dtype)
    x.k_cmp.zero_()
    index = selection(x, case, backend)
    for t in range(100):
        own = t // 4
        # A query sees its own block's compressed key only at the block's end: before, importance 0.
        expected = [j if j <= own else -1 for j in range(4)] if own < 4 else [0, 1, 2, own]
        assert index[0, t].tolist() == [expected, expected], t


@pytest.mark.usefixtures("any_tiles")
@backends
def test_blocks_inside_one_compressed_block_tie_exactly(backend: str) -> None:
    """Four selection blocks share a compressed block's probability: the lowest two are selected."""
    case = Case(NSASpec(8, 8, 2, 3, 0, 1, 5), (64,), kv_heads=3, group=3)
    best = selection(inputs(case), case, backend)[0, -1, :, :2]
    assert torch.equal(best.cpu() % 4, torch.tensor([0, 1]).expand(3, 2))


@pytest.mark.usefixtures("any_tiles")
@pytest.mark.parametrize("queries", default(2, [1, 13, 2, 49]))
@backends
def test_selection_of_the_last_positions_is_the_tail_of_the_full_selection(
    backend: str, queries: int
) -> None:
    case = Case(NSASpec(4, 3, 5, 3, 1, 1, 5), (49,), batch=2, group=3)
    x = inputs(case)
    lse = compressed_attention(x.q, x.k_cmp, x.v_cmp, case.spec, backend=backend)[1]
    q, lse = x.q[:, -queries:], lse[:, -queries:]
    index = select_blocks(q, x.k_cmp, lse, case.spec, seq_len=case.seq_len, backend=backend)
    full, score = reference_blocks(case).cpu(), exact_score(x, case)
    assert same_selection(score[:, -queries:], index.cpu(), full[:, -queries:])


def test_no_gradient_passes_through_selection() -> None:
    x = inputs(PATTERNS[1])
    for tensor in x.tensors():
        tensor.requires_grad_()
    assert not selection(x, PATTERNS[1], "triton").requires_grad
