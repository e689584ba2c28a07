"""Distillation: KL(teacher ‖ model) and its gradient, against PyTorch's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.model import loss
from nsa.model.loss import distillation_loss, token_divergence
from tests.model.models import build, tiny, tokens

TOKENS, WIDTH, VOCABULARY = 90, 12, 50


def heads(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor], Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = [(TOKENS, WIDTH), (VOCABULARY, WIDTH), (TOKENS, 2 * WIDTH), (VOCABULARY, 2 * WIDTH)]
    drawn = [torch.randn(size, generator=draw, dtype=torch.float64).to(dtype) for size in sizes]
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=draw)
    labels[::7] = -100
    return [x.requires_grad_() for x in drawn[:2]], drawn[2:], labels


def plain(model: list[Tensor], teacher: list[Tensor], labels: Tensor) -> Tensor:
    log_p, log_t = (F.log_softmax(F.linear(*head), -1) for head in (model, teacher))
    kl = F.kl_div(log_p, log_t, reduction="none", log_target=True).sum(-1)
    return kl[labels != -100].mean()


@pytest.mark.parametrize("chunks", [1, 5])
def test_loss_and_gradients_equal_pytorchs(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS_CPU", 4 * TOKENS * VOCABULARY // chunks)
    model, teacher, labels = heads()
    expected, actual = (f(model, teacher, labels) for f in (plain, distillation_loss))
    torch.testing.assert_close(actual, expected)
    for a, e in zip(*(torch.autograd.grad(x / 3, model) for x in (actual, expected)), strict=True):
        torch.testing.assert_close(a, e)


def test_in_bf16_it_loses_no_more_than_pytorchs() -> None:
    exact = plain(*heads())
    model, teacher, labels = heads(torch.bfloat16)
    theirs = plain([x.float() for x in model], [x.float() for x in teacher], labels)
    ours = distillation_loss(model, teacher, labels)
    assert (ours - exact).abs() <= 2 * (theirs - exact).abs() + 0.01 * exact
    assert ours.dtype == torch.float32


def test_no_label_gives_0_and_no_gradient() -> None:
    model, teacher, labels = heads()
    value = distillation_loss(model, teacher, torch.full_like(labels, -100))
    assert value == 0
    assert not any(x.any() for x in torch.autograd.grad(value, model))


def test_divergence_of_known_distributions() -> None:
    """The losses of the second token, and KL((½, ½) ‖ (¼, ¾)); nothing for an ignored label."""
    one = torch.ones(2, 1)
    half, quarter = (torch.tensor([p]).log().T.contiguous() for p in ([0.5, 0.5], [0.25, 0.75]))
    rows = token_divergence((one, quarter), (one, half), torch.tensor([1, -100])).tolist()
    kl = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert rows[0] == pytest.approx([math.log(4 / 3), math.log(2), kl, 0])
    assert rows[1] == [0, 0, 0, 0]


def test_the_model_adds_the_gradient_and_keeps_the_losss_value() -> None:
    model, teacher = build(tiny("pool")), build(tiny("dense"), seed=1).requires_grad_(False)
    ids, labels = tokens(30), tokens(30).roll(-1, 1)
    labels[:, :9] = -100
    head = teacher.hidden(ids).flatten(0, 1), teacher.head_weight
    parameters = list(model.parameters())
    both = model(ids, labels=labels, loss_weight=0.5, teacher=head)
    alone = model(ids, labels=labels, loss_weight=0.5)
    assert torch.equal(both, alone)
    log_p, log_t = (F.log_softmax(x(ids), -1)[labels != -100] for x in (model, teacher))
    kl = (log_t.exp() * (log_t - log_p)).sum(-1).mean()
    expected = torch.autograd.grad(alone + 0.5 * kl, parameters)
    for a, e in zip(torch.autograd.grad(both, parameters), expected, strict=True):
        torch.testing.assert_close(a, e)
    assert token_divergence(
        (model.hidden(ids).flatten(0, 1), model.head_weight), head, labels.flatten()
    )[:, 2].sum() == pytest.approx(float(kl.detach() * (labels != -100).sum()))
