"""Recovery: the budget of bad steps, their causes, and fp16."""

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
        collectives=SimpleNamespace(gather=lambda value, kind: [value]),
        guard=SimpleNamespace(pop=lambda: losses),
        observers=SimpleNamespace(on_message=messages.append),
        state=SimpleNamespace(step=7),
        bad_steps=0,
    )
    return cast(Run, run)


def test_more_bad_steps_than_the_budget_end_the_run() -> None:
    messages: list[str] = []
    run = bad_run(BadLosses(1, 0), messages)
    for _ in range(20):
        recover(run)
    cause = "step 7: a loss is not finite on rank 0"
    assert messages == [f"{cause}; step skipped ({n} of at most 20)" for n in range(1, 21)]
    with pytest.raises(RunAborted, match="21 bad steps since launch, more than 20"):
        recover(run)


@pytest.mark.parametrize(
    ("losses", "cause"),
    [
        (BadLosses(0, 0), "a gradient is not finite"),
        (BadLosses(2, 0), "a loss is not finite on rank 0"),
        (
            BadLosses(0, 1),
            "a gradient is not finite; a loss is far above the recent ones on rank 0",
        ),
    ],
)
def test_the_cause_is_named_and_abort_ends_the_run_at_the_first_bad_step(
    losses: BadLosses, cause: str
) -> None:
    messages: list[str] = []
    run = bad_run(losses, messages, on_bad_step="abort")
    with pytest.raises(RunAborted, match="before updating the weights") as aborted:
        recover(run)
    assert str(aborted.value).startswith(f"step 7: {cause}; train.on_bad_step = abort")
    assert messages == []


def test_a_gradient_that_overflows_in_fp16_is_no_bad_step() -> None:
    """DeepSpeed lowers the loss scale, many times in the first steps."""
    messages: list[str] = []
    run = bad_run(BadLosses(0, 0), messages, precision="fp16", on_bad_step="abort")
    recover(run)
    assert (run.bad_steps, messages) == (0, [])
    with pytest.raises(RunAborted, match="a loss is not finite"):
        recover(bad_run(BadLosses(1, 0), messages, precision="fp16", on_bad_step="abort"))
