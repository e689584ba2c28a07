"""LossGuard: keeps NaN and inf from the weights, and names the ranks whose loss is not finite.

A loss that is not finite is multiplied by NaN, so after reduction its gradients are NaN on every
rank. DeepSpeed checks the gradient norm before each update, so all ranks skip the step, without an
additional collective. Every other loss is multiplied by exactly 1. Only after a skipped step do the
ranks wait for their devices and exchange counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from nsa.engine.config import TrainConfig
from nsa.engine.process_group import CpuCollectives, RunAborted

MAX_BAD_STEPS = 20  # skipped since launch; one more aborts the run


class LossGuard:
    """Replaces one rank's non-finite losses with NaN, and counts them."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.bad_steps = 0  # since launch
        self._config = config
        self._not_finite = torch.zeros((), dtype=torch.int64, device=device)  # since the last skip

    def check(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss`, or NaN if it is not finite."""
        not_finite = ~loss.detach().isfinite()
        self._not_finite += not_finite
        return loss * torch.where(not_finite, math.nan, 1.0).to(loss.dtype)

    def handle_skipped_step(
        self, step: int, collectives: CpuCollectives, on_message: Callable[[str], None]
    ) -> None:
        """Log that DeepSpeed skipped `step` on all ranks, or abort the run."""
        counts = collectives.gather(int(self._not_finite), int)
        self._not_finite.zero_()
        ranks = [str(rank) for rank, count in enumerate(counts) if count]
        if not ranks and self._config.precision == "fp16":
            return  # DeepSpeed lowers the loss scale
        cause = f"step {step}: a gradient is not finite"
        if ranks:
            cause = f"step {step}: a loss is not finite on rank {', '.join(ranks)}"
        self.bad_steps += 1
        if self._config.on_bad_step == "abort":
            raise RunAborted(
                f"{cause}; train.on_bad_step = abort: stopped before updating the weights"
            )
        if self.bad_steps > MAX_BAD_STEPS:
            raise RunAborted(
                f"{cause}; {self.bad_steps} bad steps since launch, more than {MAX_BAD_STEPS}; "
                "check the data and lower the learning rate"
            )
        on_message(f"{cause}; step skipped ({self.bad_steps} of at most {MAX_BAD_STEPS})")


def skip_nonfinite_steps(optimizer: torch.optim.Optimizer) -> None:
    """Make a torch optimizer skip steps with NaN or inf gradients, as DeepSpeed's optimizers do.

    DeepSpeed uses the torch optimizer itself only in stage 0 with fp32, which is for debugging, so
    waiting for the device does not matter.
    """
    step = optimizer.step
    optimizer.overflow = False  # type: ignore[attr-defined]  # the engine reads it after step()

    def checked_step(*args: Any, **kwargs: Any) -> Any:
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"]]
        norms = torch._foreach_norm([grad for grad in gradients if grad is not None])
        optimizer.overflow = not torch.stack(norms).isfinite().all()  # type: ignore[attr-defined]
        return None if optimizer.overflow else step(*args, **kwargs)  # type: ignore[attr-defined]

    optimizer.step = checked_step  # type: ignore[method-assign]
