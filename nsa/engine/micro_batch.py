"""Micro-batch and activation checkpointing for `auto`; a run's settings as planner inputs.

The planner (nsa/planner) counts the bytes of tensors before the run starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsa.dtypes import DTYPES
from nsa.engine.config import AUTO, RunConfig
from nsa.engine.ds_config import load_ds_config, resolve_ds_config, zero_mode
from nsa.engine.teacher import find_teacher
from nsa.planner.forecast import select_auto
from nsa.planner.inputs import BatchShape, Model, Zero


def resolve_auto(
    config: RunConfig, zero: Zero, ranks: int, gpu_memory: float | None
) -> tuple[RunConfig, list[str]]:
    """Replace `auto` of micro_batch and activation_checkpointing; return log lines too.

    `gpu_memory` is in bytes, None without a GPU. A new micro-batch also changes `accumulation`, so
    a step has as many sequences as before.
    """
    batch, notes = batch_of(config), list[str]()
    auto_rows = config.train.micro_batch == AUTO
    if gpu_memory is not None:
        model = model_of(config)
        batch, notes = select_auto(model, zero, batch, gpu_memory, ranks, auto_rows=auto_rows)
    elif auto_rows:
        notes.append("micro-batch: 1 sequence (there is no GPU)")
    if batch.checkpointing == "auto":
        batch = replace(batch, checkpointing="none")
        notes.append("activation checkpointing: none (there is no GPU)")
    return replace(
        config,
        train=replace(config.train, micro_batch=batch.micro_batch, accumulation=batch.accumulation),
        model=replace(config.model, activation_checkpointing=batch.checkpointing),
    ), notes


def model_of(config: RunConfig) -> Model:
    stored = find_teacher(config)
    return Model(
        config.model,
        weight_bytes=DTYPES[config.train.precision].itemsize,
        teacher=None if stored is None else stored.config.model,
        dense_steps=config.train.switch_step,
    )


def batch_of(config: RunConfig) -> BatchShape:
    return BatchShape(
        seq_len=config.data.seq_len,
        micro_batch=config.train.rows,
        accumulation=config.train.accumulation,
        checkpointing=config.model.activation_checkpointing,
    )


def zero_of(source: Path, config: RunConfig, ranks: int) -> Zero:
    """Return a DeepSpeed JSON as planner input, after the checks of a run."""
    raw = load_ds_config(source)
    resolved = resolve_ds_config(raw, config, world_size=ranks, source=str(source))
    return resolved_zero(resolved, config)


def resolved_zero(resolved: Mapping[str, Any], config: RunConfig) -> Zero:
    """Return DeepSpeed's config, with every "auto" filled in, as planner input."""
    zero, mode = resolved["zero_optimization"], zero_mode(resolved)
    stage_3: dict[str, Any] = {}
    if mode.stage == 3:
        sizes = model_of(config).sizes
        threshold = zero.get("stage3_param_persistence_threshold", 1e5)
        persistent = [size for size in sizes if size <= threshold]  # not sharded
        limit = zero.get("stage3_max_live_parameters", 1e9)
        distance = zero.get("stage3_max_reuse_distance", 1e9)
        # The forward pass, a recomputation and the backward pass each read all weights.
        stay_gathered = limit >= sum(sizes) and distance >= 3 * sum(sizes)
        stage_3 = {
            "prefetch": int(zero.get("stage3_prefetch_bucket_size", 5e7)),
            "persistent": sum(persistent),
            "persistent_tensors": len(persistent),
            "gathers": 1 if stay_gathered else 2,
        }
    reduced = str(resolved.get("communication_data_type") or mode.precision)
    return Zero(
        stage=mode.stage,
        reduce_bytes=DTYPES[reduced].itemsize,
        accumulate_bytes=DTYPES[mode.accumulation].itemsize,
        bucket=int(zero.get("reduce_bucket_size", 0)) if mode.stage else 0,
        overlap=mode.overlap,
        offload=mode.offload,
        **stage_3,
    )
