"""`train.micro_batch=auto`: the largest micro-batch that fits the GPU, by plan and then measured.

The plan (nsa/planner) counts tensors before the run starts. Before DeepSpeed starts, each rank
passes one micro-batch of random tokens through the model, and all ranks take a smaller one until
it fits on each of them. Accumulation keeps the sequences of a step.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from nsa.dtypes import DTYPES
from nsa.engine.build import build_model
from nsa.engine.config import RunConfig
from nsa.engine.cpu_collectives import CpuCollectives
from nsa.engine.planner_inputs import batch_of, model_of, resolved_zero
from nsa.engine.run_request import RunRequest
from nsa.monitor.memory import is_out_of_memory
from nsa.planner.forecast import FRAGMENTATION
from nsa.planner.memory import memory


def fit_on_all_ranks(
    request: RunRequest, device: torch.device, collectives: CpuCollectives, ranks: int
) -> tuple[RunRequest, list[str]]:
    """Return the request with a micro-batch that fits on every rank's GPU, and log lines."""
    notes: list[str] = []
    while True:
        config = request.config
        needed, available = measure(config, request.ds_config, device, ranks)
        figures_of_ranks = collectives.gather((needed, available), tuple[float, float])
        rank, (needed, available) = max(
            enumerate(figures_of_ranks), key=lambda x: x[1][0] - x[1][1]
        )
        if needed <= available or config.train.rows == 1:
            return request, notes
        request = with_micro_batch(request, next_smaller(config))
        figures = f"{needed / 1e9:.1f} of {available / 1e9:.1f} GB"
        notes.append(
            f"micro-batch: {config.train.rows} sequences do not fit on rank {rank} (measured: "
            f"{figures if needed < math.inf else 'out of memory'}): {request.config.train.rows} "
            f"sequences, accumulation {request.config.train.accumulation}"
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
        _pass(config, device)
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


def next_smaller(config: RunConfig) -> int:
    """Return the largest micro-batch of at most half the sequences that divides a step's."""
    rows, sequences = config.train.rows, config.train.rows * config.train.accumulation
    return next(n for n in range(rows // 2, 0, -1) if sequences % n == 0)


def with_micro_batch(request: RunRequest, rows: int) -> RunRequest:
    """Return the request with this micro-batch and the same sequences per step."""
    train = request.config.train
    train = replace(train, micro_batch=rows, accumulation=train.rows * train.accumulation // rows)
    batch = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": train.accumulation,
    }
    return replace(
        request,
        config=replace(request.config, train=train),
        ds_config=request.ds_config | batch,
    )
