"""What must not reach the weights is turned into NaN, and nothing else is touched."""

from __future__ import annotations

import math

import pytest
import torch

from nsa.engine.config import TrainConfig
from nsa.engine.loss_guard import ENOUGH, Finding, Guard, refuse_bad_gradients

CPU = torch.device("cpu")


def guard(on_spike: str = "skip", score: float = 12.0) -> Guard:
    return Guard(TrainConfig(on_spike=on_spike, spike_score=score), CPU)


def fed(watcher: Guard, count: int = ENOUGH, around: float = 3.0) -> Guard:
    """After `count` losses that lie closely around a value."""
    for number in range(count):
        watcher.watch(torch.tensor(around + 0.05 * math.sin(number)))
    return watcher


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_loss_and_its_gradient_pass_to_the_bit(dtype: torch.dtype) -> None:
    weight = torch.randn(50, dtype=dtype, requires_grad=True)
    loss = weight.square().mean()
    (expected,) = torch.autograd.grad(loss, weight, retain_graph=True)
    watched = guard().watch(loss)
    (found,) = torch.autograd.grad(watched, weight)
    assert torch.equal(watched, loss)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("on_spike", ["ignore", "warn", "skip"])
def test_a_loss_that_is_not_finite_makes_every_gradient_nan(value: float, on_spike: str) -> None:
    """An infinite loss may well have finite gradients, which would be applied."""
    weight = torch.ones(3, requires_grad=True)
    watcher = guard(on_spike)
    watcher.watch(weight.sum() + value).backward()
    assert weight.grad is not None
    assert weight.grad.isnan().all()
    assert watcher.take() == Finding(not_finite=1, spikes=0)
    assert watcher.take() == Finding(0, 0)


def test_a_loss_far_above_the_recent_ones_is_a_spike_and_one_below_is_none() -> None:
    watcher = fed(guard())
    assert watcher.watch(torch.tensor(9.0)).isnan()
    assert watcher.watch(torch.tensor(0.5)) == 0.5
    assert watcher.take() == Finding(0, 1)


def test_before_enough_losses_are_known_none_is_a_spike() -> None:
    watcher = fed(guard(), ENOUGH - 1)
    assert watcher.watch(torch.tensor(90.0)) == 90


def test_the_score_says_how_far_is_too_far() -> None:
    for score, passes in ((3.0, False), (100.0, True)):
        watched = fed(guard(score=score)).watch(torch.tensor(3.4))
        assert watched.isfinite() == passes


def test_warning_counts_spikes_and_lets_them_through() -> None:
    watcher = fed(guard("warn"))
    assert watcher.watch(torch.tensor(9.0)) == 9
    assert watcher.take() == Finding(0, 1)


def test_spikes_that_are_left_out_do_not_make_the_next_one_normal() -> None:
    watcher = fed(guard())
    assert all(watcher.watch(torch.tensor(9.0)).isnan() for _ in range(200))


def test_losses_that_rise_for_good_become_normal_where_spikes_only_warn() -> None:
    watcher = fed(guard("warn"))
    for _ in range(200):
        watcher.watch(torch.tensor(9.0))
    watcher.take()
    watcher.watch(torch.tensor(9.0))
    assert watcher.take() == Finding(0, 0)


def test_a_restored_guard_judges_as_the_saved_one_would() -> None:
    first = fed(guard(), 40)
    first.watch(torch.tensor(math.nan))
    second = guard()
    second.restore(first.state())
    assert second.state() == first.state()
    for value in (3.01, 9.0, 3.2, 4.1):
        assert torch.equal(
            first.watch(torch.tensor(value)).isnan(), second.watch(torch.tensor(value)).isnan()
        )


def test_a_bare_optimizer_leaves_out_a_step_that_is_not_finite() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    refuse_bad_gradients(optimizer)
    weight.grad = torch.tensor([1.0, math.nan])
    optimizer.step()
    assert optimizer.overflow
    assert torch.equal(weight.detach(), torch.ones(2))
    assert not optimizer.state
    weight.grad = torch.ones(2)
    optimizer.step()
    assert not optimizer.overflow
    assert not torch.equal(weight.detach(), torch.ones(2))
