"""Recovery from a step that was not applied: skip it, roll back to a checkpoint, or abort."""

from __future__ import annotations

import contextlib

from nsa import checkpoint
from nsa.checkpoint import SavedState
from nsa.engine.cpu_collectives import RunAborted
from nsa.engine.loss_guard import BadLosses
from nsa.engine.resume import read_state
from nsa.engine.run import Run


def recover(run: Run) -> bool:
    """Apply train.on_bad_step or train.on_spike on all ranks; return True after a rollback.

    The bad step did not change the weights. A rollback replaces `run.state`.
    """
    train = run.config.train
    bad_losses = run.collectives.gather(run.guard.pop())
    cause = _describe(bad_losses)
    if cause is None and train.precision == "fp16":
        return False  # DeepSpeed lowers the loss scale
    spike_only = cause is not None and not any(losses.not_finite for losses in bad_losses)
    setting = "train.on_spike" if spike_only else "train.on_bad_step"
    policy = train.on_spike if spike_only else train.on_bad_step
    cause = f"step {run.state.step}: {cause or 'a gradient is not finite'}"
    run.bad_steps += 1
    if policy == "abort":
        raise RunAborted(f"{cause}; {setting} = abort: stopped before updating the weights")
    if run.bad_steps > train.bad_steps:
        raise RunAborted(
            f"{cause}; {run.bad_steps} bad steps since launch, more than train.bad_steps = "
            f"{train.bad_steps}; check the data and lower the learning rate"
        )
    if policy == "rollback" and _roll_back(run, cause):
        return True
    run.observers.on_message(
        f"{cause}; step skipped ({run.bad_steps} of at most {train.bad_steps})"
    )
    return False


def _describe(bad_losses: list[BadLosses]) -> str | None:
    """Return which ranks had which bad losses; None if there are none."""
    not_finite = [str(rank) for rank, losses in enumerate(bad_losses) if losses.not_finite]
    spikes = [str(rank) for rank, losses in enumerate(bad_losses) if losses.spikes]
    parts = [f"a loss is not finite on rank {', '.join(not_finite)}"] if not_finite else []
    if spikes:
        parts.append(f"a loss is far above the recent ones on rank {', '.join(spikes)}")
    return "; ".join(parts) or None


def _roll_back(run: Run, cause: str) -> bool:
    """Restore the newest checkpoint and mark the bad step's samples to be skipped."""
    bad_samples = run.state.samples - run.data.loader.samples_per_step
    with contextlib.suppress(checkpoint.SaveFailed):  # logged by the saver
        run.saver.finish()
    saved = run.collectives.broadcast(_newest_finite(run) if run.ranks.rank == 0 else None)
    if saved is None:
        run.observers.on_message(f"{cause}; no checkpoint to roll back to")
        return False
    checkpoint.load(run.engine, saved)
    passed_over = {bad_samples, *run.state.passed_over}
    run.state, rank_state = read_state(saved, run.ranks)
    run.state.passed_over = sorted(passed_over.union(run.state.passed_over))
    run.loader_state = rank_state.get("feed")
    run.data.rewind(run.state.samples, run.loader_state)
    if "guard" in rank_state:
        run.guard.restore(rank_state["guard"])
    run.saved_step = run.state.step
    run.observers.on_rollback(run.state.step)
    run.observers.on_message(
        f"{cause}; rolled back to step {run.state.step}, the bad step's samples will be skipped"
    )
    return True


def _newest_finite(run: Run) -> SavedState | None:
    """Return the newest valid checkpoint without NaN or inf, converted if needed; log errors."""
    try:
        path, notes = checkpoint.newest_valid(run.request.run_dir / "checkpoints", finite=True)
        for note in notes:
            run.observers.on_message(note)
        if path is None:
            return None
        saved = checkpoint.read_state_file(path)
        if checkpoint.needs_universal(saved, run.ranks.world_size):
            saved = checkpoint.to_universal(saved)
        return saved
    except (OSError, ValueError) as error:  # the other ranks wait for the result
        run.observers.on_message(f"no checkpoint could be read: {error}")
        return None
