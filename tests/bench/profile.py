"""`python -m tests.bench profile`: where the time of M7C's training step goes, kernel by kernel.

PyTorch's profiler traces whole steps (forward, backward, optimizer) in a loop: time and launches of
each kernel, and the fraction of the time in which the device was busy. A second pass writes a trace
for Perfetto beside --out. On a CPU, operators stand in for kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from nsa.model.config import ACTIVATION_CHECKPOINTING, ATTENTION_KINDS
from tests.bench.harness import (
    Report,
    Step,
    add_gpu_flags,
    cell,
    print_table,
    synchronize,
    words_of,
)
from tests.bench.train import Stepper, model_config, random_batch

WARM_UP = 3  # steps: the first compiles
SHOWN = 25  # kernels in the printed table


class Span(NamedTuple):
    """One run of a kernel on the device, in microseconds."""

    name: str
    start: float
    end: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_gpu_flags(parser, "2k", tokens=16_384)
    add, kinds = parser.add_argument, ATTENTION_KINDS
    add("--kinds", type=words_of(*kinds), default="nsa", help="nsa, dense or both (%(default)s)")
    add("--checkpointing", choices=ACTIVATION_CHECKPOINTING, default="none", help="(%(default)s)")
    add("--steps", type=int, default=2, help="traced steps (%(default)s)")


def run(report: Report) -> None:
    """Profile each kind at each length; print a table of kernels."""
    flags = report.flags
    for seq_len in flags.lengths:
        for kind in flags.kinds:
            report.attempt(f"{kind} T={seq_len}", partial(_case, kind, seq_len, report))


def _case(kind: str, seq_len: int, report: Report) -> None:
    flags = report.flags
    stepper = Stepper(model_config(report, kind), report.device, report.dtype)
    ids, labels = random_batch(flags, seq_len, report.device)
    step = partial(stepper.step, ids, labels)
    for _ in range(WARM_UP):
        step()
    spans = trace(step, flags.steps, report.device)
    row = {"kind": kind, "length": seq_len, "batch": len(ids), "layers": flags.layers}
    row |= {"checkpointing": flags.checkpointing, "steps": flags.steps}
    row |= summary(spans, flags.steps)
    report.add(row)
    _print(row)
    if flags.out is not None:
        file = flags.out.with_name(f"{flags.out.stem}-{kind}-{seq_len}.trace.json.gz")
        trace(step, flags.steps, report.device, file)


def trace(step: Step, steps: int, device: torch.device, file: Path | None = None) -> list[Span]:
    """Run `steps` steps under the profiler; return the device's spans, or write a full trace.

    Recording operators slows the host, so spans are taken without them.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    if file is not None and on_gpu:
        activities.append(ProfilerActivity.CPU)
    synchronize(device)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        synchronize(device)
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
    busy = busy_ms(spans) / steps
    wall = (max(span.end for span in spans) - min(span.start for span in spans)) / 1e3 / steps
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


def busy_ms(spans: Iterable[Span]) -> float:
    """Return the milliseconds in which at least one span runs."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total / 1e3


def _print(row: dict[str, Any]) -> None:
    title = f"{row['kind']} T={row['length']} batch {row['batch']} {row['checkpointing']}"
    lines = [[title, "launches", "ms", "of the step"]]
    for kernel in row["kernels"][:SHOWN]:
        launches = cell(kernel["launches"], ".0f")
        fraction = cell(kernel["fraction"], ".1%")
        lines.append([kernel["name"][:70], launches, cell(kernel["ms"]), fraction])
    busy = cell(row["busy_fraction"], ".1%")
    lines.append(["all", cell(row["launches"], ".0f"), cell(row["step_ms"]), f"busy {busy}"])
    print_table(lines, {})
