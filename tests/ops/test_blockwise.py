"""The `blockwise` backend equals `reference`, forward and backward, in float64."""

import pytest
import torch
from torch import Tensor

from nsa.ops import blockwise, nsa_attention, selected_attention
from nsa.ops.inputs import AttentionInputs
from nsa.spec import NSASpec
from tests.ops.cases import (
    Case,
    Inputs,
    branches,
    default,
    random_cases,
    selection,
    with_gradients,
)

SHORT = [Case(NSASpec(4, 2, 2, 2, 0, 1, 5), (n,), group=3, value_dim=5) for n in range(1, 12)]
MORE_TILES_THAN_ONE = [
    Case(NSASpec(32, 16, 64, 4, 1, 2, 100), (701,), group=6, key_dim=4, value_dim=4),
    Case(NSASpec(16, 16, 16, 3, 1, 1, 500), (901,), kv_heads=1, group=1, key_dim=4, value_dim=2),
    Case(NSASpec(8, 4, 8, 2, 0, 1, 33), (7, 400, 0, 215), group=16, key_dim=2, value_dim=4),
]
RANDOM = random_cases(60, longest=75)


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def assert_branches_agree(case: Case, x: Inputs, block_index: Tensor) -> None:
    actual = branches(x, case, block_index, "blockwise")
    expected = branches(x, case, block_index, "reference")
    for name in expected:
        assert_same(with_gradients(*actual[name]), with_gradients(*expected[name]))


def assert_equal_to_the_reference(case: Case) -> None:
    x = Inputs.of(case)
    block_index = selection(x, case, "reference")
    assert torch.equal(selection(x, case, "blockwise"), block_index)
    assert_branches_agree(case, x, block_index)


@pytest.mark.usefixtures("any_tiles")
@pytest.mark.parametrize("case", default(21, RANDOM), ids=str)
def test_outputs_lse_indices_and_gradients_equal_the_reference(case: Case) -> None:
    assert_equal_to_the_reference(case)


@pytest.mark.parametrize("case", default(1, MORE_TILES_THAN_ONE), ids=str)
def test_several_tiles_of_the_default_size_equal_the_reference(case: Case) -> None:
    assert_equal_to_the_reference(case)


@pytest.mark.parametrize("case", SHORT + default(3, random_cases(9, longest=60, seed=5)), ids=str)
def test_the_gated_sum_and_all_its_gradients_equal_the_reference(case: Case) -> None:
    x = Inputs.of(case)

    def mixed(backend: str) -> list[Tensor]:
        options = {"cu_seqlens": case.cu_seqlens, "backend": backend}
        return with_gradients(lambda *y: nsa_attention(*y, case.spec, **options), x.tensors())

    assert_same(mixed("blockwise"), mixed("reference"))


@pytest.mark.usefixtures("any_tiles")
@pytest.mark.parametrize("lengths", [(50,), (1, 30, 0, 19)], ids=str)
def test_any_block_index_is_valid(lengths: tuple[int, ...]) -> None:
    """Rows without blocks, with one twice, or with blocks of the future."""
    case = Case(NSASpec(4, 2, 4, 3, 1, 1, 5), lengths, group=3)
    x = Inputs.of(case)
    draw = torch.Generator().manual_seed(3)
    shape = (1, case.seq_len, case.kv_heads, 3)
    block_index = torch.randint(-1, 14, shape, generator=draw, dtype=torch.int32)
    block_index[:, ::7] = -1
    block_index[:, 1::5] = block_index[:, 1::5, :, :1]
    block_index[:, 2::11] = 13
    assert_branches_agree(case, x, block_index)
    out = selected_attention(x.q, x.k_sel, x.v_sel, block_index, case.spec, backend="blockwise")
    assert torch.equal(out[:, ::7], torch.zeros_like(out[:, ::7]))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("branch", ["selected", "window"])
def test_the_scores_of_a_branch_grow_as_the_sequence_does(branch: str) -> None:
    """With all earlier keys they would grow with its square."""

    def scores(length: int) -> int:
        case = Case(NSASpec(4, 2, 4, 3, 1, 1, 9), (length,), kv_heads=1)
        x, own = Inputs.of(case), torch.arange(length) // 4
        index = torch.stack([0 * own, own // 2, own], 1).int()[None, :, None]
        blocks = index if branch == "selected" else None
        given = AttentionInputs(x.q, x.k_sel, x.v_sel, blocks, None, branch, case.spec, case.scale)
        (tiles,) = [tiles for _, _, tiles in blockwise._tiles(given)]
        every = range(length)
        return sum(len(tile.rows_of(x.q[:, :, 0])[0]) * len(every[tile.keys]) for tile in tiles)

    assert scores(240) - scores(160) == scores(160) - scores(80) > 0


def test_tables_of_a_few_lengths_are_kept() -> None:
    """Packed documents have any length, and tables are tensors on the device."""
    for length in range(1, 80):
        blockwise.overlap_table(length, NSASpec(), torch.float32, torch.device("cpu"))
    assert blockwise.overlap_table.cache_info().currsize < 40
