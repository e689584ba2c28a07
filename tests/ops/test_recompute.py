"""Recomputation: a call run again, as activation checkpointing does, computes the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa.ops import nsa_attention
from nsa.spec import NSASpec
from tests.ops.cases import Case, Inputs, selection, with_gradients

SPEC = NSASpec(4, 2, 4, 3, 1, 1, 9)
CASES = [
    Case(SPEC, (75,), batch=2, group=6),
    Case(SPEC, (2, 40, 0, 33), kv_heads=1, group=3, value_dim=4),
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
        return nsa_attention(*inputs, SPEC, **options)

    def recomputed(*inputs: Tensor) -> Tensor:
        return checkpoint(mixed, *inputs, use_reentrant=reentrant)

    tensors = Inputs.of(case, dtype).tensors()
    expected, actual = with_gradients(mixed, tensors), with_gradients(recomputed, tensors)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@backends
@cases
@dtypes
def test_selecting_again_selects_the_same_blocks(
    case: Case, backend: str, dtype: torch.dtype
) -> None:
    """Also after calls in between with other lengths: no state is kept."""
    x = Inputs.of(case, dtype)
    first = selection(x, case, backend)
    other = Case(SPEC, (31,), group=2)
    selection(Inputs.of(other, dtype), other, backend)
    assert torch.equal(selection(x, case, backend), first)


@backends
@cases
def test_no_call_changes_its_inputs(case: Case, backend: str) -> None:
    x = Inputs.of(case, torch.float32)
    before = [tensor.clone() for tensor in x.tensors()]
    options = {"cu_seqlens": case.cu_seqlens, "backend": backend}
    with_gradients(lambda *inputs: nsa_attention(*inputs, SPEC, **options), x.tensors())
    for tensor, was in zip(x.tensors(), before, strict=True):
        assert torch.equal(tensor, was)
