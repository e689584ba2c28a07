"""Recovery from a step that was not applied, because a value is not finite: skip it, or abort."""

from __future__ import annotations

from nsa.engine.cpu_collectives import RunAborted
from nsa.engine.loss_guard import BadLosses
from nsa.engine.run import Run

MAX_BAD_STEPS = 20  # skipped since launch


def recover(run: Run) -> None:
    """Apply train.on_bad_step on all ranks; the bad step did not change the weights."""
    train = run.config.train
    bad_losses = run.collectives.gather(run.guard.pop(), BadLosses)
    not_finite = [str(rank) for rank, losses in enumerate(bad_losses) if losses.not_finite]
    spikes = [str(rank) for rank, losses in enumerate(bad_losses) if losses.spikes]
    if not not_finite and train.precision == "fp16":
        return  # DeepSpeed lowers the loss scale
    cause = f"step {run.state.step}: a gradient is not finite"
    if not_finite:
        cause = f"step {run.state.step}: a loss is not finite on rank {', '.join(not_finite)}"
    if spikes:
        cause += f"; a loss is far above the recent ones on rank {', '.join(spikes)}"
    run.bad_steps += 1
    if train.on_bad_step == "abort":
        raise RunAborted(f"{cause}; train.on_bad_step = abort: stopped before updating the weights")
    if run.bad_steps > MAX_BAD_STEPS:
        raise RunAborted(
            f"{cause}; {run.bad_steps} bad steps since launch, more than {MAX_BAD_STEPS}; check "
            "the data and lower the learning rate"
        )
    run.observers.on_message(f"{cause}; step skipped ({run.bad_steps} of at most {MAX_BAD_STEPS})")
