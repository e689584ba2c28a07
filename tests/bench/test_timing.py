"""Timing of benchmarks: steps alternate, a clock names what limits a step, peak memory."""

from __future__ import annotations

import time

import pytest
import torch

from nsa.bench.timing import (
    Sample,
    Timing,
    peak_bytes,
    summarize,
    time_alternating,
    time_once,
)

CPU = torch.device("cpu")


def test_steps_alternate() -> None:
    order: list[str] = []
    steps = {name: lambda name=name: order.append(name) for name in "abc"}
    timings, failures = time_alternating(steps, CPU, seconds=1, rounds=4)
    assert order[6:] == list("abcabcabcabc")  # after two warm-up calls each
    assert {name: timing.rounds for name, timing in timings.items()} == dict.fromkeys("abc", 4)
    assert failures == {}


@pytest.mark.gpu
def test_small_kernels_are_timed_without_the_hosts_gaps() -> None:
    """Two hundred additions of 16 numbers: queuing one takes longer than running it."""
    device = torch.device("cuda")
    x = torch.zeros(16, device=device)

    def step() -> None:
        for _ in range(200):
            x.add_(1)

    step()
    unspun = time_once(step, device)
    spun = time_once(step, device, 2 * unspun.host_ms)
    assert unspun.clock == "host"
    assert spun.clock == "device"
    assert 0 < spun.ms < 0.8 * unspun.ms
    assert time_alternating({"add": step}, device, rounds=5)[0]["add"].clock == "device"


@pytest.mark.gpu
def test_a_step_that_waits_for_the_device_says_so() -> None:
    device = torch.device("cuda")
    x = torch.zeros(16, device=device)
    timings, _ = time_alternating({"item": lambda: x.sum().item()}, device, rounds=3)
    assert timings["item"].clock == "host"


def test_a_timing_has_the_clock_of_most_rounds() -> None:
    fast, slow = Sample(1.0, "device", 0.1), Sample(3.0, "host", 2.0)
    assert summarize([fast, slow, fast]) == Timing(1.0, 1.0, 3.0, 3, "device")
    assert summarize([fast, slow, slow]).clock == "host"
    assert summarize([fast, slow]).clock == "host"
    assert time_once(lambda: time.sleep(0.002), CPU).clock == "wall"


@pytest.mark.gpu
def test_peak_memory_is_what_a_step_allocates_plus_what_it_holds() -> None:
    device = torch.device("cuda")
    held = torch.empty(2**20, device=device)
    others = torch.empty(2**24, device=device)
    peak = peak_bytes(lambda: torch.empty(2**22, device=device), [held, held.detach()], device)
    assert peak == 4 * (2**22 + 2**20)
    del others
