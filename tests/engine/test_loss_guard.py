"""LossGuard turns bad losses into NaN, leaves good ones untouched, skips or aborts bad steps."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.engine.config import TrainConfig
from nsa.engine.cpu_collectives import RunAborted
from nsa.engine.loss_guard import MIN_LOSSES, WINDOW, BadLosses, LossGuard, skip_nonfinite_steps


def new_guard(on_spike: str = "warn", **settings: Any) -> LossGuard:
    return LossGuard(TrainConfig(on_spike=on_spike, **settings), torch.device("cpu"))


def trained_guard(on_spike: str = "warn", losses: int = MIN_LOSSES, **settings: Any) -> LossGuard:
    """Return a guard that has checked losses close to 3."""
    guard = new_guard(on_spike, **settings)
    for number in range(losses):
        guard.check(torch.tensor(3.0 + 0.05 * math.sin(number)))
    return guard


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
@pytest.mark.parametrize("on_spike", ["ignore", "warn"])
def test_a_loss_that_is_not_finite_makes_every_gradient_nan(value: float, on_spike: str) -> None:
    """The gradients of an infinite loss may be finite and would be applied. It is no spike."""
    weight = torch.ones(3, requires_grad=True)
    guard = trained_guard(on_spike)
    guard.check(weight.sum() + value).backward()
    assert weight.grad is not None
    assert weight.grad.isnan().all()
    assert guard.pop() == BadLosses(not_finite=1, spikes=0)
    guard.check(torch.tensor(9.0))
    assert guard.pop() == BadLosses(0, on_spike == "warn"), "a later spike is noticed"


def test_only_a_loss_far_above_the_recent_ones_is_a_spike() -> None:
    for losses, spikes in ((MIN_LOSSES - 1, 0), (MIN_LOSSES, 1)):
        guard = trained_guard(losses=losses)
        assert guard.check(torch.tensor(90.0)) == 90, "counted, not rejected"
        assert guard.check(torch.tensor(0.5)) == 0.5
        assert guard.pop() == BadLosses(0, spikes)
    ignoring = trained_guard("ignore")
    ignoring.check(torch.tensor(90.0))
    assert ignoring.pop() == BadLosses(0, 0)


def test_losses_are_compared_without_the_weights_of_their_micro_batches() -> None:
    """A micro-batch with ten times the labels is no spike; one without any has no mean."""
    guard = trained_guard()
    assert guard.check(torch.tensor(30.0), weight=10.0) == 30
    assert guard.pop() == BadLosses(0, 0)
    for _ in range(WINDOW):  # replaces no recent mean
        assert guard.check(torch.tensor(0.0), weight=0.0) == 0
    assert guard.check(torch.tensor(0.9), weight=0.1) == 0.9
    assert guard.check(torch.tensor(math.nan), weight=0.0).isnan()
    assert guard.pop() == BadLosses(1, 1)


@pytest.mark.parametrize(("score", "spikes"), [(11.5, 0), (12.5, 1)])
def test_a_spike_is_twelve_robust_deviations_above_the_median(score: float, spikes: int) -> None:
    losses = torch.tensor([3.0 + 0.05 * math.sin(number) for number in range(MIN_LOSSES)])
    median = losses.median()
    deviation = 1.4826 * (losses - median).abs().median()
    guard = trained_guard()
    guard.check(median + score * deviation)
    assert guard.pop() == BadLosses(0, spikes)


def test_warning_counts_spikes_until_the_new_level_is_normal() -> None:
    guard = trained_guard()
    assert guard.check(torch.tensor(9.0)) == 9
    assert guard.pop() == BadLosses(0, 1)
    for _ in range(200):
        guard.check(torch.tensor(9.0))
    guard.pop()
    guard.check(torch.tensor(9.0))
    assert guard.pop() == BadLosses(0, 0)


def test_a_plain_optimizer_skips_a_step_that_is_not_finite() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
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
    with pytest.raises(RunAborted, match="21 bad steps since launch, more than 20"):
        handle_skipped_step(guard, messages)


@pytest.mark.parametrize(
    ("losses", "cause"),
    [
        ([], "a gradient is not finite"),
        ([math.nan], "a loss is not finite on rank 0"),
        ([50.0], "a gradient is not finite; a loss is far above the recent ones on rank 0"),
    ],
)
def test_the_cause_is_named_and_abort_ends_the_run_at_the_first_bad_step(
    losses: list[float], cause: str
) -> None:
    messages: list[str] = []
    guard = trained_guard(on_bad_step="abort")
    for loss in losses:
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
