"""Precision of `blockwise` in each dtype, against that of plain PyTorch in the same dtype.

Both are compared with float64 on the same rounded inputs. The largest error, relative to the
largest value, may be twice plain PyTorch's plus the noise of a float32 sum over every row and head
of a group in another order: √(terms) roundings, about 1e-6. Sums are kept in float32 whatever the
inputs' dtype, so that floor is the same for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nsa.ops import nsa_attention
from nsa.spec import NSASpec
from tests.ops import naive
from tests.ops.cases import (
    Case,
    Inputs,
    all_branches,
    branches,
    rank_score,
    same_selection,
    selection,
    with_gradients,
)
from tests.ops.triton.gpu_checks import seen_by

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [
    Case(NSASpec(8, 4, 16, 3, 1, 1, 40), (260,), group=6, key_dim=16, value_dim=32),
    Case(NSASpec(8, 8, 8, 4, 1, 2, 17), (3, 150, 90), kv_heads=1, group=4, key_dim=32),
]
SHORT = [
    Case(NSASpec(8, 4, 8, 3, 1, 1, 40), (120,), group=6, key_dim=16, value_dim=32),
    Case(NSASpec(6, 5, 4, 4, 1, 2, 17), (3, 70, 60), kv_heads=1, group=4, key_dim=32),
]


def plain(seen: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Masked attention as a user would write it; `seen` is [B or 1, Hq or 1, T, N]."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.MATH):
            o = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return torch.where(seen.any(-1, keepdim=True), o, 0).transpose(1, 2)

    return attend


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_branch_loses_no_more_than_plain_attention_in_the_same_dtype(
    case: Case, dtype: torch.dtype
) -> None:
    x = Inputs.of(case, dtype)
    wide = x.to(torch.float64)
    block_index = selection(wide, case, "reference")
    exact_branches = branches(wide, case, block_index, "reference")
    actual_branches = branches(x, case, block_index, "blockwise")
    floor = math.sqrt(case.seq_len * case.group) * torch.finfo(torch.float32).eps / 2
    for name, (function, tensors) in actual_branches.items():
        seen = seen_by(case, name, block_index)
        # lse is compared on its own below: plain attention has none.
        exact, actual, usual = (
            with_gradients(f, given)
            for f, given in (
                (lambda *y, f=exact_branches[name][0]: _first(f(*y)), exact_branches[name][1]),
                (lambda *y, f=function: _first(f(*y)), tensors),
                (plain(seen), tensors),
            )
        )
        for what, a, u, e in zip(("o", "dq", "dk", "dv"), actual, usual, exact, strict=True):
            assert a.dtype == dtype
            allowed = 2 * error(u, e) + floor
            assert error(a, e) <= allowed, (name, what, error(a, e), allowed)


def _first(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["blockwise", "reference"])
def test_lse_is_float32_and_nearly_exact_in_every_dtype(backend: str, dtype: torch.dtype) -> None:
    case = CASES[0]
    x = Inputs.of(case, dtype)
    block_index = selection(x, case, backend)
    lse = branches(x, case, block_index, backend)["compressed"][0](x.q, x.k_cmp, x.v_cmp)[1]
    wide = x.to(torch.float64)
    exact = branches(wide, case, block_index, "reference")["compressed"][0](
        wide.q, wide.k_cmp, wide.v_cmp
    )[1]
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["blockwise", "reference"])
@pytest.mark.parametrize("case", SHORT, ids=str)
def test_selection_in_any_dtype_is_as_good_as_in_float64(
    case: Case, backend: str, dtype: torch.dtype
) -> None:
    """The inputs are rounded; what is computed from them is ranked in float32."""
    x = Inputs.of(case, dtype)
    wide = x.to(torch.float64)
    score = naive.importance(
        wide.q.numpy(), wide.k_cmp.numpy(), case.spec, case.scale, case.offsets
    )
    exact = torch.from_numpy(naive.select_blocks(score, case.spec, case.offsets))
    ranked = rank_score(torch.from_numpy(score), case)
    assert same_selection(ranked, selection(x, case, backend), exact, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gated_sum_keeps_its_inputs_dtype(dtype: torch.dtype) -> None:
    case = CASES[1]
    x = Inputs.of(case, dtype)
    o = nsa_attention(*x.tensors(), case.spec, cu_seqlens=case.cu_seqlens, backend="blockwise")
    exact = nsa_attention(
        *x.to(torch.float64).tensors(), case.spec, cu_seqlens=case.cu_seqlens, backend="reference"
    )
    assert o.dtype == dtype
    assert error(o, exact) < 4 * torch.finfo(dtype).eps


def test_blockwise_is_not_changed_by_autocast() -> None:
    case = CASES[1]
    x = Inputs.of(case, torch.float32)
    block_index = selection(x, case, "blockwise")
    usual = all_branches(x, case, block_index)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(selection(x, case, "blockwise"), block_index)
        cast = all_branches(x, case, block_index)
    torch.testing.assert_close(usual, cast, rtol=0, atol=0)
