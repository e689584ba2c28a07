"""Custom ops of attention: declarations match, calls compile as one graph, one derivative."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from nsa.ops import (
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.ops.custom_op import Gradient, register
from nsa.spec import NSASpec
from tests.ops.cases import (
    Case,
    Inputs,
    all_branches,
    check_calls,
    default,
    selection,
    with_gradients,
)
from tests.ops.triton.parity import DEVICE, by_head, computed, inputs

SPEC = NSASpec(4, 2, 4, 2, 0, 1, 5)
BATCH = Case(SPEC, (13,), batch=2, group=3, value_dim=5)
PACKED = Case(SPEC, (9, 2, 0, 5), kv_heads=1, group=2)
CASES = {
    "batch": BATCH,
    "packed": PACKED,
    "no compressed block": Case(SPEC, (2,), group=1),
}


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_every_op_matches_its_declaration_forward_and_backward(name: str, backend: str) -> None:
    case = CASES[name]
    x = inputs(case)
    if name == "batch":  # in memory [B, H, T, D], as queries and keys of PyTorch's attention are
        x = Inputs(*(by_head(y) for y in x.tensors()))

    def call_all() -> None:
        index = selection(x, case, backend)
        all_branches(x, case, index, backend)
        computed(case, "mixed", backend, x)

    check_calls(call_all)


@pytest.mark.parametrize("case", default(1, [PACKED, BATCH]), ids=str)
def test_all_functions_compile_as_one_graph_with_the_same_results(case: Case) -> None:
    options = {"cu_seqlens": case.offsets_on(DEVICE), "backend": "triton"}

    def all_functions(*x: Tensor) -> tuple[Tensor, ...]:
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, _ = x
        o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, SPEC, **options)
        index = select_blocks(q, k_cmp, lse, SPEC, **options)
        o_sel = selected_attention(q, k_sel, v_sel, index, SPEC, **options)
        o_win = window_attention(q, k_win, v_win, SPEC.window, **options)
        return o_cmp, o_sel, o_win, nsa_attention(*x, SPEC, **options)

    tensors = inputs(case).tensors()
    compiled = torch.compile(all_functions, backend="aot_eager", fullgraph=True)
    actual, expected = (with_gradients(f, tensors) for f in (compiled, all_functions))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_second_derivative_raises() -> None:
    x = Inputs.of(BATCH)
    q, k, v = (y.detach().requires_grad_() for y in (x.q, x.k_win, x.v_win))
    o = window_attention(q, k, v, 5, backend="blockwise")
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="blockwise_attention_backward has no gradient"):
        torch.autograd.grad(dq.sum(), k)


class Numbers(NamedTuple):
    """Inputs of an op."""

    x: Tensor


def test_an_op_that_is_registered_without_grad_has_a_gradient() -> None:
    """The first call registers the ops of a kernel's module: perhaps an evaluation."""
    with torch.no_grad():
        twice = register(
            "nsa_test::twice",
            Numbers,
            lambda given: 2 * given.x,
            lambda given: given.x.new_empty(given.x.shape),
            gradient=Gradient(lambda dy, given: 2 * dy, inputs=1, outputs=1, saved=slice(0)),
        )
    x = torch.ones(3, requires_grad=True)
    assert torch.autograd.grad(twice(Numbers(x)).sum(), x)[0].tolist() == [2, 2, 2]
