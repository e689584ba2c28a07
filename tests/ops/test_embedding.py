"""The tied embedding on a CPU: gradients are those of two plain uses of the weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.ops import tied_embedding

TOKENS = torch.tensor([[3, 0, 3], [5, 3, 0]])


def weight() -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("used", ["both", "tokens", "head"])
def test_gradients_are_those_of_two_plain_uses(used: str) -> None:
    """Also where a caller uses only one of the two results."""
    gradients = []
    for tied in (True, False):
        w = weight().requires_grad_()
        x, head = tied_embedding(TOKENS, w) if tied else (F.embedding(TOKENS, w), w)
        tokens, head = x.square().sum(), (x.detach() @ head.T).cos().sum()
        (gradient,) = torch.autograd.grad(
            {"both": tokens + head, "tokens": tokens, "head": head}[used], w
        )
        gradients.append(gradient)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-14)


def test_a_second_backward_pass_gives_the_same_gradient() -> None:
    w = weight().requires_grad_()
    x, head = tied_embedding(TOKENS, w)
    loss = (x @ head.T).square().sum()
    first, second = (torch.autograd.grad(loss, w, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, head = tied_embedding(TOKENS, weight())
    assert not x.requires_grad
    assert not head.requires_grad


def test_it_compiles_as_one_graph() -> None:
    def loss(w: Tensor) -> Tensor:
        x, head = tied_embedding(TOKENS, w)
        return (x @ head.T).square().sum()

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        w = weight().requires_grad_()
        results.append(torch.autograd.grad(function(w), w)[0])
    torch.testing.assert_close(*results)
