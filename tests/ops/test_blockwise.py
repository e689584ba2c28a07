"""The `blockwise` backend equals `reference`, forward and backward, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nsa.ops import blockwise, nsa_attention, select_blocks, selected_attention
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

TINY = NSASpec(4, 2, 2, 2, 0, 1, 5)
MORE_TILES_THAN_ONE = [
    Case(NSASpec(32, 16, 64, 4, 1, 2, 100), (1023,), group=6, key_dim=4, value_dim=4),
    Case(NSASpec(16, 16, 16, 3, 1, 1, 500), (901,), kv_heads=1, group=1, key_dim=4, value_dim=2),
    Case(NSASpec(8, 4, 8, 2, 0, 1, 33), (7, 400, 0, 215), group=16, key_dim=2, value_dim=4),
]
RANDOM = random_cases(60, longest=75)


@pytest.fixture(params=["usual tiles", "small tiles"])
def tile_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default sizes, and ones so small that every case has several tiles of each kind."""
    if request.param == "small tiles":
        monkeypatch.setattr(blockwise, "TILE_ROWS", 10)
        monkeypatch.setattr(blockwise, "HEADS", 2)
        monkeypatch.setattr(blockwise, "HEADS", 2)
        monkeypatch.setattr(blockwise, "GATHERED_ROWS", 14)
        monkeypatch.setattr(blockwise, "EARLY_BLOCKS", 1)
        monkeypatch.setattr(blockwise, "EARLY_PAIRS", 0)


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


@pytest.mark.usefixtures("tile_size")
@pytest.mark.parametrize("case", default(21, RANDOM), ids=str)
def test_outputs_lse_indices_and_gradients_equal_the_reference(case: Case) -> None:
    assert_equal_to_the_reference(case)


@pytest.mark.parametrize("case", default(1, MORE_TILES_THAN_ONE), ids=str)
def test_several_tiles_of_the_default_size_equal_the_reference(case: Case) -> None:
    assert_equal_to_the_reference(case)


@pytest.mark.parametrize("seq_len", range(1, 12))
def test_every_short_length_works_with_all_gradients(seq_len: int) -> None:
    case = Case(TINY, (seq_len,), group=3, value_dim=5)
    x = Inputs.of(case)

    def mixed(backend: str) -> list[Tensor]:
        return with_gradients(lambda *y: nsa_attention(*y, TINY, backend=backend), x.tensors())

    assert_same(mixed("blockwise"), mixed("reference"))


@pytest.mark.parametrize("case", default(3, random_cases(9, longest=60, seed=5)), ids=str)
def test_the_gated_sum_and_all_its_gradients_equal_the_reference(case: Case) -> None:
    x = Inputs.of(case)

    def mixed(backend: str) -> list[Tensor]:
        options = {"cu_seqlens": case.cu_seqlens, "backend": backend}
        return with_gradients(lambda *y: nsa_attention(*y, case.spec, **options), x.tensors())

    assert_same(mixed("blockwise"), mixed("reference"))


@pytest.mark.usefixtures("tile_size")
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


@pytest.mark.usefixtures("tile_size")
@pytest.mark.parametrize("spec", [NSASpec(4, 3, 5, 3, 1, 1, 5), NSASpec(4, 4, 4, 3, 0, 1, 5)])
@pytest.mark.parametrize("lengths", [(90,), (9, 0, 1, 70)], ids=str)
def test_one_head_selects_as_the_definition_without_an_lse(
    spec: NSASpec, lengths: tuple[int, ...]
) -> None:
    """Scores are up to a thousand, whose exponentials over- and underflow."""
    case = Case(spec, lengths, batch=2 if len(lengths) == 1 else 1, group=1)
    x = Inputs.of(case)
    x.q *= 300
    actual, expected = (selection(x, case, name, False) for name in ("blockwise", "reference"))
    assert torch.equal(actual, expected)


@pytest.mark.usefixtures("tile_size")
@pytest.mark.parametrize("queries", default(2, [1, 13, 2, 49]))
@pytest.mark.parametrize("backend", ["blockwise", "reference"])
def test_selection_of_the_last_positions_is_the_tail_of_the_full_selection(
    backend: str, queries: int
) -> None:
    case = Case(NSASpec(4, 3, 5, 3, 1, 1, 5), (49,), batch=2, group=3)
    x = Inputs.of(case)
    full = selection(x, case, backend)
    lse = with_gradients(*branches(x, case, full, backend)["compressed"])[1]
    tail = select_blocks(
        x.q[:, -queries:],
        x.k_cmp,
        lse[:, -queries:],
        case.spec,
        seq_len=case.seq_len,
        backend=backend,
    )
    assert torch.equal(tail, full[:, -queries:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["blockwise", "reference"])
def test_exact_ties_go_to_the_lower_index(backend: str, dtype: torch.dtype) -> None:
    """Zero keys make every compressed block equally probable, and all inner blocks tie."""
    spec = NSASpec(4, 4, 4, 4, 1, 1, 5)
    case = Case(spec, (100,), group=6)
    x = replace(Inputs.of(case, dtype), k_cmp=torch.zeros_like(Inputs.of(case, dtype).k_cmp))
    index = selection(x, case, backend)
    for t in range(100):
        own = t // 4
        # A block that no visible compressed block covers has importance 0; inner ones tie.
        expected = list(range(4)) if own < 4 else [0, 1, 2, own]
        expected = [j if j <= own else -1 for j in expected]
        assert index[0, t].tolist() == [expected, expected], t


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
def test_blocks_inside_one_compressed_block_tie_exactly(backend: str) -> None:
    """Four selection blocks share a compressed block's probability: the lowest two are selected."""
    case = Case(NSASpec(8, 8, 2, 3, 0, 1, 5), (64,), kv_heads=3, group=3)
    index = selection(Inputs.of(case, torch.float32), case, backend)
    best = index[0, -1, :, :2]
    assert torch.equal(best % 4, torch.tensor([0, 1]).expand(3, 2))


def test_no_gradient_passes_through_selection() -> None:
    case = Case(TINY, (30,))
    x = Inputs.of(case)
    for tensor in x.tensors():
        tensor.requires_grad_()
    for backend in ("blockwise", "reference"):
        assert not selection(x, case, backend).requires_grad
