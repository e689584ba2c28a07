"""RMSNorm with the residual add, in PyTorch: its definition, gradients, and wrong arguments."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.ops import add_rms_norm
from tests.ops.cases import with_gradients

EPS = 1e-3


def tensors(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, delta and weight."""
    draw = torch.Generator().manual_seed(0)
    sizes = (shape, shape, shape[-1:])
    return [torch.randn(size, dtype=dtype, generator=draw) for size in sizes]


def fused(x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, delta, weight, EPS)


def defined(x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + delta
    return total, total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def native(x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x + delta, F.rms_norm(x + delta, weight.shape, weight, EPS)


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 8), (4, 1), (7,)], ids=str)
def test_results_and_gradients_are_those_of_the_definition(shape: tuple[int, ...]) -> None:
    given = tensors(*shape)
    torch.testing.assert_close(with_gradients(fused, given), with_gradients(defined, given))


@pytest.mark.parametrize("output", [0, 1])
def test_either_output_may_have_no_gradient(output: int) -> None:
    given = tensors(2, 5)
    torch.testing.assert_close(
        *(with_gradients(lambda *x, f=f: f(*x)[output], given) for f in (fused, defined))
    )


def test_without_a_residual_x_itself_is_returned() -> None:
    x, _, weight = tensors(2, 5)
    total, normed = add_rms_norm(x, None, weight, EPS)
    assert total is x
    torch.testing.assert_close(normed, defined(x, torch.zeros_like(x), weight)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_loses_no_more_precision_than_pytorchs_norm(dtype: torch.dtype) -> None:
    given = tensors(7, 48, dtype=dtype)
    exact = with_gradients(defined, [x.double() for x in given])
    for a, u, e in zip(
        with_gradients(fused, given), with_gradients(native, given), exact, strict=True
    ):
        lost, usual = ((x.double() - e).abs().max() for x in (a, u))
        assert lost <= 1.2 * usual + torch.finfo(dtype).tiny


def test_under_autocast_the_sum_has_the_wider_dtype() -> None:
    x, delta, weight = tensors(2, 5, dtype=torch.float32)
    total, normed = add_rms_norm(x, delta.bfloat16(), weight, EPS)
    assert total.dtype == normed.dtype == torch.float32
    torch.testing.assert_close(normed, native(x, delta.bfloat16(), weight)[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(4)}, r"^weight has shape \(4,\); x requires \(5,\)"),
        ({"delta": torch.ones(5)}, r"^delta has shape \(5,\); x requires \(2, 5\)"),
        ({"backend": "triton"}, r"'triton' does not support add_rms_norm: it has no float64"),
    ],
)
def test_wrong_arguments_raise(change: dict[str, object], message: str) -> None:
    x, delta, weight = tensors(2, 5)
    call = partial(add_rms_norm, x=x, eps=EPS)
    with pytest.raises(ValueError, match=message):
        call(**{"delta": delta, "weight": weight} | change)
