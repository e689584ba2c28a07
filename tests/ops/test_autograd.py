"""Gradients: zeros of queries without keys, the same bits in every run and recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa.ops import nsa_attention, window_attention
from nsa.spec import NSASpec
from tests.ops.cases import (
    Case,
    Inputs,
    branches,
    with_gradients,
)

SPEC = NSASpec(3, 2, 1, 2, 0, 1, 3)


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
def test_queries_that_see_no_key_get_gradients_of_zero(backend: str) -> None:
    """In a sequence shorter than a compressed block: zeros, not None and not NaN."""
    case = Case(SPEC, (2,))
    x = Inputs.of(case)
    o, _, dq, dk, dv = with_gradients(*branches(x, case, torch.empty(0), backend)["compressed"])
    assert torch.equal(o, torch.zeros_like(o))
    assert torch.equal(dq, torch.zeros_like(dq))
    assert dk.shape == x.k_cmp.shape
    assert dv.shape == x.v_cmp.shape


def test_a_second_derivative_raises() -> None:
    x = Inputs.of(Case(SPEC, (9,)))
    q, k, v = (y.detach().requires_grad_() for y in (x.q, x.k_win, x.v_win))
    o = window_attention(q, k, v, 3, backend="blockwise")
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="blockwise_attention_backward has no gradient"):
        torch.autograd.grad(dq.sum(), k)


PATTERN = NSASpec(4, 2, 4, 3, 1, 1, 9)
CASES = [
    Case(PATTERN, (75,), batch=2, group=6),
    Case(PATTERN, (2, 40, 0, 33), kv_heads=1, group=3, value_dim=4),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)
backends = pytest.mark.parametrize("backend", ["blockwise", "reference"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@backends
@cases
@dtypes
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_gradients_through_a_recomputed_call_are_the_same_to_the_bit(
    case: Case, backend: str, dtype: torch.dtype, reentrant: bool
) -> None:
    options = {"cu_seqlens": case.cu_seqlens, "backend": backend}

    def mixed(*inputs: Tensor) -> Tensor:
        return nsa_attention(*inputs, PATTERN, **options)

    def recomputed(*inputs: Tensor) -> Tensor:
        return checkpoint(mixed, *inputs, use_reentrant=reentrant)

    tensors = Inputs.of(case, dtype).tensors()
    expected, actual = with_gradients(mixed, tensors), with_gradients(recomputed, tensors)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@backends
@cases
def test_no_call_changes_its_inputs(case: Case, backend: str) -> None:
    x = Inputs.of(case, torch.float32)
    before = [tensor.clone() for tensor in x.tensors()]
    options = {"cu_seqlens": case.cu_seqlens, "backend": backend}
    with_gradients(lambda *inputs: nsa_attention(*inputs, PATTERN, **options), x.tensors())
    torch.testing.assert_close([*x.tensors()], before, rtol=0, atol=0)
