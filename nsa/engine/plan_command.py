"""`nsa plan`: build the planner's inputs from a recipe and DeepSpeed's JSON, and run it."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

from nsa.engine import recipe as recipes
from nsa.engine.command_line import DEFAULT_DS_CONFIG
from nsa.engine.config import RunConfig
from nsa.engine.ds_config import load_ds_config, resolve_ds_config
from nsa.engine.resolve import resolve_config
from nsa.planner.command import describe, hardware, table
from nsa.planner.model import BatchShape, Model
from nsa.planner.search import compare, search
from nsa.planner.step import fits, forecast
from nsa.planner.traffic import Zero
from nsa.resources import resource_path

DEFAULT_RECIPE = resource_path("recipes/m7c.py")
SHOWN = 12  # rows of a table
DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def run(flags: argparse.Namespace) -> int:
    """Print the plan; return exit code 1 if nothing fits."""
    target = hardware(flags)
    recipe = flags.recipe or DEFAULT_RECIPE
    config = resolve_config(_load_profile(recipe, flags.profile), flags.config, flags.set)
    parts = config.train.sequence_parallel
    if flags.gpus % parts:
        raise ValueError(
            f"--gpus {flags.gpus}: not a multiple of train.sequence_parallel = {parts}"
        )
    source, steps = flags.deepspeed_config or DEFAULT_DS_CONFIG, config.train.steps
    model, batch, zero = model_of(config), batch_of(config), zero_of(source, config, flags.gpus)
    memory = f"{target.memory / 1e9:g} GB"
    if flags.search or flags.compare:
        files = sorted(source.parent.glob("*.json"))
        zeros = {file.stem: zero_of(file, config, flags.gpus) for file in files}
        rank = search if flags.search else compare
        candidates = rank(model, zeros, batch, target, flags.gpus)
        if not candidates:
            print(f"nothing fits into {memory}")
            return 1
        print(*table(candidates[:SHOWN], steps), sep="\n")
        if len(candidates) > SHOWN:
            print(f"the fastest {SHOWN} of {len(candidates)} that fit")
        return 0
    step = forecast(model, zero, batch, target, flags.gpus)
    print(*describe(source.stem, model, batch, step, target, steps), sep="\n")
    if not fits(step.memory, target):
        print(f"  does not fit into {memory}: CUDA, NCCL and fragmentation add 2 GB and 10%")
        return 1
    return 0


def model_of(config: RunConfig) -> Model:
    """Return a run's model as planner input."""
    weight_bytes = 4 if config.train.precision == "fp32" else 2
    return Model(config.model, config.data.seq_len, weight_bytes)


def batch_of(config: RunConfig) -> BatchShape:
    """Return a run's batch as planner input."""
    return BatchShape(
        seq_len=config.data.seq_len,
        micro_batch=config.train.micro_batch,
        accumulation=config.train.accumulation,
        checkpointing=config.model.activation_checkpointing,
        ranks_per_sequence=config.train.sequence_parallel,
    )


def zero_of(source: Path, config: RunConfig, ranks: int) -> Zero:
    """Return a DeepSpeed JSON as planner input, after the checks of a run."""
    resolved = resolve_ds_config(
        load_ds_config(source), config, world_size=ranks, source=str(source)
    )
    zero, precision = resolved["zero_optimization"], config.train.precision
    stage = zero["stage"]
    accumulation = resolved.get("data_types", {}).get("grad_accum_dtype") or precision
    stage_3: dict[str, Any] = {}
    if stage == 3:
        sizes = model_of(config).sizes
        threshold = zero.get("stage3_param_persistence_threshold", 1e5)
        persistent = [size for size in sizes if size < threshold]  # not sharded
        reused = zero.get("stage3_max_live_parameters", 1e9) >= sum(sizes)
        reused &= zero.get("stage3_max_reuse_distance", 1e9) >= 3 * sum(sizes)
        stage_3 = {
            "prefetch": int(zero.get("stage3_prefetch_bucket_size", 5e7)),
            "persistent": sum(persistent),
            "persistent_tensors": len(persistent),
            "gathers": 1 if reused else 2,
        }
    return Zero(
        stage=stage,
        reduce_bytes=DTYPE_BYTES[str(resolved.get("communication_data_type") or precision)],
        accumulate_bytes=DTYPE_BYTES[str(accumulation)],
        bucket=int(zero.get("reduce_bucket_size", 0)) if stage else 0,
        overlap=bool(zero.get("overlap_comm", stage == 3)),
        **stage_3,
    )


def _load_profile(recipe: Path, profile: str) -> RunConfig:
    """Execute the recipe file with `main` replaced, and return the profile's config."""
    if not recipe.is_file():
        raise ValueError(f"--recipe {recipe}: no such file")
    caught: list[recipes.Recipe] = []
    start = recipes.main
    recipes.main = lambda recipe, arguments=None: caught.append(recipe)
    sys.path.insert(0, str(recipe.resolve().parent))
    try:
        runpy.run_path(str(recipe), run_name="__main__")
    finally:
        recipes.main = start
        del sys.path[0]
    if not caught:
        raise ValueError(f"--recipe {recipe}: passes no Recipe to main(); see recipes/m7c.py")
    profiles = caught[0].profiles
    if profile not in profiles:
        raise ValueError(f"--profile {profile}: {recipe} has {', '.join(sorted(profiles))}")
    return profiles[profile]()
