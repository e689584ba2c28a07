"""Throughput and MFU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# Dense tensor-core peaks in TFLOP/s: (bf16 and fp16 with fp32 accumulation, TF32), by the driver's
# full device name without "NVIDIA", because the SXM, PCIe and NVL boards of one chip differ. MIG
# slices ("... MIG 3g.40gb"), laptop chips and custom boards are not listed.
# From NVIDIA's data sheets (figures "with sparsity" halved); GeForce from the GA102, Ada and RTX
# Blackwell architecture papers.
_PEAK_TFLOPS: dict[str, tuple[float, float]] = {
    "A100-SXM4-40GB": (312.0, 156.0),
    "A100-SXM4-80GB": (312.0, 156.0),
    "A100-PCIE-40GB": (312.0, 156.0),
    "A100 80GB PCIe": (312.0, 156.0),
    "H100 80GB HBM3": (989.4, 494.7),  # SXM5
    "H100 PCIe": (756.5, 378.0),
    "H100 NVL": (835.5, 417.5),
    "H200": (989.4, 494.7),  # SXM5
    "H200 NVL": (835.5, 417.5),
    "GH200 120GB": (989.4, 494.7),
    "GH200 480GB": (989.4, 494.7),
    "GH200 144G HBM3e": (989.4, 494.7),
    "B200": (2250.0, 1125.0),
    "GB200": (2500.0, 1250.0),
    "L40S": (362.0, 183.0),
    "L40": (181.0, 90.5),
    "L4": (121.0, 60.0),
    "A10": (125.0, 62.5),
    "A30": (165.0, 82.0),
    "A40": (149.7, 74.8),
    "RTX A6000": (154.8, 77.4),
    "GeForce RTX 3090": (71.0, 35.6),
    "GeForce RTX 4090": (165.2, 82.6),
    "GeForce RTX 5090": (209.5, 104.8),
    "AMD Instinct MI300X": (1307.4, 653.7),
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of one device in dense matrix products; None if unknown.

    The peak of "fp32" is that of TF32, the fastest way these chips multiply fp32 matrices.
    """
    peaks = _PEAK_TFLOPS.get(device_name.removeprefix("NVIDIA ").strip())
    if peaks is None:
        return None
    column = {"bf16": 0, "fp16": 0, "fp32": 1}.get(precision)
    return None if column is None else peaks[column] * 1e12


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
