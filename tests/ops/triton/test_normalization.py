"""RMSNorm kernels with the residual add: parity with PyTorch, one gradient, fixed order of sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.ops import add_rms_norm
from nsa.ops.triton import per_token
from nsa.ops.triton.launch import recording
from tests.operations import Recorder
from tests.ops.cases import check_declaration, with_gradients
from tests.ops.triton.parity import DEVICE, RULE, assert_exact_enough

# One row, one column, several programs, several parts of the weight's gradient, wide rows.
SHAPES = [(1, 5), (3, 1), (2, 35, 24), (5, 700), (2, 2500)]
EPS = 1e-3


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, delta and weight."""
    draw = torch.Generator().manual_seed(0)
    sizes = (shape, shape, shape[-1:])
    return [torch.randn(size, generator=draw).to(DEVICE, dtype) for size in sizes]


def fused(backend: str, x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, delta, weight, EPS, backend=backend)


def first(backend: str, x: Tensor, weight: Tensor) -> Tensor:
    """Without a residual."""
    return add_rms_norm(x, None, weight, EPS, backend=backend)[1]


def first_and_input(backend: str, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Without a residual, where x itself continues in the residual stream."""
    return add_rms_norm(x, None, weight, EPS, backend=backend)


def assert_norm_parity(function: Any, given: list[Tensor]) -> None:
    actual, usual, exact = (
        with_gradients(partial(function, backend), [x.to(dtype) for x in given])
        for backend, dtype in RULE
    )
    assert_exact_enough(actual, usual, exact)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_are_those_of_pytorch(shape: tuple[int, ...]) -> None:
    """Uninitialised memory is NaN here, so every element must be written."""
    x, delta, weight = tensors(*shape)
    assert_norm_parity(fused, [x, delta, weight])
    assert_norm_parity(first, [x, weight])
    assert_norm_parity(first_and_input, [x, weight])


def test_either_output_may_have_no_gradient() -> None:
    given = tensors(3, 6)
    assert_norm_parity(lambda *x: fused(*x)[1], given)
    _, d_x, d_delta, d_weight = with_gradients(lambda *x: fused("triton", *x)[0], given)
    assert torch.equal(d_x, d_delta)
    assert d_x.any()
    assert not d_weight.any()


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_rows_past_the_end_do_not_count_even_if_eps_is_0() -> None:
    x, _, weight = tensors(3, 6)
    torch.testing.assert_close(
        *(
            with_gradients(
                lambda x, w, b=b: add_rms_norm(x, None, w, 0.0, backend=b)[1], [x, weight]
            )
            for b in ("triton", "reference")
        )
    )


def test_the_norm_is_that_of_the_rounded_sum() -> None:
    x, delta, weight = tensors(4, 48, dtype=torch.bfloat16)
    total, normed = fused("triton", x, delta, weight)
    assert torch.equal(total, x + delta)
    exact = first("reference", total.double(), weight.double())
    torch.testing.assert_close(normed, exact.bfloat16(), rtol=2**-7, atol=0)


def test_inputs_may_be_laid_out_in_any_way() -> None:
    x, delta, weight = tensors(4, 6)
    mixed = [x.T.contiguous().T, delta[:, ::1].clone().as_strided((4, 6), (6, 1)), weight]
    torch.testing.assert_close(
        with_gradients(partial(fused, "triton"), mixed),
        with_gradients(partial(fused, "triton"), [x, delta, weight]),
        rtol=0,
        atol=0,
    )


def test_five_runs_give_the_same_bits() -> None:
    given = tensors(70, 24)
    runs = [with_gradients(partial(fused, "triton"), given) for _ in range(5)]
    for run in runs[1:]:
        torch.testing.assert_close(run, runs[0], rtol=0, atol=0)


def test_x_and_delta_share_one_gradient() -> None:
    """It is computed and stored once."""
    x, delta, weight = (y.requires_grad_() for y in tensors(3, 6))
    stored = []
    for y in (x, delta):
        y.register_hook(lambda gradient: stored.append(gradient.data_ptr()))
    total, normed = fused("triton", x, delta, weight)
    (total.sum() + normed.square().sum()).backward()
    assert len(set(stored)) == 1
    assert torch.equal(x.grad, delta.grad)
    x.grad.add_(1)
    assert not torch.equal(x.grad, delta.grad), "a later step would change both"


def test_without_a_residual_the_input_and_its_norm_share_one_gradient_too() -> None:
    """Autograd adds nothing: one backward kernel, whose result is x's gradient."""
    x, _, weight = (y.requires_grad_() for y in tensors(3, 6))
    doubled = x * 2
    total, normed = first_and_input("triton", doubled, weight)
    arrived: list[Tensor] = []
    doubled.register_hook(arrived.append)
    with Recorder() as recorder:
        torch.autograd.backward([total, normed], [torch.ones_like(x), torch.ones_like(x)])
    names = [operation.name for operation in recorder.operations]
    assert names.count("nsa::triton_add_rms_norm_backward") == 1
    assert not any(name.startswith("aten::add") for name in names)
    assert len(arrived) == 1
    alone = torch.autograd.grad(first("triton", doubled, weight).sum(), doubled)[0]
    torch.testing.assert_close(arrived[0], alone + 1)
    total, _ = first_and_input("triton", doubled, weight)
    assert torch.equal(torch.autograd.grad(total.sum(), doubled)[0], torch.ones_like(x))


def test_the_ops_match_their_declarations() -> None:
    """Schema, autograd, and the shapes, dtypes and strides of what comes out."""
    x, delta, weight = tensors(2, 3, 6)
    ops = torch.ops.nsa
    for op, given in (
        (per_token.triton_add_rms_norm, (x, delta, weight, EPS)),
        (per_token.triton_add_rms_norm, (x, None, weight, EPS)),
    ):
        learned = tuple(
            y.detach().clone().requires_grad_() if isinstance(y, Tensor) else y for y in given
        )
        check_declaration(op, learned)
    for op, given in (
        (ops.triton_add_rms_norm_backward, (x, x, x, delta, weight, EPS, x)),
        (ops.triton_add_rms_norm_backward, (x, x, x, None, weight, EPS, x)),
        (ops.triton_add_rms_norm_backward, (None, x, x, delta, weight, EPS, x)),
    ):
        check_declaration(op.default, given)


def test_each_pass_is_one_launch_and_one_for_the_weights_gradient() -> None:
    x, weight = torch.empty(99, 48, device="meta"), torch.empty(48, device="meta")
    inputs = per_token.AddNorm(x, x, weight, EPS)
    with recording() as launches:
        total, normed = per_token.add_rms_norm_forward(inputs)
        per_token.add_rms_norm_backward(total, normed, inputs, total)
    assert [launch.kernel.fn.__name__ for launch in launches] == [
        "add_rms_norm_kernel",
        "rms_norm_backward_kernel",
        "sum_parts_kernel",
    ]
