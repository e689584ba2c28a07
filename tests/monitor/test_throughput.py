"""Throughput, MFU, peaks of cards, traces and memory."""

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from nsa.gpus import peak_flops
from nsa.monitor.memory import MemorySnapshots, is_out_of_memory, memory_gb
from nsa.monitor.throughput import StepProfiler, Throughput, parse_steps


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
        ("Intel(R) Xeon(R) Processor", "bf16", None),
        ("", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "bf16", None),
        ("NVIDIA A100-SXM-64GB", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA H300", "bf16", None),
    ],
)
def test_the_peak_depends_on_board_and_precision(
    name: str, precision: str, tflops: float | None
) -> None:
    assert peak_flops(name, precision) == (tflops and pytest.approx(tflops * 1e12))


def test_the_warm_up_step_never_counts_in_the_rate() -> None:
    clock = Clock()
    meter = Throughput(flops_per_token=1e9, peak=1e12, clock=clock)
    clock.now = 60.0
    meter.step(1000)
    warm_up = meter.read()
    assert (warm_up["tokens_per_s"], warm_up["mfu"], warm_up["seconds"]) == (None, None, 60.0)
    clock.now = 62.0
    meter.step(1000)
    assert meter.read()["tokens_per_s"] == 500.0

    clock.now = 0.0
    unread = Throughput(flops_per_token=1e9, peak=1e12, clock=clock)
    clock.now = 60.0
    unread.step(1000)
    clock.now = 64.0
    unread.step(1000)
    unread.step(1000)
    speed = unread.read()
    assert (speed["tokens_per_s"], speed["seconds"]) == (500.0, 2.0)


def test_a_reading_covers_the_steps_since_the_last_one_without_pauses() -> None:
    clock = Clock()
    meter = Throughput(flops_per_token=3e6, peak=1e9, world_size=2, clock=clock)
    meter.step(100)
    clock.now = 10.0
    meter.step(100)
    meter.step(300)
    assert meter.read()["tokens_per_s"] == 40.0
    with meter.paused():
        clock.now += 1000.0
    clock.now += 2.0
    meter.step(400)
    with meter.paused():
        clock.now += 500.0
    speed = meter.read()
    assert speed["seconds"] == 2.0
    assert speed["tokens_per_s"] == 200.0
    # each of two ranks: 100 tokens/s at 3e6 FLOP, peak 1e9 FLOP/s
    assert speed["mfu"] == pytest.approx(0.3)
    meter.step(100)
    meter.flops_per_token = 6e6  # a phase ends between two readings
    meter.step(300)
    clock.now += 2.0
    assert meter.read()["mfu"] == pytest.approx((100 * 3e6 + 300 * 6e6) / 2.0 / 2 / 1e9)


def test_the_device_is_waited_for_at_readings_and_after_the_first_step_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()

    def synchronize() -> None:
        clock.now += 1.0  # what the device still computes

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    meter = Throughput(flops_per_token=1e9, peak=None, clock=clock)
    for _ in range(5):
        meter.step(100)
    assert clock.now == 2.0
    speed = meter.read()
    assert (speed["tokens_per_s"], speed["mfu"]) == (400.0, None), "its peak is unknown"


def test_without_an_accelerator_memory_is_the_peak_of_the_process() -> None:
    before = memory_gb()
    assert before > 0.05, "less than Python with torch takes"
    below_peak = before * 1e9 - psutil.Process().memory_info().rss
    block = np.ones(int(max(0, below_peak) + 6e7), dtype=np.uint8)
    grown = memory_gb()
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert grown > 0.99 * int(peak) * 1024 / 1e9  # or more, if the parent process had more
    del block
    assert grown >= before + 0.03
    assert memory_gb() >= grown


STEPS = {1: torch.sin, 2: torch.cos, 3: torch.tan, 4: torch.exp}


def run(profiler: StepProfiler, first: int) -> None:
    for step in range(first, 5):
        profiler.step_start(step)
        STEPS[step](torch.ones(3))
        profiler.step_end(step)
    profiler.close()


def traced(path: Path) -> set[str]:
    """Return the steps' operations in a trace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {event["name"] for event in events} & {f"aten::{op.__name__}" for op in STEPS.values()}


@pytest.mark.parametrize(
    ("steps", "first", "expected"),
    [
        ((2, 3), 1, {"rank1_steps2-3.json.gz": {"aten::cos", "aten::tan"}}),
        ((1, 50), 3, {"rank1_steps3-4.json.gz": {"aten::tan", "aten::exp"}}),
        ((9, 9), 1, {}),
        (None, 1, {}),
    ],
)
def test_only_the_given_steps_are_traced(
    steps: tuple[int, int] | None, first: int, expected: dict[str, set[str]], tmp_path: Path
) -> None:
    run(StepProfiler(tmp_path, rank=1, steps=steps), first)
    assert {path.name: traced(path) for path in tmp_path.glob("profile/*")} == expected
    assert [path.name for path in tmp_path.iterdir()] == ["profile"] * bool(expected)
    if steps == (2, 3):
        run(StepProfiler(tmp_path, rank=0, steps=steps), first)
        assert (tmp_path / "profile/rank0_steps2-3.json.gz").exists(), "beside the other rank's"


def test_a_profiler_that_does_not_start_costs_the_trace_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(torch.profiler, "profile")
    run(StepProfiler(tmp_path, rank=1, steps=(2, 3)), 1)
    message = "nsa: --profile-steps: the profiler did not start, the run continues: "
    assert capsys.readouterr().err.count(message) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_flag_takes_one_step_or_a_range() -> None:
    assert parse_steps("10-12") == (10, 12)
    assert parse_steps(" 7 ") == (7, 7)


@pytest.mark.parametrize("text", ["", "12-10", "0-3", "a-b", "1,2", "-5", "3-"])
def test_invalid_ranges_are_refused_with_the_flags_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"--profile-steps .*counted from 1: 10-12"):
        parse_steps(text)


def lines(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    text = (folder / f"memory/rank{rank}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def tensor_error() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    return caught.value


def object_error() -> MemoryError:
    with pytest.raises(MemoryError) as caught:
        bytearray(2**60)
    return caught.value


def test_snapshots_are_taken_around_the_first_step_and_every_tenth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "memory_allocated", "memory_reserved", "max_memory_allocated"
    gpu: dict[str, Any] = {name: lambda gb=gb: gb * 1e9 for gb, name in enumerate(names, 1)}
    traces: list[str] = []  # for PyTorch's memory viewer
    gpu["memory"] = SimpleNamespace(_dump_snapshot=traces.append)
    monkeypatch.setattr("nsa.monitor.memory.initialized_cuda", lambda: SimpleNamespace(**gpu))
    memory = MemorySnapshots(tmp_path, rank=2, every=10)
    for step in range(7, 24):
        memory.take(step, "before")
        memory.take(step, "after")
    memory.close()
    memory.out_of_memory(MemoryError())
    assert traces == [str(tmp_path / "memory/rank2.pickle")]
    taken = [(line["step"], line["when"]) for line in lines(tmp_path, rank=2)]
    whens = ("before", "after")
    expected = [(step, when) for step in (7, 10, 20) for when in whens]
    assert taken == [*expected, (23, "out of memory")]
    total = psutil.virtual_memory().total / 1e9
    for line in lines(tmp_path, rank=2):
        assert line["resident_gb"] > 0.01
        assert 0 < line["available_gb"] < total
        assert [line[f"{kind}_gb"] for kind in ("allocated", "reserved", "peak")] == [1, 2, 3]


def test_memory_allocated_in_a_step_is_visible_after_it(tmp_path: Path) -> None:
    memory = MemorySnapshots(tmp_path, rank=0, every=1)
    memory.take(1, "before")
    held = torch.ones(50_000_000)
    memory.take(1, "after")
    memory.close()
    before, after = lines(tmp_path)
    assert after["resident_gb"] - before["resident_gb"] == pytest.approx(0.2, rel=0.2)
    assert held[0] == 1


@pytest.mark.parametrize(
    "error",
    [
        tensor_error(),
        object_error(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ],
)
def test_running_out_of_memory_writes_a_snapshot_and_advice(
    tmp_path: Path, error: Exception
) -> None:
    memory = MemorySnapshots(tmp_path, rank=1, every=0)
    memory.take(17, "before")
    advice = memory.out_of_memory(error)
    assert "\n" not in advice
    for part in (
        "rank 1",
        "step 17",
        "train.micro_batch",
        "model.activation_checkpointing",
        "data.seq_len",
        "memory/rank1.jsonl",
    ):
        assert part in advice
    (line,) = lines(tmp_path, rank=1)
    assert (line["step"], line["when"]) == (17, "out of memory")


def test_the_advice_is_given_even_if_the_snapshot_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("a file where the folder should be")
    advice = MemorySnapshots(tmp_path, rank=0, every=0).out_of_memory(MemoryError())
    assert "train.micro_batch" in advice
    assert "could not be written" in advice


def test_other_errors_get_no_advice_and_an_interval_of_0_writes_nothing(tmp_path: Path) -> None:
    memory = MemorySnapshots(tmp_path, rank=0, every=0)
    for when in ("before", "after"):
        memory.take(1, when)
    for error in (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("train.micro_batch = 0: out of memory is not what this is"),
        KeyboardInterrupt(),
    ):
        assert not is_out_of_memory(error)
        assert memory.out_of_memory(error) is None
    assert not list(tmp_path.iterdir())
