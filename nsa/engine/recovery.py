"""After a step that was not applied: go on, go back to the newest checkpoint, or end the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nsa import checkpoint
from nsa.engine.loss_guard import Finding, RunAborted
from nsa.engine.resume import saved_in

if TYPE_CHECKING:
    from nsa.engine.loop import Run


def recover(run: Run) -> None:
    """Do what the settings say; the weights are whole, and all ranks come here together.

    After a rollback `run.state` is another object, of an earlier step.
    """
    train = run.config.train
    findings = run.agreement.gather(run.guard.take())
    what = describe(findings)
    if what is None and train.precision == "fp16":
        return  # the loss scale was too high, which is how DeepSpeed finds the right one
    only_a_spike = what is not None and not any(finding.not_finite for finding in findings)
    setting = "train.on_spike" if only_a_spike else "train.on_bad_step"
    policy = train.on_spike if only_a_spike else train.on_bad_step
    what = f"step {run.state.step}: {what or 'a gradient is not finite'}"
    run.bad_steps += 1
    if policy == "abort":
        raise RunAborted(f"{what}; {setting} is abort, so the run ends before the weights see it")
    if run.bad_steps > train.bad_steps:
        raise RunAborted(
            f"{what}; that is the {run.bad_steps}th since the start, and train.bad_steps = "
            f"{train.bad_steps}: look at the data and the learning rate"
        )
    if policy == "rollback" and _roll_back(run, what):
        return
    _say(run, f"{what}; this step is left out ({run.bad_steps} of {train.bad_steps} so far)")


def describe(findings: list[Finding]) -> str | None:
    """Which ranks saw what in their losses; None where they saw nothing."""
    parts = []
    for name, seen in (
        ("a loss is not finite", [finding.not_finite for finding in findings]),
        ("a loss is far above the recent ones", [finding.spikes for finding in findings]),
    ):
        ranks = [str(rank) for rank, count in enumerate(seen) if count]
        if ranks:
            parts.append(f"{name} on rank {', '.join(ranks)}")
    return "; ".join(parts) or None


def _roll_back(run: Run, what: str) -> bool:
    """Restore the newest checkpoint and pass over the bad step's samples when they come again."""
    bad_samples = run.state.samples - run.data.loader.samples_per_step
    try:
        run.saver.finish()
    except checkpoint.SaveFailed as error:
        _say(run, f"NOT SAVED: {error}")
    found = run.agreement.from_rank_0(_checkpoint(run) if run.rank == 0 else None)
    if found is None:
        _say(run, f"{what}; there is no checkpoint to go back to")
        return False
    checkpoint.load(run.engine, found)
    passed_over = {*run.state.passed_over, bad_samples}
    run.state, own = saved_in(found, run.rank, run.ranks)
    run.state.passed_over = sorted(passed_over | {*run.state.passed_over})
    run.place = own.get("feed")
    run.data.rewind(run.state.samples, run.place)
    if "guard" in own:
        run.guard.restore(own["guard"])
    run.saved = run.state.step
    if run.rank == 0:
        run.observers.on_rollback(run.state.step)
    _say(run, f"{what}; back to step {run.state.step}, from where its samples are passed over")
    return True


def _checkpoint(run: Run) -> Path | None:
    """The newest one that is whole and finite; the other ranks wait for the answer."""
    try:
        found, notes = checkpoint.newest_complete(run.run_dir / "checkpoints", finite=True)
        for note in notes:
            _say(run, note)
        if found is not None and checkpoint.needs_universal(found, run.ranks):
            found = checkpoint.to_universal(found)
        return found
    except (OSError, ValueError) as error:
        _say(run, f"no checkpoint could be read: {error}")
        return None


def _say(run: Run, text: str) -> None:
    if run.rank == 0:
        run.observers.on_message(text)
