"""Micro-batch and activation checkpointing for `auto`: by plan, then measured; planner inputs.

The plan (nsa/planner) counts tensors before the run starts. Before DeepSpeed starts, each rank
passes one micro-batch of random tokens through the model, and all ranks take a smaller one until
it fits on each of them. Accumulation keeps the sequences of a step.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nsa.dtypes import DTYPES
from nsa.engine.build import build_model
from nsa.engine.config import AUTO, RunConfig
from nsa.engine.ds_config import load_ds_config, resolve_ds_config, zero_mode
from nsa.engine.process_group import CpuCollectives
from nsa.engine.run_request import RunRequest
from nsa.engine.teacher import find_teacher
from nsa.monitor.memory import is_out_of_memory
from nsa.planner.forecast import FRAGMENTATION, select_checkpointing, select_micro_batch
from nsa.planner.inputs import BatchShape, Model, Zero
from nsa.planner.memory import memory


def resolve_auto(
    config: RunConfig, zero: Zero, ranks: int, gpu_memory: float | None
) -> tuple[RunConfig, list[str]]:
    """Replace `auto` of micro_batch and activation_checkpointing; return log lines too.

    `gpu_memory` is in bytes, None without a GPU. The step keeps its sequences.
    """
    batch, notes = batch_of(config), list[str]()
    mode, measures = batch.checkpointing, config.train.micro_batch == AUTO
    if gpu_memory is None:
        if measures:
            notes.append("micro-batch: 1 sequence (there is no GPU)")
        if mode == "auto":
            mode = "none"
            notes.append("activation checkpointing: none (there is no GPU)")
    else:
        model = model_of(config)
        if measures:
            batch, notes = select_micro_batch(model, zero, batch, gpu_memory, ranks)
        mode, mode_notes = select_checkpointing(model, zero, batch, gpu_memory, ranks)
        notes += mode_notes
    train = config.train
    if measures:
        train = replace(train, micro_batch=batch.micro_batch, accumulation=batch.accumulation)
    model_config = replace(config.model, activation_checkpointing=mode)
    return replace(config, train=train, model=model_config), notes


def model_of(config: RunConfig) -> Model:
    """Return a run's model as planner input."""
    weight_bytes = 4 if config.train.precision == "fp32" else 2
    teacher = find_teacher(config)
    dense = None if teacher is None else teacher.config.model
    return Model(config.model, config.data.seq_len, weight_bytes, dense, config.train.switch_step)


def batch_of(config: RunConfig) -> BatchShape:
    """Return a run's batch as planner input."""
    return BatchShape(
        seq_len=config.data.seq_len,
        micro_batch=config.train.rows,
        accumulation=config.train.accumulation,
        checkpointing=config.model.activation_checkpointing,
    )


def zero_of(source: Path, config: RunConfig, ranks: int) -> Zero:
    """Return a DeepSpeed JSON as planner input, after the checks of a run."""
    raw = load_ds_config(source)
    return resolved_zero(
        resolve_ds_config(raw, config, world_size=ranks, source=str(source)), config
    )


def resolved_zero(resolved: Mapping[str, Any], config: RunConfig) -> Zero:
    """Return DeepSpeed's config, with every "auto" filled in, as planner input."""
    zero, mode = resolved["zero_optimization"], zero_mode(resolved)
    stage_3: dict[str, Any] = {}
    if mode.stage == 3:
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


def fit_on_all_ranks(
    request: RunRequest, device: torch.device, collectives: CpuCollectives, ranks: int
) -> tuple[RunRequest, list[str]]:
    """Return the request with the largest micro-batch that fits on every rank's GPU; log lines."""
    notes: list[str] = []
    while True:
        config = request.config
        needed, available = measure(config, request.ds_config, device, ranks)
        figures_of_ranks = collectives.gather((needed, available), tuple[float, float])
        rank, (needed, available) = max(
            enumerate(figures_of_ranks), key=lambda x: x[1][0] - x[1][1]
        )
        train, before = config.train, config.train.rows
        if needed <= available or before == 1:
            return request, notes
        sequences = before * train.accumulation
        rows = next(n for n in range(before // 2, 0, -1) if sequences % n == 0)
        train = replace(train, micro_batch=rows, accumulation=sequences // rows)
        batch = {
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": train.accumulation,
        }
        request = replace(
            request, config=replace(config, train=train), ds_config=request.ds_config | batch
        )
        figures = f"{needed / 1e9:.1f} of {available / 1e9:.1f} GB"
        notes.append(
            f"micro-batch: {before} sequences do not fit on rank {rank} (measured: "
            f"{figures if needed < math.inf else 'out of memory'}): {rows} sequences, "
            f"accumulation {train.accumulation}"
        )


def measure(
    config: RunConfig, ds_config: Mapping[str, Any], device: torch.device, ranks: int
) -> tuple[float, float]:
    """Return the bytes of GPU memory that a step needs, infinite if it runs out, and those free.

    Measured: weights, gradients and activations of a forward and backward pass. By plan: the rest.
    """
    rest = unmeasured(config, ds_config, ranks)
    torch.cuda.empty_cache()
    available = torch.cuda.mem_get_info(device)[0]
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        _pass(config, device)  # its model is released when it returns
        passes = float(torch.cuda.max_memory_allocated(device) - before)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        passes = math.inf
    gc.collect()  # the error's traceback held tensors
    torch.cuda.empty_cache()
    # `available` leaves out what CUDA and NCCL hold already, a part of the plan's reserve.
    return (rest + passes) * FRAGMENTATION, float(available)


def unmeasured(config: RunConfig, ds_config: Mapping[str, Any], ranks: int) -> int:
    """Return the planned bytes that no forward and backward pass holds: optimizer and buckets."""
    planned = memory(model_of(config), resolved_zero(ds_config, config), batch_of(config), ranks)
    held = sum(planned.static.values()) - planned.static["weights"]
    return held + max(phase.get("buckets", 0) for phase in planned.phases.values())


def _pass(config: RunConfig, device: torch.device) -> None:
    model = build_model(config, device).to(DTYPES[config.train.precision])
    shape = config.train.rows, config.data.seq_len
    tokens = torch.randint(config.model.vocab_size, shape, device=device)
    model(tokens, labels=tokens).backward()
