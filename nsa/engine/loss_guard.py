"""Numbers that must not reach the weights are found on the device, before they do.

A loss that is not finite, or far above the recent ones, is multiplied by NaN. Its gradients then
are NaN on every rank after reduction, and DeepSpeed, which looks at the gradients' norm before each
update, leaves the step out on all of them. So nobody waits for the device, no collective is added,
and all ranks decide alike. Any other loss is multiplied by exactly 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from nsa.engine.config import TrainConfig

RECENT = 128  # losses of micro-batches that a new one is compared with
ENOUGH = 32  # of them, before any is called a spike
MAD_TO_STD = 1.4826  # of a normal distribution
SMALLEST_SPREAD = 0.01  # of the median: losses that hardly differ make no spikes of noise


class RunAborted(Exception):
    """The run judged itself unfit to go on; raised by all ranks, whose weights are whole."""


@dataclass(frozen=True)
class Finding:
    """What one rank saw in the losses of a step."""

    not_finite: int
    spikes: int


class Guard:
    """Watches one rank's losses."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self._spikes_matter = config.on_spike != "ignore"
        self._spikes_count = config.on_spike in ("skip", "rollback")
        self._score = config.spike_score
        self._recent = torch.full((RECENT,), math.nan, device=device)
        self._seen = 0
        self._found = torch.zeros(2, dtype=torch.int64, device=device)  # not finite, spikes

    def watch(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to go backward from: `loss` itself, or NaN."""
        value = loss.detach().float()
        bad = ~value.isfinite()
        poisoned = bad
        spike = torch.zeros_like(bad)
        if self._spikes_matter:
            if self._seen >= ENOUGH:
                spike = self._is_spike(value)
            if self._spikes_count:
                poisoned = bad | spike
            oldest = self._seen % RECENT
            self._recent[oldest] = torch.where(poisoned, self._recent[oldest], value)
            self._seen += 1
        self._found += torch.stack((bad, spike))
        return loss * torch.where(poisoned, math.nan, 1.0).to(loss.dtype)

    def _is_spike(self, value: torch.Tensor) -> torch.Tensor:
        median = self._recent.nanmedian()
        spread = MAD_TO_STD * (self._recent - median).abs().nanmedian()
        return value - median > self._score * torch.maximum(spread, SMALLEST_SPREAD * median.abs())

    def take(self) -> Finding:
        """What was found since the last call; waits for the device."""
        not_finite, spikes = self._found.tolist()
        self._found.zero_()
        return Finding(not_finite, spikes)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to judge alike."""
        recent = [None if math.isnan(loss) else loss for loss in self._recent.tolist()]
        return {"recent": recent, "seen": self._seen}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on as `state` says."""
        values = [math.nan if loss is None else loss for loss in state["recent"]]
        self._recent.copy_(torch.tensor(values))
        self._seen = state["seen"]
        self._found.zero_()


def refuse_bad_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Give a bare torch optimizer what DeepSpeed's own have: it leaves out what is not finite.

    DeepSpeed wraps none around it in stage 0 with fp32, a setting for debugging, where waiting for
    the device is no loss.
    """
    step = optimizer.step
    optimizer.overflow = False  # type: ignore[attr-defined]  # the engine reads it after step

    def checked_step(*arguments: Any, **named: Any) -> Any:
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"]]
        norms = torch._foreach_norm([grad for grad in gradients if grad is not None])
        optimizer.overflow = not torch.stack(norms).isfinite().all()  # type: ignore[attr-defined]
        return None if optimizer.overflow else step(*arguments, **named)  # type: ignore[attr-defined]

    optimizer.step = checked_step  # type: ignore[method-assign]
