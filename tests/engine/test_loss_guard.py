"""LossGuard turns bad losses into NaN, leaves good ones untouched, skips or aborts bad steps."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.engine.config import TrainConfig
from nsa.engine.loss_guard import LossGuard, skip_nonfinite_steps
from nsa.engine.process_group import RunAborted


def new_guard(**settings: Any) -> LossGuard:
    return LossGuard(TrainConfig(**settings), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_good_loss_and_its_gradient_pass_bit_for_bit(dtype: torch.dtype) -> None:
    weight = torch.randn(50, dtype=dtype, requires_grad=True)
    loss = weight.square().mean()
    (expected,) = torch.autograd.grad(loss, weight, retain_graph=True)
    checked = new_guard().check(loss)
    (gradient,) = torch.autograd.grad(checked, weight)
    assert torch.equal(checked, loss)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_makes_every_gradient_nan(value: float) -> None:
    """The gradients of an infinite loss may be finite and would be applied."""
    weight = torch.ones(3, requires_grad=True)
    new_guard().check(weight.sum() + value).backward()
    assert weight.grad is not None
    assert weight.grad.isnan().all()


def test_a_plain_optimizer_skips_a_step_that_is_not_finite() -> None:
    weight, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.AdamW([weight, unused], lr=0.1)
    skip_nonfinite_steps(optimizer)
    weight.grad = torch.tensor([1.0, math.nan])
    optimizer.step()
    assert optimizer.overflow
    assert torch.equal(weight.detach(), torch.ones(2))
    assert not optimizer.state
    weight.grad = torch.ones(2)
    optimizer.step()
    assert not optimizer.overflow
    assert not torch.equal(weight.detach(), torch.ones(2))


def handle_skipped_step(guard: LossGuard, messages: list[str]) -> None:
    """Let a run of one rank recover from its step 7."""
    one_rank: Any = SimpleNamespace(gather=lambda value, kind: [value])
    guard.handle_skipped_step(7, one_rank, messages.append)


def test_more_bad_steps_than_the_budget_end_the_run() -> None:
    messages: list[str] = []
    guard = new_guard()
    for _ in range(20):
        guard.check(torch.tensor(math.nan))
        handle_skipped_step(guard, messages)
    cause = "step 7: a loss is not finite on rank 0"
    assert messages == [f"{cause}; step skipped ({n} of at most 20)" for n in range(1, 21)]
    last = "step 7: a gradient is not finite; 21 bad steps since launch, more than 20"
    with pytest.raises(RunAborted, match=last):
        handle_skipped_step(guard, messages)


@pytest.mark.parametrize(
    ("losses", "cause"),
    [
        ([], "a gradient is not finite"),
        ([math.nan], "a loss is not finite on rank 0"),
    ],
)
def test_the_cause_is_named_and_abort_ends_the_run_at_the_first_bad_step(
    losses: list[float], cause: str
) -> None:
    messages: list[str] = []
    guard = new_guard(on_bad_step="abort")
    for loss in (3.0, *losses):
        guard.check(torch.tensor(loss))
    with pytest.raises(RunAborted, match="before updating the weights") as aborted:
        handle_skipped_step(guard, messages)
    assert str(aborted.value).startswith(f"step 7: {cause}; train.on_bad_step = abort")
    assert messages == []


def test_a_gradient_that_overflows_in_fp16_is_no_bad_step() -> None:
    """DeepSpeed lowers the loss scale, many times in the first steps."""
    messages: list[str] = []
    guard = new_guard(precision="fp16", on_bad_step="abort")
    handle_skipped_step(guard, messages)
    assert (guard.bad_steps, messages) == (0, [])
    guard.check(torch.tensor(math.nan))
    with pytest.raises(RunAborted, match="a loss is not finite"):
        handle_skipped_step(guard, messages)
