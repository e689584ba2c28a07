"""Preflight gate: the checks of `nsa doctor`, run by the ranks before training."""

from __future__ import annotations

import os

import torch

from nsa.doctor.check import Check, failures, lines, passed
from nsa.doctor.node import checkpoint_bytes, kept_checkpoints, node_checks
from nsa.doctor.ranks import rank_checks
from nsa.engine.consensus import RunAborted
from nsa.engine.run_request import RunRequest
from nsa.gates.ladder import preflight
from nsa.model import parameter_count


def check_node(request: RunRequest, steps_done: int) -> list[Check]:
    """Check this node, from one of its ranks; `check_ranks` judges the result."""
    config = request.config
    return node_checks(
        request.run_dir,
        checkpoint_bytes=checkpoint_bytes(parameter_count(config.model)),
        checkpoints=kept_checkpoints(
            request.stop_step, config.checkpoint.every, config.checkpoint.keep, steps_done
        ),
        ranks=int(os.environ.get("LOCAL_SIZE", 1)),
    )


def check_ranks(request: RunRequest, device: torch.device, node: list[Check]) -> list[Check]:
    """Return every node's checks on every rank; all raise RunAborted if one of them fails."""
    checks = rank_checks(
        device=device,
        config="".join(request.config_files().values()),
        node=node,
    )
    if not passed(checks):
        raise RunAborted(f"preflight: {failures(checks)}")
    return checks


def preflight_notes(checks: list[Check], request: RunRequest) -> list[str]:
    """Warnings for the log; every check if the run stops at the preflight gate."""
    if request.stop_step == 0:
        return [*lines(checks), preflight(checks).summary]
    return lines([check for check in checks if check.status == "warn"])
