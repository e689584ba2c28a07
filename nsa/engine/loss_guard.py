"""LossGuard: keeps NaN and inf from the weights, and counts non-finite losses and loss spikes.

A loss that is not finite is multiplied by NaN, so after reduction its gradients are NaN on every
rank. DeepSpeed checks the gradient norm before each update, so all ranks skip the step, without an
additional collective. Every other loss is multiplied by exactly 1. Only after a skipped step do the
ranks wait for their devices and exchange counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nsa.engine.config import TrainConfig
from nsa.engine.cpu_collectives import CpuCollectives, RunAborted

WINDOW = 128  # recent micro-batch losses that a new one is compared with
MIN_LOSSES = 32  # before any loss counts as a spike
SPIKE_SCORE = 12.0  # robust standard deviations above the recent losses
MAD_TO_STD = 1.4826  # median absolute deviation to standard deviation, of a normal distribution
MAX_BAD_STEPS = 20  # skipped since launch; one more aborts the run
MIN_SPREAD = 0.01  # fraction of the median: noise on nearly equal losses is no spike


class BadLosses(NamedTuple):
    """One rank's counts of bad losses."""

    not_finite: int
    spikes: int


class LossGuard:
    """Replaces one rank's non-finite losses with NaN; counts them and loss spikes."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.bad_steps = 0  # since launch
        self._config = config
        self._recent = torch.full((WINDOW,), math.nan, device=device)
        self._seen = 0
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # not finite, spikes

    def check(self, loss: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        """Return `loss`, or NaN if it is not finite.

        `loss` is a micro-batch's mean times `weight`. Means are compared with recent ones, unless
        the weight is 0: then there is no mean.
        """
        value = loss.detach().float()
        not_finite = ~value.isfinite()
        spike = torch.zeros_like(not_finite)
        if self._config.on_spike != "ignore" and weight:
            value = value / weight
            if self._seen >= MIN_LOSSES:
                spike = self._is_spike(value) & ~not_finite
            oldest = self._seen % WINDOW
            self._recent[oldest] = torch.where(not_finite, self._recent[oldest], value)
            self._seen += 1
        self._counts += torch.stack((not_finite, spike))
        return loss * torch.where(not_finite, math.nan, 1.0).to(loss.dtype)

    def _is_spike(self, value: torch.Tensor) -> torch.Tensor:
        median = self._recent.nanmedian()
        std = MAD_TO_STD * (self._recent - median).abs().nanmedian()
        return value - median > SPIKE_SCORE * torch.maximum(std, MIN_SPREAD * median.abs())

    def pop(self) -> BadLosses:
        """Wait for the device; return the counts and reset them."""
        counts = BadLosses(*self._counts.tolist())
        self._counts.zero_()
        return counts

    def handle_skipped_step(
        self, step: int, collectives: CpuCollectives, on_message: Callable[[str], None]
    ) -> None:
        """Log that DeepSpeed skipped `step` on all ranks, or abort the run."""
        bad_losses = collectives.gather(self.pop(), BadLosses)
        not_finite = [str(rank) for rank, losses in enumerate(bad_losses) if losses.not_finite]
        spikes = [str(rank) for rank, losses in enumerate(bad_losses) if losses.spikes]
        if not not_finite and self._config.precision == "fp16":
            return  # DeepSpeed lowers the loss scale
        cause = f"step {step}: a gradient is not finite"
        if not_finite:
            cause = f"step {step}: a loss is not finite on rank {', '.join(not_finite)}"
        if spikes:
            cause += f"; a loss is far above the recent ones on rank {', '.join(spikes)}"
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

    Only in stage 0 with fp32 DeepSpeed uses the torch optimizer itself. That is for debugging, so
    the wait for the device does not matter.
    """
    step = optimizer.step
    optimizer.overflow = False  # type: ignore[attr-defined]  # the engine reads it after step()

    def checked_step(*args: Any, **kwargs: Any) -> Any:
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"]]
        norms = torch._foreach_norm([grad for grad in gradients if grad is not None])
        optimizer.overflow = not torch.stack(norms).isfinite().all()  # type: ignore[attr-defined]
        return None if optimizer.overflow else step(*args, **kwargs)  # type: ignore[attr-defined]

    optimizer.step = checked_step  # type: ignore[method-assign]
