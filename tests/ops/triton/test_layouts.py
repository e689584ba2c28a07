"""Strides: neither inputs nor the gradients of outputs need be contiguous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from nsa.spec import NSASpec
from tests.ops.cases import Case, Function, Inputs, default
from tests.ops.triton.parity import BRANCHES, Run, assert_parity, by_head, computed, inputs

CASE = Case(NSASpec(4, 2, 5, 2, 0, 1, 7), (23,), batch=2, group=2, key_dim=6, value_dim=4)
branches = pytest.mark.parametrize("branch", default(1, ["mixed", *BRANCHES]))


def by_size(x: Tensor) -> Tensor:
    """[B, T, D, H] in memory: the last dimension is not contiguous."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def interleaved(x: Tensor) -> Tensor:
    """Every third [H, D] of a token, as in a packed projection of three branches."""
    rows = torch.full((*x.shape[:2], 3, *x.shape[2:]), torch.nan, device=x.device)
    rows[:, :, 1] = x
    return rows[:, :, 1]


def padded(x: Tensor) -> Tensor:
    """With padding after each dimension."""
    buffer = torch.full([size + 1 for size in x.shape], torch.nan, device=x.device)
    part = buffer[tuple(slice(size) for size in x.shape)]
    return part.copy_(x)


@cache
def contiguous(branch: str) -> list[Tensor]:
    return computed(CASE, branch, "triton", inputs(CASE))


@branches
@pytest.mark.parametrize("layout", [by_head, by_size, interleaved, padded])
def test_inputs_laid_out_otherwise_give_the_same_bits(
    layout: Callable[[Tensor], Tensor], branch: str
) -> None:
    x = Inputs(*(layout(y) for y in inputs(CASE).tensors()))
    assert not any(y.is_contiguous() for y in x.tensors())
    torch.testing.assert_close(
        computed(CASE, branch, "triton", x), contiguous(branch), rtol=0, atol=0
    )


def _gradients(
    function: Function, given: Sequence[Tensor], gradient: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    given = [x.detach().requires_grad_() for x in given]
    o = function(*given)
    o = o[0] if isinstance(o, tuple) else o
    return list(torch.autograd.grad(o, given, gradient(o)))


def _numbers(x: Tensor) -> Tensor:
    return torch.arange(x.numel(), device=x.device).to(x).sin().view(x.shape)


def one_for_all(function: Function, given: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of Σ o: a single number, expanded."""
    return _gradients(function, given, lambda o: torch.ones_like(o[:1, :1, :1, :1]).expand_as(o))


def one_for_all_heads(function: Function, given: Sequence[Tensor]) -> list[Tensor]:
    return _gradients(function, given, lambda o: _numbers(o[:, :, :1]).expand_as(o))


def laid_out_by_head(function: Function, given: Sequence[Tensor]) -> list[Tensor]:
    return _gradients(function, given, lambda o: by_head(_numbers(o)))


@branches
@pytest.mark.parametrize("run", [one_for_all, one_for_all_heads, laid_out_by_head])
def test_the_outputs_gradient_may_be_expanded_or_transposed(run: Run, branch: str) -> None:
    assert_parity(CASE, branch, run=run)
