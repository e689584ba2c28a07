"""`python -m tests.bench profile`: the time of a production step of M7C, kernel by kernel.

The model is the recipe's, changed by --set. PyTorch's profiler traces whole steps of both phases,
dense and sparse, in a loop: once `plain`, as `train` measures them, and once in DeepSpeed's engine
with ZeRO-1, as the recipe runs them, with random tokens in place of a loader. A second pass writes
a trace for Perfetto beside --out. On a CPU, operators stand in for kernels.
"""

import argparse
import json
import runpy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from nsa.system import resource_path
from tests.bench.harness import Report, Step, add_gpu_flags, cell, print_table
from tests.bench.train import WARM_UP, Stepper, random_batch

STEPS = 2  # traced
SHOWN = 25  # kernels in a printed table


class Span(NamedTuple):
    """One run of a kernel on the device, in microseconds."""

    name: str
    start: float
    end: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_gpu_flags(parser)
    about = "a setting; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=about)


def run(report: Report) -> None:
    """Profile both phases in each engine; print tables of kernels."""
    for name, build in {"plain": plain, "zero1": zero1}.items():
        report.attempt(name, partial(_case, name, build, report))


def _case(engine: str, build: Callable[[Any, Report], tuple[Any, Any]], report: Report) -> None:
    from nsa.engine.config import resolve_config  # late: imports PyYAML

    flags = report.flags
    recipe = runpy.run_path(str(resource_path("recipes/m7c.py")))["production"]()
    recipe.model.activation_checkpointing = "none"
    recipe.model.attention.backend = report.backend
    config = resolve_config(recipe, assignments=flags.set)
    seq_len = config.data.seq_len
    config.train.micro_batch = max(1, flags.tokens // seq_len)
    config.train.accumulation = 1
    ids, labels = random_batch(config.model.vocab_size, flags.tokens, seq_len, report.device)
    model, take_step = build(config, report)
    model.train()
    step = partial(take_step, ids, labels)
    for phase in ("sparse", "dense"):
        model.set_dense(phase == "dense")
        for _ in range(WARM_UP):
            step()
        row = {"engine": engine, "phase": phase, "length": seq_len, "batch": len(ids)}
        row |= {"steps": STEPS, **summary(trace(step, STEPS, report.device), STEPS)}
        report.add(row)
        columns = ("name", "launches", "ms", "fraction")
        kernels = [[x["name"][:70], *(cell(x[y]) for y in columns[1:])] for x in row["kernels"]]
        total = ["all", *(cell(row[x]) for x in ("launches", "step_ms", "busy_fraction"))]
        print(f"{engine}, {phase} steps, T={seq_len} batch {len(ids)}")
        print_table([columns, *kernels[:SHOWN], total])
        if flags.out is not None:
            file = flags.out.with_name(f"{flags.out.stem}-{engine}-{phase}.trace.json.gz")
            trace(step, STEPS, report.device, file)


def plain(config: Any, report: Report) -> tuple[Any, Any]:
    """Return a model and `train`'s step of it."""
    stepper = Stepper(config.model, report.device, report.dtype)
    return stepper.model, stepper.step


def zero1(config: Any, report: Report) -> tuple[Any, Any]:
    """Return a model and a step of DeepSpeed's engine, of one rank."""
    from nsa.engine.build import build_engine
    from nsa.engine.ds_config import resolve_ds_config
    from tests.bench.comm_ranks import join
    from tests.ranks import free_port

    join(0, 1, "nccl" if report.on_gpu else "gloo", ("127.0.0.1", free_port()))
    raw = json.loads(resource_path("ds_configs/zero1_pcie.json").read_text())
    engine = build_engine(config, resolve_ds_config(raw, config, world_size=1), report.device)

    def step(ids: Tensor, labels: Tensor) -> None:
        engine.backward(engine(ids, labels=labels))
        engine.step()

    return engine.module, step


def trace(step: Step, steps: int, device: torch.device, file: Path | None = None) -> list[Span]:
    """Run the steps; return the kernels' spans, or write a full trace.

    Recording operators slows the host, so spans are taken without them.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    if file is not None and on_gpu:
        activities.append(ProfilerActivity.CPU)
    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        synchronize()
    if file is not None:
        profiler.export_chrome_trace(str(file))
        return []
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if (event.device_type == DeviceType.CUDA if on_gpu else not event.cpu_children)
    ]


def summary(spans: Sequence[Span], steps: int) -> dict[str, Any]:
    """Return milliseconds and launches per step, in total and by kernel, and the busy fraction."""
    if not spans:
        raise RuntimeError("the profiler recorded no kernel; another profiler may be attached")
    kernels: dict[str, dict[str, Any]] = {}
    for span in spans:
        kernel = kernels.setdefault(span.name, {"name": span.name, "launches": 0, "ms": 0.0})
        kernel["launches"] += 1 / steps
        kernel["ms"] += (span.end - span.start) / 1e3 / steps
    busy, end = 0.0, float("-inf")  # milliseconds in which at least one span runs
    for span in sorted(spans, key=lambda span: span.start):
        busy += max(0.0, span.end - max(span.start, end)) / 1e3 / steps
        end = max(end, span.end)
    wall = (end - min(span.start for span in spans)) / 1e3 / steps
    rows = sorted(kernels.values(), key=lambda kernel: -kernel["ms"])
    for kernel in rows:
        kernel["fraction"] = kernel["ms"] / wall if wall else None
    return {
        "step_ms": wall,
        "busy_ms": busy,
        "busy_fraction": busy / wall if wall else None,
        "launches": sum(kernel["launches"] for kernel in rows),
        "kernels": rows,
    }
