"""Gradients of queries without keys are zeros, and all are bitwise the same from run to run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nsa.ops import window_attention
from nsa.spec import NSASpec
from tests.ops.cases import (
    Case,
    Inputs,
    all_branches,
    branches,
    default,
    selection,
    threads,
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


@pytest.fixture
def nondeterminism_allowed() -> Iterator[None]:
    """As in training: PyTorch's deterministic algorithms are off."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before, warn_only=True)


@pytest.mark.usefixtures("nondeterminism_allowed")
@pytest.mark.parametrize("dtype", default(1, [torch.float32, torch.bfloat16]), ids=str)
def test_three_runs_give_the_same_bits(dtype: torch.dtype) -> None:
    spec = NSASpec(8, 4, 8, 3, 1, 1, 40)
    case = Case(spec, (5, 250), kv_heads=1, group=6, key_dim=16, value_dim=16)
    x = Inputs.of(case, dtype)

    def run() -> list[Tensor]:
        index = selection(x, case, "blockwise")
        return [index, *all_branches(x, case, index)]

    with threads(2):
        first = run()
        for _ in range(2):
            torch.testing.assert_close(run(), first, rtol=0, atol=0)


def test_a_second_derivative_raises() -> None:
    x = Inputs.of(Case(SPEC, (9,)))
    q, k, v = (y.detach().requires_grad_() for y in (x.q, x.k_win, x.v_win))
    o = window_attention(q, k, v, 3, backend="blockwise")
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="blockwise_attention_backward has no gradient"):
        torch.autograd.grad(dq.sum(), k)
