"""`python -m tests.bench schedule`: how evenly attention kernels fill a GPU, counted without one.

`tests/ops/triton/program_costs.py` counts each program's multiply-adds and simulates the block
scheduler. Counts, and no estimate of a time.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np

from tests.bench.harness import Report, Result, cell, print_table
from tests.ops.triton.program_costs import flash_costs, program_costs, selections, simulated

CARDS = {"a100": ("sm_80", 108), "h100": ("sm_90", 132)}  # chip, multiprocessors


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=CARDS, default="a100", dest="card", help="(%(default)s)")
    add("--micro-batch", type=int, default=8, help="sequences (%(default)s)")
    add("--seq-len", type=int, default=2_048, help="tokens of a sequence (%(default)s)")


def run(report: Report) -> dict[str, Any]:
    """Count the attention kernels of M7C's and of its dense twin's micro-batch; random blocks."""
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled
    result = {kind: count(kind, report.flags) for kind in ("nsa", "dense")}
    for kind, kernels in result.items():
        columns = list(kernels[0])[1:]
        lines = [[x["kernel"], *(cell(x[y]) for y in columns)] for x in kernels]
        print_table([[kind, *columns], *lines])
    return result


def count(kind: str, flags: argparse.Namespace) -> list[Result]:
    """Return a row per attention kernel of a layer, which launches each once."""
    from nsa.model import AttentionConfig, ModelConfig
    from nsa.ops.triton.configs import choosing_for
    from tests.compile.check import Variant, compile_variant
    from tests.operations import record_operations

    chip, multiprocessors = CARDS[flags.card]
    config = ModelConfig(attention=AttentionConfig(kind=kind), layers=1)
    batch, offsets = flags.micro_batch, np.array([0, flags.seq_len])
    with choosing_for(chip):
        operations = record_operations(config, batch, flags.seq_len)
    masks = selections("random", offsets, config.attention.spec, batch * config.kv_heads)
    rows: list[Result] = []
    for x in (launch for operation in operations for launch in operation.launches):
        if x.launch is None:
            costs = flash_costs(x.name, batch * config.heads, flags.seq_len, config.head_dim)
            blocks = 1
        else:
            costs = program_costs(x.launch, offsets, masks)
            if costs is not None:
                blocks = compile_variant(Variant.of(x.launch, chip)).blocks_per_sm
        if costs is not None:
            balanced = costs.sum() / multiprocessors
            rows.append(
                {
                    "kernel": x.name,
                    "programs": len(costs),
                    "blocks per SM": blocks,
                    "longest/balanced": costs.max() / balanced,
                    "schedule/balanced": simulated(costs, multiprocessors, blocks) / balanced,
                    "TFLOP": 2e-12 * costs.sum(),
                }
            )
    return rows
