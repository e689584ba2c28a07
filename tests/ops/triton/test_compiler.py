"""Custom ops of the kernels: declarations match, and calls compile as one graph."""

from __future__ import annotations

from typing import Any

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
from nsa.ops.triton import band, select, selected
from nsa.spec import NSASpec
from tests.ops.cases import Case, check_declaration, default, selection, with_gradients
from tests.ops.triton.parity import DEVICE, inputs

SPEC = NSASpec(4, 2, 4, 2, 0, 1, 5)
PATTERN = SPEC.to_ints()
CASES = [
    Case(SPEC, (13,), batch=2, group=3, value_dim=5),
    Case(SPEC, (9, 2, 0, 5), kv_heads=1, group=2),
    Case(SPEC, (2,), group=1),
]
cases = pytest.mark.parametrize("case", default(2, CASES), ids=["batch", "packed", "short"])


def by_head(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def forward_calls(case: Case) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Each forward op, with arguments."""
    x, cu, scale = inputs(case), case.offsets_on(DEVICE), case.scale
    index = selection(x, case, "triton")
    lse = x.q.new_zeros(x.q.shape[:3])
    window = (by_head(y) for y in (x.q, x.k_win, x.v_win))
    return {
        "compressed": (
            band.triton_band,
            (x.q, x.k_cmp, x.v_cmp, None, cu, "compressed", PATTERN, scale),
        ),
        "window": (band.triton_band, (*window, None, cu, "window", PATTERN, scale)),
        "selected": (
            selected.triton_selected,
            (x.q, x.k_sel, x.v_sel, index, cu, "selected", PATTERN, scale),
        ),
        "gated": (band.triton_gated, (*x.tensors(), cu, PATTERN, scale)),
        "select": (select.triton_select, (x.q, x.k_cmp, lse, cu, PATTERN, case.seq_len, scale)),
    }


def backward_call(name: str, op: Any, given: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The op that is a forward op's backward pass, with the arguments that autograd passes."""
    results = op(*given)
    do, saved = torch.ones_like(results[0]), results
    if name == "gated":
        return torch.ops.nsa.triton_gated_backward.default, (do, *given, *saved[1:])
    if name == "selected":
        return torch.ops.nsa.triton_selected_backward.default, (do, *given, *saved)
    dlse = torch.ones_like(results[1])
    return torch.ops.nsa.triton_band_backward.default, (do, dlse, *given, *saved)


def with_gradient(given: tuple[Any, ...]) -> tuple[Any, ...]:
    floating = [isinstance(x, Tensor) and x.is_floating_point() for x in given]
    return tuple(
        x.detach().requires_grad_() if wanted else x
        for x, wanted in zip(given, floating, strict=True)
    )


@cases
def test_every_op_matches_its_declaration_forward_and_backward(case: Case) -> None:
    """Schema, autograd, and the shapes, dtypes and strides of what comes out."""
    for name, (op, given) in forward_calls(case).items():
        if name == "select":
            check_declaration(op, given)
            continue
        check_declaration(op, with_gradient(given))
        check_declaration(*backward_call(name, op, given))


@pytest.mark.parametrize("name", default(1, ["gated", "window", "selected"]))
def test_gradients_through_the_compilers_dispatch_equal_the_eager_ones(name: str) -> None:
    op, given = forward_calls(CASES[0])[name]
    torch.library.opcheck(op, with_gradient(given), test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize("case", default(1, CASES[1::-1]), ids=["packed", "batch"])
def test_the_gated_sum_compiles_as_one_graph_with_the_same_results(case: Case) -> None:
    tensors, cu = inputs(case).tensors(), case.offsets_on(DEVICE)

    def mixed(*inputs: Tensor) -> Tensor:
        return nsa_attention(*inputs, SPEC, cu_seqlens=cu, backend="triton")

    compiled = torch.compile(mixed, backend="aot_eager", fullgraph=True)
    actual, expected = (with_gradients(f, tensors) for f in (compiled, mixed))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_each_function_compiles_as_one_graph() -> None:
    case = CASES[0]
    x = inputs(case)

    def all_parts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        o_cmp, lse = compressed_attention(q, x.k_cmp, x.v_cmp, SPEC, backend="triton")
        index = select_blocks(q, x.k_cmp, lse, SPEC, backend="triton")
        o_sel = selected_attention(q, k, v, index, SPEC, backend="triton")
        return o_cmp, o_sel, window_attention(q, k, v, 5, backend="triton")

    compiled = torch.compile(all_parts, backend="aot_eager", fullgraph=True)
    given = (x.q, x.k_sel, x.v_sel)
    actual, expected = (with_gradients(f, given) for f in (compiled, all_parts))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
