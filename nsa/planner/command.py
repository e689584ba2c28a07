"""`nsa plan`: its flags, and what it prints. `nsa/engine/plan_command.py` fills in the numbers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nsa.planner.model import Batch, Model
from nsa.planner.search import Found
from nsa.planner.step import Forecast, Hardware
from nsa.planner.traffic import Traffic

# Bytes a second that a collective gets from one GPU to the next, one way: some three quarters of
# the bus. Assumed, not measured.
LINKS = {"pcie3": 12e9, "pcie4": 24e9, "pcie5": 48e9, "nvlink": 200e9}
# Dense bf16 peak, from the data sheets, and bytes of memory.
DEVICES = {"a100": (312e12, 80e9), "h100": (989.4e12, 80e9), "h200": (989.4e12, 141e9)}
MFU = 0.25  # 250,000 tokens/s of M7C on an H200, which is this project's goal, are 0.21
NETWORK = 12.5  # GB/s: one adapter of 100 Gbit/s
MEMORY = 80.0  # GB of a device given in TFLOP/s


def add_parser(verbs: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `plan` to the verbs of `nsa`; `run` answers it."""
    about = "memory, bytes on the link, time and days of a run that is not started"
    parser = verbs.add_parser("plan", help=about, description=about)
    parser.add_argument(
        "--recipe", type=Path, metavar="FILE", help="whose values (default: recipes/m7c.py)"
    )
    parser.add_argument("--profile", default="production", help="of the recipe (production)")
    parser.add_argument("--config", type=Path, help="YAML that overrules the recipe")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="overrule one value"
    )
    parser.add_argument(
        "--deepspeed_config", type=Path, help="DeepSpeed JSON (ds_configs/zero1_pcie.json)"
    )
    parser.add_argument("--gpus", type=int, default=2, help="of all nodes together (2)")
    parser.add_argument("--nodes", type=int, default=1, help="machines that share them (1)")
    parser.add_argument(
        "--link", default="pcie4", help=f"{', '.join(LINKS)}, or GB/s between two GPUs (pcie4)"
    )
    parser.add_argument(
        "--network", type=float, default=NETWORK, help=f"GB/s out of a node ({NETWORK})"
    )
    parser.add_argument(
        "--device", default="a100", help=f"{', '.join(DEVICES)}, or TFLOP/s of a GPU (a100)"
    )
    parser.add_argument("--memory", type=float, help="GB of a GPU (the device's, or 80)")
    parser.add_argument(
        "--mfu", type=float, default=MFU, help=f"share of the peak that is reached ({MFU}; assumed)"
    )
    table = parser.add_mutually_exclusive_group()
    table.add_argument(
        "--search",
        action="store_true",
        help="rank configs, micro-batches, checkpointing and ranks that share a sequence: all that "
        "fit, for as many sequences a step",
    )
    table.add_argument(
        "--compare", action="store_true", help="all configs of the JSON's folder, with this batch"
    )
    parser.set_defaults(run=run)


def hardware(flags: argparse.Namespace) -> Hardware:
    """Raise a ValueError that names the flag that makes no sense."""
    for name in ("gpus", "nodes", "network", "mfu", "memory"):
        value = getattr(flags, name)
        if value is not None and not (0 < value < math.inf):
            raise ValueError(f"--{name} {value}: must be above 0")
    if flags.gpus % flags.nodes:
        raise ValueError(
            f"--gpus {flags.gpus}: not a multiple of --nodes {flags.nodes}; --gpus counts those of "
            "all nodes together"
        )
    if flags.mfu > 1:
        raise ValueError(f"--mfu {flags.mfu}: a share of the peak; write 0.25 for 25%")
    link = LINKS.get(flags.link) or 1e9 * _number("--link", flags.link, "GB/s", LINKS)
    flops, memory = DEVICES.get(flags.device) or (
        1e12 * _number("--device", flags.device, "TFLOP/s", DEVICES),
        1e9 * MEMORY,
    )
    return Hardware(
        flops=flops,
        mfu=flags.mfu,
        link=link,
        network=1e9 * flags.network,
        nodes=flags.nodes,
        memory=memory if flags.memory is None else 1e9 * flags.memory,
    )


def _number(flag: str, text: str, unit: str, names: Mapping[str, object]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{flag} {text}: write {', '.join(names)} or a number of {unit} above 0")
    return value


def describe(
    name: str, model: Model, batch: Batch, found: Forecast, hardware: Hardware, steps: int
) -> list[str]:
    """One setting, a line for each figure."""
    memory, sent = found.memory, found.traffic
    days = steps * found.seconds / 86_400
    return [
        f"{name}: {model.parameters:,} parameters, {_batch(batch)}",
        "",
        f"memory of a GPU {memory.when}, where it is most, GB",
        *(f"  {label:<18}{size / 1e9:>10.3f}" for label, size in memory.at_peak.items()),
        f"  {'all of it':<18}{memory.peak / 1e9:>10.3f}",
        "a step",
        f"  {'tokens':<18}{found.tokens:>10,}",
        f"  {'MB sent by a GPU':<18}{sent.bytes_per_step / 1e6:>10,.1f}  {_sent(sent, model)}",
        f"  {'compute, ms':<18}{1e3 * found.compute:>10,.1f}  at {100 * hardware.mfu:g}% of "
        f"{hardware.flops / 1e12:g} TFLOP/s, assumed (--mfu)",
        f"  {'communication, ms':<18}{1e3 * found.communication:>10,.1f}",
        f"  {'of it exposed, ms':<18}{1e3 * found.exposed:>10,.1f}"
        f"  {100 * found.exposed_share:.1f}% of the step",
        f"  {'tokens/s':<18}{found.tokens_per_second:>10,.0f}",
        f"  {f'days, {steps:,} steps':<18}{days:>10.2f}",
    ]


def table(found: list[Found], steps: int) -> list[str]:
    """A line for each setting; memory and megabytes are those of one GPU."""
    width = max(len(one.config) for one in found) + 2
    wide = max(28, *(len(_batch(one.batch)) + 2 for one in found))
    days = [steps * one.forecast.seconds / 86_400 for one in found]
    unit, parts = ("days", 1) if max(days) >= 0.1 else ("hours", 24)
    head = f"{'MB sent':>9}{'GB':>8}{'exposed':>9}{'tokens/s':>13}{unit:>8}"
    lines = [f"{'config':<{width}}{'batch':<{wide}}{head}"]
    for one, long in zip(found, days, strict=True):
        step = one.forecast
        lines.append(
            f"{one.config:<{width}}{_batch(one.batch):<{wide}}"
            f"{step.traffic.bytes_per_step / 1e6:>9,.0f}{step.memory.peak / 1e9:>8.2f}"
            f"{100 * step.exposed_share:>8.1f}%{step.tokens_per_second:>13,.0f}"
            f"{parts * long:>8.2f}"
        )
    return lines


def _sent(sent: Traffic, model: Model) -> str:
    per_parameter = (sent.bytes_per_step - sent.exchange) / model.parameters
    said = f"{per_parameter:.2f} bytes a parameter"
    if sent.exchange:
        said += f", and {sent.exchange / 1e6:,.1f} MB to share sequences"
    return said


def _batch(batch: Batch) -> str:
    shared = f", {batch.shared_by} ranks each" if batch.shared_by > 1 else ""
    each = f"{batch.micro_batch}×{batch.seq_len} ×{batch.accumulation}"
    return f"{each}, {batch.checkpointing}{shared}"
