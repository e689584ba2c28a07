"""`nsa plan`: flags, the planner's inputs from a recipe and DeepSpeed's JSON, and output."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import runpy
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.gpus import GPUS
from nsa.planner.forecast import (
    MFU,
    Forecast,
    Hardware,
    flops_with_recomputation,
    forecast,
    required,
)
from nsa.planner.inputs import BatchShape, Model, Zero
from nsa.system import existing_or_resource, resource_path, user_path

if TYPE_CHECKING:  # imported late: they import DeepSpeed
    from nsa.engine.config import RunConfig
    from nsa.engine.recipe import Recipe

DEFAULT_RECIPE = resource_path("recipes/m7c.py")
# Assumed GB/s of a collective from one GPU to the next, one way: about 3/4 of the bus.
# host4 and host5: GPUs without peer access, whose data passes through the host's memory.
LINKS = {"pcie3": 12, "pcie4": 24, "pcie5": 48, "nvlink": 200, "host4": 12, "host5": 24}
DEVICES = {  # --device: its name in GPUS, and its usual link
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


def add_parser(verbs: Any) -> None:
    about = "estimate memory, traffic, step time and days of a run before starting it"
    parser = verbs.add_parser("plan", help=about, description=about)
    add = parser.add_argument
    about = "recipe file (default: recipes/m7c.py)"
    add("--recipe", type=existing_or_resource, metavar="FILE", help=about)
    add("--profile", default="production", help="profile of the recipe (production)")
    add("--config", type=user_path, help="YAML that overrides the recipe")
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
    add("--json", action="store_true", help="print JSON: bytes and seconds")
    parser.set_defaults(run=_plan)


def _hardware(flags: argparse.Namespace) -> Hardware:
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
    gpu, usual_link = DEVICES.get(flags.device, ("", "pcie4"))
    flags.link = flags.link or usual_link  # `_assumptions` prints it
    memory = GPUS[gpu].memory if gpu else MEMORY
    tflops = {name: GPUS[gpu].bf16 for name, (gpu, _) in DEVICES.items()}
    return Hardware(
        flops=1e12 * _number("--device", flags.device, "TFLOP/s", tflops),
        mfu=flags.mfu,
        link=1e9 * _number("--link", flags.link, "GB/s", LINKS),
        network=1e9 * flags.network,
        nodes=flags.nodes,
        memory=1e9 * (memory if flags.memory is None else flags.memory),
    )


def _plan(flags: argparse.Namespace) -> int:
    """Print the plan; return exit code 1 if it does not fit."""
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed's import logs to stdout
        from nsa.engine.micro_batch import batch_of, model_of, resolve_auto, zero_of
        from nsa.engine.recipe import DEFAULT_DS_CONFIG

    target = _hardware(flags)
    config, assumed = _resolve(flags)
    source, steps = flags.deepspeed_config or DEFAULT_DS_CONFIG, config.train.steps
    zero = zero_of(source, config, flags.gpus)
    config, notes = resolve_auto(config, zero, flags.gpus, target.memory)
    model, batch = model_of(config), batch_of(config)
    step = forecast(model, zero, batch, target, flags.gpus)
    fit = required(step.memory) <= target.memory
    assumed = [*_assumptions(flags, target, zero), *assumed]
    if flags.json:
        plans = [_row(source.stem, batch, step, steps) | {"fits": fit}]
        tree = {"parameters": model.parameters, "steps": steps, "plans": plans}
        print(json.dumps(tree | {"assumptions": [*assumed, *notes]}, indent=2))
        return 0 if fit else 1
    title = (
        f"{source.stem}: {model.parameters:,} parameters; micro-batch {batch.micro_batch} × "
        f"{batch.seq_len:,} tokens, accumulation {batch.accumulation}, "
        f"checkpointing {batch.checkpointing}"
    )
    print(title, *assumed, *_lines(model, batch, step, target, steps), *notes, sep="\n")
    if not fit:
        memory = f"{target.memory / 1e9:g} GB"
        print(f"  does not fit into {memory}: CUDA, NCCL and fragmentation add 2 GB and 10%")
    return 0 if fit else 1


def _resolve(flags: argparse.Namespace) -> tuple[RunConfig, list[str]]:
    """Return a run's config, and a note if it lacks the model of train.start_from."""
    from nsa.engine.config import resolve_config
    from nsa.engine.recipe import with_model_of_start

    recipe, notes = load_recipe(flags.recipe or DEFAULT_RECIPE, flags.profile), list[str]()
    base = recipe.profiles[flags.profile]()
    if recipe.model_of_start:
        try:
            base = with_model_of_start(base, flags.config, flags.set)
        except ValueError as error:
            notes = [f"a run would be refused, so the recipe's own model is planned: {error}"]
    return resolve_config(base, flags.config, flags.set), notes


def load_recipe(file: Path, profile: str) -> Recipe:
    """Execute a recipe file with `main` replaced; return its Recipe, which has the profile."""
    from nsa.engine import recipe as recipes

    if not file.is_file():
        raise ValueError(f"--recipe {file}: no such file")
    caught: list[Recipe] = []
    start = recipes.main
    recipes.main = lambda recipe, arguments=None: caught.append(recipe)
    sys.path.insert(0, str(file.resolve().parent))
    try:
        runpy.run_path(str(file), run_name="__main__")
    finally:
        recipes.main = start
        del sys.path[0]
    if not caught:
        raise ValueError(f"--recipe {file}: passes no Recipe to main(); see recipes/m7c.py")
    profiles = caught[0].profiles
    if profile not in profiles:
        raise ValueError(f"--profile {profile}: {file} has {', '.join(sorted(profiles))}")
    return caught[0]


def _assumptions(flags: argparse.Namespace, hardware: Hardware, zero: Zero) -> list[str]:
    device = f"{hardware.flops / 1e12:g} TFLOP/s, {hardware.memory / 1e9:g} GB"
    if flags.device in DEVICES:
        device = f"{flags.device} ({device})"
    link = f"{hardware.link / 1e9:g} GB/s"
    if flags.link in LINKS:
        link = f"{flags.link} ({link})"
    nodes = ""
    if hardware.nodes > 1:
        nodes = f", {hardware.nodes} nodes at {hardware.network / 1e9:g} GB/s (--nodes, --network)"
    speed = f"{REACHED} (--mfu): measured with three branches on an H100, an estimate elsewhere"
    if hardware.mfu is not None:
        speed = f"assumed: {100 * hardware.mfu:g}% of the peak (--mfu)"
    lines = [
        f"assumed: {flags.gpus} GPUs (--gpus), {device} (--device), {link} (--link){nodes}",
        f"{speed}; gaps between kernels included",
    ]
    if zero.offload:
        lines.append("not counted: offload, which saves GPU memory and costs time")
    return lines


def _number(flag: str, text: str, unit: str, named: Mapping[str, float]) -> float:
    """Return the value of a name, or the number that `text` is."""
    try:
        value = named[text] if text in named else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{flag} {text}: write {', '.join(named)} or a number of {unit} above 0")
    return value


def _lines(
    model: Model, batch: BatchShape, step: Forecast, hardware: Hardware, steps: int
) -> list[str]:
    memory, sent = step.memory, step.traffic.bytes_per_step
    flops = flops_with_recomputation(model, batch, model.config.attention.kind)
    reached = batch.tokens * batch.accumulation * flops / step.compute / hardware.flops
    # Only a host that is slower than the GPU takes `reached` below MFU; 0.999 allows for rounding.
    host_bound = hardware.mfu is None and reached < 0.999 * MFU[model.config.attention.kind]
    by_host = ", limited by the host that starts kernels" if host_bound else ""
    dense = f"  {'tokens/s, dense':<18}{step.tokens / step.dense_seconds:>10,.0f}"
    dense += f"  in the first {step.dense_steps:,} steps"
    return [
        "",
        f"memory of a GPU at its peak, {memory.peak_phase}, GB",
        *(f"  {label:<18}{size / 1e9:>10.3f}" for label, size in memory.at_peak.items()),
        f"  {'total of tensors':<18}{memory.peak / 1e9:>10.3f}",
        "a step",
        f"  {'tokens':<18}{step.tokens:>10,}",
        f"  {'MB sent by a GPU':<18}{sent / 1e6:>10,.1f}"
        f"  {sent / model.parameters:.2f} bytes per parameter",
        f"  {'compute, ms':<18}{1e3 * step.compute:>10,.1f}  at {100 * reached:.3g}% of "
        f"{hardware.flops / 1e12:g} TFLOP/s{by_host}",
        f"  {'communication, ms':<18}{1e3 * step.communication:>10,.1f}",
        f"  {'exposed, ms':<18}{1e3 * step.exposed:>10,.1f}"
        f"  {100 * step.exposed / step.seconds:.1f}% of the step",
        *([dense] if step.dense_steps else []),
        f"  {'tokens/s':<18}{step.tokens_per_second:>10,.0f}",
        f"  {f'days, {steps:,} steps':<18}{step.days(steps):>10.2f}",
    ]


def _row(name: str, batch: BatchShape, step: Forecast, steps: int) -> dict[str, Any]:
    """Return the figures of a plan in bytes, tokens and seconds, for --json."""
    names = "tokens", "compute", "communication", "exposed", "seconds", "tokens_per_second"
    return {
        "config": name,
        **asdict(batch),
        "memory": step.memory.at_peak | {"total": step.memory.peak},
        "bytes_sent": step.traffic.bytes_per_step,
        **{figure: getattr(step, figure) for figure in names},
        "days": step.days(steps),
    }
