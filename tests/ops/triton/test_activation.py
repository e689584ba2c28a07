"""SwiGLU kernels: parity with PyTorch, declarations of the op, compilation."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from nsa.ops import swiglu
from nsa.ops.triton.launch import recording
from nsa.ops.triton.per_token import PackedGates, swiglu_backward, swiglu_forward, triton_swiglu
from tests.ops.cases import check_declaration, with_gradients
from tests.ops.triton.parity import DEVICE, RULE, assert_exact_enough

# Rows and columns of gate_up, and the width of gate and of up: less than one tile, several tiles,
# one row, a width that is no power of two, and padding.
SIZES = [((7, 1336), 667), ((2, 5, 48), 24), ((1, 2), 1), ((3, 1024), 512), ((9, 20), 7)]


def packed(shape: tuple[int, ...]) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def assert_swiglu_parity(shape: tuple[int, ...], width: int) -> None:
    x = packed(shape)
    actual, usual, exact = (
        with_gradients(partial(swiglu, width=width, backend=backend), [x.to(dtype)])
        for backend, dtype in RULE
    )
    assert_exact_enough(actual, usual, exact)


@pytest.mark.parametrize(("shape", "width"), SIZES)
def test_results_and_gradients_are_those_of_pytorch(shape: tuple[int, ...], width: int) -> None:
    """Uninitialised memory is NaN here, so padding must be written."""
    assert_swiglu_parity(shape, width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_result_is_rounded_once(dtype: torch.dtype) -> None:
    x = packed((5, 12)).to(dtype)
    actual = with_gradients(partial(swiglu, backend="triton"), [x])
    for a, b in zip(actual, with_gradients(swiglu, [x.double()]), strict=True):
        torch.testing.assert_close(a, b.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_large_gates_neither_overflow_nor_underflow() -> None:
    x = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=DEVICE)
    out, gradient = with_gradients(partial(swiglu, backend="triton"), [x])
    assert out.tolist() == [[0.0, 200.0]]
    assert torch.isfinite(gradient).all()


def test_an_input_may_be_laid_out_in_any_way() -> None:
    x = packed((6, 5)).T
    assert torch.equal(swiglu(x, 3, backend="triton"), swiglu(x.contiguous(), 3, backend="triton"))


def test_the_ops_match_their_declarations() -> None:
    """Schema, autograd, and the shapes, dtypes and strides of what comes out."""
    x = packed((3, 8))
    check_declaration(triton_swiglu, (x.clone().requires_grad_(), 3))
    backward = torch.ops.nsa.triton_swiglu_backward.default
    check_declaration(backward, (x[:, :3], x, 3))


def test_each_pass_is_one_launch() -> None:
    x = PackedGates(torch.empty(4, 8, 48, device="meta"), 20)
    with recording() as launches:
        swiglu_backward(swiglu_forward(x), x)
    assert [launch.kernel.fn.__name__ for launch in launches] == [
        "swiglu_kernel",
        "swiglu_backward_kernel",
    ]
