"""The `reference` backend equals a naive loop over single queries."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa.ops import (
    compressed_attention,
    compressed_cu_seqlens,
    nsa_attention,
    select_blocks,
    selected_attention,
)
from nsa.spec import NSASpec
from tests.ops import naive
from tests.ops.cases import Case, Inputs, rank_score, same_selection

PAPER_LIKE = NSASpec(8, 4, 16, 4, 1, 2, 9)
UNEVEN = NSASpec(block_len=7, block_stride=3, select_len=5, select_top=4, window=6)
LONE = NSASpec(5, 5, 2, 1, 0, 1, 1)

CASES = [
    Case(PAPER_LIKE, (107,)),
    Case(
        replace(PAPER_LIKE, select_len=5),
        (40,),
        batch=2,
        kv_heads=1,
        group=3,
        key_dim=4,
        value_dim=6,
    ),
    Case(UNEVEN, (45,), kv_heads=2, group=1, key_dim=6, value_dim=3),
    Case(UNEVEN, (6,)),
    Case(UNEVEN, (1,), group=6),
    Case(LONE, (23,), kv_heads=3),
    Case(NSASpec(1, 1, 3, 2, 0, 1, 40), (17,)),
    Case(NSASpec(12, 7, 4, 5, 2, 1, 3), (50,), key_dim=3, value_dim=1),
    Case(NSASpec(6, 2, 1, 4, 1, 1, 5), (20,)),
    Case(UNEVEN, (20, 3, 0, 1, 31)),
    Case(PAPER_LIKE, (0, 33, 8, 7), kv_heads=1, group=4, value_dim=2),
    Case(LONE, (1, 1, 1, 0)),
]


SCALE = 0.3  # no size of keys has this one by default


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def close(actual: Tensor, expected: np.ndarray) -> None:
    torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=1e-10, atol=1e-10)


def options(case: Case, backend: str = "reference") -> dict[str, Any]:
    return {"scale": SCALE, "cu_seqlens": case.cu_seqlens, "backend": backend}


def defined(case: Case) -> tuple[Any, Any]:
    """The arguments of the definition's functions: the tensors, and what follows spec or window."""
    return [x.numpy() for x in Inputs.of(case).tensors()], (SCALE, case.offsets)


def test_compressed_attention_and_its_lse_are_the_definition(case: Case) -> None:
    x, ((q, k, v, *_), rest) = Inputs.of(case), defined(case)
    o, lse = compressed_attention(x.q, x.k_cmp, x.v_cmp, case.spec, **options(case))
    expected = naive.compressed_attention(q, k, v, case.spec, *rest)
    close(o, expected[0])
    close(lse, expected[1])


@pytest.mark.parametrize("normalized", [True, False], ids=["lse", "one head without an lse"])
def test_selection_is_that_of_the_definition(case: Case, normalized: bool) -> None:
    case = case if normalized else replace(case, group=1)
    x, ((q, k, v, *_), rest) = Inputs.of(case), defined(case)
    lse = torch.from_numpy(naive.compressed_attention(q, k, v, case.spec, *rest)[1])
    given = lse if normalized else None
    index = select_blocks(x.q, x.k_cmp, given, case.spec, **options(case))
    importance = naive.importance(q, k, case.spec, *rest)
    expected = torch.from_numpy(naive.select_blocks(importance, case.spec, case.offsets))
    assert index.dtype == torch.int32
    assert same_selection(rank_score(torch.from_numpy(importance), case), index, expected, 1e-10)


def test_selected_attention_is_the_definition_for_any_blocks(case: Case) -> None:
    x, ((q, _, _, k, v, *_), rest) = Inputs.of(case), defined(case)
    blocks = case.spec.select_blocks_len(max(case.lengths))
    shape = (case.batch, case.seq_len, case.kv_heads, case.spec.select_top)
    index = torch.randint(-1, blocks, shape, generator=torch.Generator().manual_seed(1)).int()
    o = selected_attention(x.q, x.k_sel, x.v_sel, index, case.spec, **options(case))
    close(o, naive.selected_attention(q, k, v, index.numpy(), case.spec, *rest))


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_the_three_branches_are_mixed_by_their_gates(case: Case, backend: str) -> None:
    o = nsa_attention(*Inputs.of(case).tensors(), case.spec, **options(case, backend))
    (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates), rest = defined(case)
    spec = case.spec
    index = naive.select_blocks(naive.importance(q, k_cmp, spec, *rest), spec, case.offsets)
    parts = [
        naive.compressed_attention(q, k_cmp, v_cmp, spec, *rest)[0],
        naive.selected_attention(q, k_sel, v_sel, index, spec, *rest),
        naive.window_attention(q, k_win, v_win, spec.window, *rest),
    ]
    close(o, sum(gates[..., [c]] * part for c, part in enumerate(parts)))


@pytest.mark.parametrize("lengths", [(40, 3, 0, 7, 6), (7,), (1, 1)], ids=str)
def test_compressed_keys_are_packed_in_the_order_of_their_documents(
    lengths: tuple[int, ...],
) -> None:
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    counts = [len(naive.compressed_blocks(length, UNEVEN)) for length in lengths]
    offsets = compressed_cu_seqlens(cu_seqlens, UNEVEN)
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [0, *np.cumsum(counts)]


def test_scale_defaults_to_one_over_the_root_of_the_key_size() -> None:
    case = Case(UNEVEN, (30,), key_dim=6, value_dim=2)
    x = Inputs.of(case)
    default = nsa_attention(*x.tensors(), case.spec, backend="reference")
    given = nsa_attention(*x.tensors(), case.spec, scale=6**-0.5, backend="reference")
    other = nsa_attention(*x.tensors(), case.spec, scale=0.1, backend="reference")
    assert torch.equal(default, given)
    assert not torch.allclose(default, other)
