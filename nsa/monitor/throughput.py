"""Throughput and MFU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Speed:
    """Speed since the previous reading; rates are None if only the warm-up step was timed."""

    tokens_per_s: float | None  # all ranks together
    mfu: float | None  # 0 to 1
    seconds: float  # per step, the mean


class Throughput:
    """Measures speed between logged steps. The clock starts when it is created.

    The first step compiles, allocates and fills caches, so it never counts in tokens/s and MFU. A
    reading after this step alone returns its duration as `seconds`.
    """

    def __init__(
        self,
        *,
        flops_per_token: float,
        peak: float | None,
        world_size: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.flops_per_token = flops_per_token  # the loop changes it as attention becomes sparse
        self._peak = peak
        self._world_size = world_size
        self._clock = clock
        self._warm = False
        self._steps = 0
        self._tokens = 0
        self._warm_up_seconds = 0.0
        self._start = self._now()

    def step(self, tokens: int) -> None:
        """Count a step of `tokens` over all ranks; only the first call waits for the device."""
        if not self._warm:
            self._warm = True
            now = self._now()
            self._warm_up_seconds, self._start = now - self._start, now
            return
        self._steps += 1
        self._tokens += tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the body (evaluation, checkpoints) from the next reading."""
        began = self._now()
        try:
            yield
        finally:
            self._start += self._now() - began

    def read(self) -> Speed:
        """Return the speed since the previous reading; waits for the device."""
        assert self._warm, "read() before the first step()"
        now = self._now()
        if self._steps == 0:
            return Speed(None, None, self._warm_up_seconds)
        elapsed = now - self._start
        rate = self._tokens / elapsed
        mfu = None
        if self._peak is not None:
            mfu = rate / self._world_size * self.flops_per_token / self._peak
        speed = Speed(rate, mfu, elapsed / self._steps)
        self._start, self._steps, self._tokens = now, 0, 0
        return speed

    def _now(self) -> float:
        """Return the time after the device has finished its queued work."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return self._clock()
