"""The preflight gate: `nsa doctor`'s checks, made by the ranks of a run."""

from __future__ import annotations

import os

import torch

from nsa.doctor.check import Check, failures, lines, verdict
from nsa.doctor.command import (
    checkpoint_bytes,
    code_fingerprint,
    kept_checkpoints,
    node_checks,
    rank_checks,
)
from nsa.engine.loss_guard import RunAborted
from nsa.engine.recipe import Plan, run_files
from nsa.gates.ladder import preflight
from nsa.model import parameter_count


def check_node(plan: Plan, done: int) -> list[Check]:
    """What one rank of a machine sees of it, before `done` steps are gone on from; judged once all
    ranks are together."""
    return node_checks(
        plan.run_dir,
        checkpoint_bytes=checkpoint_bytes(parameter_count(plan.config.model)),
        checkpoints=kept_checkpoints(
            plan.stop, plan.config.checkpoint.every, plan.config.checkpoint.keep, done
        ),
        ranks=int(os.environ.get("LOCAL_SIZE", 1)),
    )


def check_ranks(plan: Plan, device: torch.device, machine: list[Check]) -> list[Check]:
    """The same list on every rank; all raise RunAborted where something in it fails."""
    checks = rank_checks(
        fingerprint=code_fingerprint(),
        device=device,
        config="".join(run_files(plan).values()),
        machine=machine,
    )
    if not verdict(checks):
        raise RunAborted(f"preflight: {failures(checks)}")
    return checks


def notes_of(checks: list[Check], plan: Plan) -> list[str]:
    """Warnings; every check where the run is asked to stop behind them."""
    if plan.stop == 0:
        return [*lines(checks), preflight(checks).summary]
    return [line for check in checks if check.status == "warn" for line in lines([check])]
