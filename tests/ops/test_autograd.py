"""Gradients pass gradcheck, and are bitwise the same from run to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from nsa.ops import (
    compressed_attention,
    nsa_attention,
    selected_attention,
    window_attention,
)
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
from tests.ops.cases import one_thread as one_thread

SPEC = NSASpec(3, 2, 1, 2, 0, 1, 3)
SMALL = [
    Case(SPEC, (9,), kv_heads=1, group=2, key_dim=1, value_dim=2),
    Case(SPEC, (2, 0, 7), group=1, key_dim=2, value_dim=1),
]
backends = pytest.mark.parametrize("backend", ["blockwise", "reference"])
cases = pytest.mark.parametrize("case", SMALL, ids=str)


def passes_gradcheck(
    function: Callable[..., Tensor | tuple[Tensor, ...]], backend: str, *inputs: Tensor
) -> bool:
    """Check every derivative of `blockwise`, a random projection of those of `reference`."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    return gradcheck(function, inputs, fast_mode=backend == "reference")


@backends
@cases
def test_compressed_attention_and_its_lse_pass_gradcheck(case: Case, backend: str) -> None:
    x = Inputs.of(case)

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = compressed_attention(q, k, v, SPEC, cu_seqlens=case.cu_seqlens, backend=backend)
        return o, lse[lse != -torch.inf]

    assert passes_gradcheck(function, backend, x.q, x.k_cmp, x.v_cmp)


@backends
@cases
def test_selected_attention_passes_gradcheck(case: Case, backend: str) -> None:
    x = Inputs.of(case)
    index = selection(x, case, backend)
    index[:, 2::4] = -1

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return selected_attention(q, k, v, index, SPEC, cu_seqlens=case.cu_seqlens, backend=backend)

    assert passes_gradcheck(function, backend, x.q, x.k_sel, x.v_sel)


@backends
@cases
def test_window_attention_passes_gradcheck(case: Case, backend: str) -> None:
    x = Inputs.of(case)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return window_attention(q, k, v, 3, cu_seqlens=case.cu_seqlens, backend=backend)

    assert passes_gradcheck(function, backend, x.q, x.k_win, x.v_win)


@backends
def test_the_gated_sum_passes_gradcheck_for_all_inputs(backend: str) -> None:
    case = Case(SPEC, (8,), kv_heads=1, group=2, key_dim=1, value_dim=1)
    x = Inputs.of(case)
    assert passes_gradcheck(
        lambda *y: nsa_attention(*y, SPEC, backend=backend), backend, *x.tensors()
    )


@backends
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
            for a, b in zip(run(), first, strict=True):
                assert torch.equal(a, b)


def test_a_second_derivative_raises() -> None:
    x = Inputs.of(SMALL[0])
    q, k, v = (y.detach().requires_grad_() for y in (x.q, x.k_win, x.v_win))
    o = window_attention(q, k, v, 3, backend="blockwise")
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="blockwise_attention_backward has no gradient"):
        torch.autograd.grad(dq.sum(), k)
