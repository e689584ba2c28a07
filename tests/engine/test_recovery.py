"""Recovery: the budget of bad steps, and which policy applies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsa.engine.config import TrainConfig
from nsa.engine.cpu_collectives import RunAborted
from nsa.engine.loss_guard import BadLosses
from nsa.engine.recovery import recover
from nsa.engine.run import Run


def bad_run(losses: BadLosses, messages: list[str], **settings: Any) -> Run:
    """One rank of a run whose last step had these bad losses."""
    run = SimpleNamespace(
        config=SimpleNamespace(train=TrainConfig(**settings)),
        collectives=SimpleNamespace(gather=lambda value: [value]),
        guard=SimpleNamespace(pop=lambda: losses),
        observers=SimpleNamespace(on_message=messages.append),
        state=SimpleNamespace(step=7),
        bad_steps=0,
    )
    return cast(Run, run)


def test_more_bad_steps_than_the_budget_end_the_run() -> None:
    messages: list[str] = []
    run = bad_run(BadLosses(1, 0), messages, bad_steps=2)
    assert not recover(run)
    assert not recover(run)
    cause = "step 7: a loss is not finite on rank 0"
    assert messages == [f"{cause}; step skipped ({n} of at most 2)" for n in (1, 2)]
    with pytest.raises(RunAborted, match=r"3 bad steps .* more than train.bad_steps = 2"):
        recover(run)


@pytest.mark.parametrize("losses", [BadLosses(0, 1), BadLosses(1, 0), BadLosses(1, 1)])
def test_a_spike_alone_has_a_policy_of_its_own(losses: BadLosses) -> None:
    messages: list[str] = []
    run = bad_run(losses, messages, on_bad_step="abort", on_spike="skip")
    if losses.not_finite:
        with pytest.raises(RunAborted, match=r"train.on_bad_step = abort"):
            recover(run)
    else:
        assert not recover(run)
    assert len(messages) == (not losses.not_finite)
