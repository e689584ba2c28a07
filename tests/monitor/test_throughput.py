from __future__ import annotations

import numpy as np
import psutil
import pytest

from nsa.gpus import peak_flops
from nsa.monitor.memory import memory_gb
from nsa.monitor.throughput import Throughput


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp16", 312),
        ("NVIDIA A100-PCIE-40GB", "fp32", 156),
        ("A100-SXM4-40GB", "bf16", 312),  # older drivers
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
    ],
)
def test_the_peak_depends_on_board_and_precision(name: str, precision: str, tflops: float) -> None:
    assert peak_flops(name, precision) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "Intel(R) Xeon(R) Processor",
        "cpu",
        "",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A10G",
        "NVIDIA H300",
    ],
)
def test_unknown_hardware_has_no_peak_and_no_mfu(name: str) -> None:
    peak = peak_flops(name, "bf16")
    assert peak is None
    clock = Clock()
    meter = Throughput(flops_per_token=1e9, peak=peak, clock=clock)
    meter.step(10)
    clock.now = 1.0
    meter.step(10)
    assert meter.read().mfu is None


def test_the_warm_up_step_never_counts_in_the_rate() -> None:
    clock = Clock()
    meter = Throughput(flops_per_token=1e9, peak=1e12, clock=clock)
    clock.now = 60.0
    meter.step(1000)
    warm_up = meter.read()
    assert (warm_up.tokens_per_s, warm_up.mfu, warm_up.seconds) == (None, None, 60.0)
    clock.now = 62.0
    meter.step(1000)
    assert meter.read().tokens_per_s == 500.0

    clock.now = 0.0
    unread = Throughput(flops_per_token=1e9, peak=1e12, clock=clock)
    clock.now = 60.0
    unread.step(1000)
    clock.now = 64.0
    unread.step(1000)
    unread.step(1000)
    speed = unread.read()
    assert (speed.tokens_per_s, speed.seconds) == (500.0, 2.0)


def test_a_reading_covers_the_steps_since_the_last_one_without_pauses() -> None:
    clock = Clock()
    meter = Throughput(flops_per_token=3e6, peak=1e9, world_size=2, clock=clock)
    meter.step(100)
    clock.now = 10.0
    meter.step(100)
    meter.step(300)
    assert meter.read().tokens_per_s == 40.0
    with meter.paused():
        clock.now += 1000.0
    clock.now += 2.0
    meter.step(400)
    with meter.paused():
        clock.now += 500.0
    speed = meter.read()
    assert speed.seconds == 2.0
    assert speed.tokens_per_s == 200.0
    # each of two ranks: 100 tokens/s at 3e6 FLOP, peak 1e9 FLOP/s
    assert speed.mfu == pytest.approx(0.3)


def test_without_an_accelerator_memory_is_the_peak_of_the_process() -> None:
    before = memory_gb()
    assert before > 0.05, "less than Python with torch takes"
    below_peak = before * 1e9 - psutil.Process().memory_info().rss
    block = np.ones(int(max(0, below_peak) + 6e7), dtype=np.uint8)
    grown = memory_gb()
    del block
    assert grown >= before + 0.03
    assert memory_gb() >= grown
