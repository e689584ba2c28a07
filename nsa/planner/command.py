"""`nsa plan`: flags and output. `nsa/engine/plan_command.py` supplies the run's numbers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nsa.gpus import GPUS
from nsa.planner.forecast import (
    MFU,
    Candidate,
    Forecast,
    Hardware,
    flops_with_recomputation,
)
from nsa.planner.inputs import BatchShape, Model, Zero
from nsa.resources import existing_or_resource

# Bytes/s of a collective from one GPU to the next, one way: about 3/4 of the bus. Assumed.
# host4 and host5: GPUs without peer access, whose data passes through the host's memory.
LINKS = {"pcie3": 12e9, "pcie4": 24e9, "pcie5": 48e9, "nvlink": 200e9, "host4": 12e9, "host5": 24e9}
DEVICES = {  # its name in GPUS, and its usual link
    "a100": ("A100 80GB PCIe", "pcie4"),
    "h100": ("H100 80GB HBM3", "pcie4"),
    "h200": ("H200", "pcie4"),
    "b200": ("B200", "nvlink"),
    "rtx3090": ("GeForce RTX 3090", "pcie4"),
    "rtx4090": ("GeForce RTX 4090", "host4"),
    "rtx5090": ("GeForce RTX 5090", "host5"),
    "a6000": ("RTX A6000", "pcie4"),
    "a10": ("A10", "pcie4"),
    "l4": ("L4", "pcie4"),
    "l40s": ("L40S", "pcie4"),
    "mi300x": ("AMD Instinct MI300X", "nvlink"),
}
REACHED = f"{100 * MFU['nsa']:g}% of the peak, {100 * MFU['dense']:g}% in dense steps"
NETWORK = 12.5  # GB/s: one 100 Gbit/s adapter
MEMORY = 80  # GB, for a --device in TFLOP/s


def add_parser(verbs: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `plan` to the verbs of `nsa`; `run` executes it."""
    about = "estimate memory, traffic, step time and days of a run before starting it"
    parser = verbs.add_parser("plan", help=about, description=about)
    add = parser.add_argument
    about = "recipe file (default: recipes/m7c.py)"
    add("--recipe", type=existing_or_resource, metavar="FILE", help=about)
    add("--profile", default="production", help="profile of the recipe (production)")
    add("--config", type=Path, help="YAML that overrides the recipe")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override one value")
    about = "DeepSpeed JSON (ds_configs/zero1_pcie.json)"
    add("--deepspeed_config", type=existing_or_resource, help=about)
    add("--gpus", type=int, default=2, help="number of GPUs over all nodes (2)")
    add("--nodes", type=int, default=1, help="number of nodes (1)")
    add("--link", help=f"{', '.join(LINKS)}, or GB/s between two GPUs (the device's, or pcie4)")
    add("--network", type=float, default=NETWORK, help=f"GB/s out of a node ({NETWORK})")
    add("--device", default="a100", help=f"{', '.join(DEVICES)}, or TFLOP/s of a GPU (a100)")
    add("--memory", type=float, help="GB of a GPU (the device's, or 80)")
    about = f"fraction of the peak reached ({MFU['nsa']}, in dense steps {MFU['dense']})"
    add("--mfu", type=float, help=about)
    add("--compare", action="store_true", help="compare all configs in the JSON's folder")
    add("--json", action="store_true", help="print JSON: bytes, seconds, and every candidate")
    parser.set_defaults(run=run)


def hardware(flags: argparse.Namespace) -> Hardware:
    """Return the hardware that the flags describe; raise a ValueError that names a bad flag."""
    for name in ("gpus", "nodes", "network", "mfu", "memory"):
        value = getattr(flags, name)
        if value is not None and not (0 < value < math.inf):
            raise ValueError(f"--{name} {value}: must be above 0")
    if flags.gpus % flags.nodes:
        raise ValueError(
            f"--gpus {flags.gpus}: not a multiple of --nodes {flags.nodes}; --gpus counts all nodes"
        )
    if flags.mfu is not None and flags.mfu > 1:
        raise ValueError(f"--mfu {flags.mfu}: a fraction of the peak; write 0.25 for 25%")
    name, usual = DEVICES.get(flags.device, ("", "pcie4"))
    flags.link = flags.link or usual  # `assumptions` names it
    link = LINKS.get(flags.link) or 1e9 * _number("--link", flags.link, "GB/s", LINKS)
    memory = GPUS[name].memory if name else MEMORY
    tflops = GPUS[name].bf16 if name else _number("--device", flags.device, "TFLOP/s", DEVICES)
    return Hardware(
        flops=1e12 * tflops,
        mfu=flags.mfu,
        link=link,
        network=1e9 * flags.network,
        nodes=flags.nodes,
        memory=1e9 * (memory if flags.memory is None else flags.memory),
    )


def assumptions(
    flags: argparse.Namespace, hardware: Hardware, configs: Mapping[str, Zero]
) -> list[str]:
    """Return what a plan assumes and leaves out; `configs`: the planned ZeRO settings by name."""
    device = f"{hardware.flops / 1e12:g} TFLOP/s, {hardware.memory / 1e9:g} GB"
    device = f"{flags.device} ({device})" if flags.device in DEVICES else device
    link = f"{hardware.link / 1e9:g} GB/s"
    link = f"{flags.link} ({link})" if flags.link in LINKS else link
    nodes = f", {hardware.nodes} nodes at {hardware.network / 1e9:g} GB/s (--nodes, --network)"
    offloading = ", ".join(name for name, zero in configs.items() if zero.offload)
    speed = f"{REACHED} (--mfu): measured with three branches on an H100, an estimate elsewhere"
    if hardware.mfu is not None:
        speed = f"assumed: {100 * hardware.mfu:g}% of the peak (--mfu)"
    not_counted = f"not counted: offload of {offloading}, which saves GPU memory and costs time"
    return [
        f"assumed: {flags.gpus} GPUs (--gpus), {device} (--device), {link} (--link)"
        + (nodes if hardware.nodes > 1 else ""),
        f"{speed}; gaps between kernels included",
        *([not_counted] if offloading else []),
    ]


def _number(flag: str, text: str, unit: str, names: Mapping[str, object]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{flag} {text}: write {', '.join(names)} or a number of {unit} above 0")
    return value


def describe(
    name: str, model: Model, batch: BatchShape, step: Forecast, hardware: Hardware, steps: int
) -> list[str]:
    """Return the plan of one setting, a line per number."""
    memory, sent = step.memory, step.traffic
    flops = flops_with_recomputation(model, batch.checkpointing, model.config.attention.kind)
    reached = batch.tokens * batch.accumulation * flops / step.compute / hardware.flops
    limited = hardware.mfu is None and reached < 0.999 * MFU[model.config.attention.kind]
    by_host = ", limited by the host that starts kernels" if limited else ""
    dense = f"  {'tokens/s, dense':<18}{step.tokens / step.dense_seconds:>10,.0f}"
    dense += f"  in the first {step.dense_steps:,} steps"
    return [
        f"{name}: {model.parameters:,} parameters; micro-batch {batch.micro_batch} × "
        f"{batch.seq_len:,} tokens, accumulation {batch.accumulation}, "
        f"checkpointing {batch.checkpointing}",
        "",
        f"memory of a GPU at its peak, {memory.peak_phase}, GB",
        *(f"  {label:<18}{size / 1e9:>10.3f}" for label, size in memory.at_peak.items()),
        f"  {'total of tensors':<18}{memory.peak / 1e9:>10.3f}",
        "a step",
        f"  {'tokens':<18}{step.tokens:>10,}",
        f"  {'MB sent by a GPU':<18}{sent.bytes_per_step / 1e6:>10,.1f}"
        f"  {sent.bytes_per_step / model.parameters:.2f} bytes per parameter",
        f"  {'compute, ms':<18}{1e3 * step.compute:>10,.1f}  at {100 * reached:.3g}% of "
        f"{hardware.flops / 1e12:g} TFLOP/s{by_host}",
        f"  {'communication, ms':<18}{1e3 * step.communication:>10,.1f}",
        f"  {'exposed, ms':<18}{1e3 * step.exposed:>10,.1f}"
        f"  {100 * step.exposed_fraction:.1f}% of the step",
        *([dense] if step.dense_steps else []),
        f"  {'tokens/s':<18}{step.tokens_per_second:>10,.0f}",
        f"  {f'days, {steps:,} steps':<18}{step.days(steps):>10.2f}",
    ]


def table(candidates: list[Candidate], steps: int) -> list[str]:
    """Return a line per candidate; memory and traffic are per GPU."""
    config_width = max(len("config"), *(len(one.config) for one in candidates)) + 2
    batch_width = max(28, *(len(_batch(one.batch)) + 2 for one in candidates))
    days = [candidate.forecast.days(steps) for candidate in candidates]
    unit, parts = ("days", 1) if max(days) >= 0.1 else ("hours", 24)
    head = f"{'MB sent':>9}{'GB':>8}{'exposed':>9}{'tokens/s':>13}{unit:>8}"
    lines = [f"{'config':<{config_width}}{'batch':<{batch_width}}{head}"]
    for candidate, duration in zip(candidates, days, strict=True):
        step = candidate.forecast
        lines.append(
            f"{candidate.config:<{config_width}}{_batch(candidate.batch):<{batch_width}}"
            f"{step.traffic.bytes_per_step / 1e6:>9,.0f}{step.memory.peak / 1e9:>8.2f}"
            f"{100 * step.exposed_fraction:>8.1f}%{step.tokens_per_second:>13,.0f}"
            f"{parts * duration:>8.2f}"
        )
    return lines


def json_row(candidate: Candidate, steps: int) -> dict[str, Any]:
    """Return one candidate's figures in bytes, tokens and seconds."""
    step, names = candidate.forecast, ("tokens", "compute", "communication", "exposed", "seconds")
    return {
        "config": candidate.config,
        **asdict(candidate.batch),
        "memory": step.memory.at_peak | {"total": step.memory.peak},
        "bytes_sent": step.traffic.bytes_per_step,
        **{name: getattr(step, name) for name in (*names, "tokens_per_second")},
        "days": step.days(steps),
    }


def _batch(batch: BatchShape) -> str:
    return f"{batch.micro_batch}×{batch.seq_len} ×{batch.accumulation}, {batch.checkpointing}"
