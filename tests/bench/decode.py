"""`python -m tests.bench decode`: a layer's attention for one decoded token, NSA and dense.

At growing context length, with M7C's heads; on a GPU replayed as a CUDA graph. Caches hold random
numbers: the time of a token does not depend on them. Dense attention is PyTorch's without a mask,
its fastest form.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa.model import ModelConfig
from nsa.model.config import ATTENTION_KINDS as KINDS
from nsa.ops.decode import decode_attention
from tests.bench.harness import (
    Report,
    Result,
    Step,
    add_gpu_flags,
    cell,
    figure,
    lengths,
    print_table,
    ratio,
)
from tests.bench.train import model_config

FIGURES = {"attention_ms": 1.0, "read_bytes_per_token": 1e-3}  # and their units


def add_flags(parser: argparse.ArgumentParser) -> None:
    skip = "skip cases with more tokens in their caches (%(default)s)"
    add_gpu_flags(parser, "1k,2k,4k,8k,16k,32k,64k", tokens=524_288, tokens_help=skip)
    parser.add_argument("--batches", type=lengths, default="1,8", help="batch sizes (1,8)")


def run(report: Report) -> None:
    """Measure every length and batch within the time limit; print a table per batch."""
    flags = report.flags
    for batch in flags.batches:
        for length in flags.lengths:
            if batch * length <= flags.tokens:
                report.attempt(f"T={length} batch {batch}", partial(_case, length, batch, report))
        _print(batch, [row for row in report.data["rows"] if row["batch"] == batch])


@torch.no_grad()
def _case(length: int, batch: int, report: Report) -> None:
    attention = {"nsa": sparse_attention, "dense": dense_attention}
    configs = {kind: model_config(report, kind) for kind in KINDS}
    draw = partial(_normal, batch, report)
    calls, results = report.build(
        {kind: partial(attention[kind], config, length, draw) for kind, config in configs.items()},
        ("attention_timing",),
    )
    report.time(calls, results, "attention_timing", graph=True)
    for kind, result in results.items():
        result["attention_ms"] = figure(result, "attention_timing")
        result["read_bytes_per_token"] = read_bytes(configs[kind], length, report.dtype)
    over = {what: ratio(results["dense"][what], results["nsa"][what]) for what in FIGURES}
    row = {"length": length, "batch": batch, "layers": report.flags.layers}
    report.add(row | {"implementations": results, "dense_over_nsa": over})


def _normal(batch: int, report: Report, *shape: int) -> Tensor:
    return torch.randn(batch, *shape, device=report.device).to(report.dtype)


def read_bytes(config: ModelConfig, length: int, dtype: torch.dtype) -> int:
    """Count the bytes that attention reads for the last of `length` tokens, in all layers."""
    spec, last = config.attention.spec, length - 1
    positions = length
    if config.attention.kind == "nsa":
        positions = spec.visible_compressed(last) + spec.visible_window(last)
        positions += spec.visible_selected(last)
    sizes = config.head_dim + (config.value_dim or config.head_dim)
    return positions * config.layers * config.kv_heads * sizes * dtype.itemsize


def sparse_attention(config: ModelConfig, length: int, draw: Callable[..., Tensor]) -> Step:
    """Return a layer's sparse attention for one token of each sequence; `draw` takes shapes."""
    spec, sizes = config.attention.spec, (config.head_dim, config.value_dim or config.head_dim)
    q = draw(config.heads, config.head_dim)
    caches = [
        draw(entries, config.kv_heads, size)
        for entries in (spec.compressed_len(length), length, min(spec.window, length))
        for size in sizes
    ]
    gates = q.new_full((*q.shape[:2], 3), 0.5)
    lengths = torch.full((len(q),), length, device=q.device)
    backend = config.attention.backend
    return partial(decode_attention, q, *caches, gates, lengths, spec, backend=backend)


def dense_attention(config: ModelConfig, length: int, draw: Callable[..., Tensor]) -> Step:
    """Return dense attention of the same; the query heads of a group are rows of one query."""
    q = draw(config.heads, config.head_dim).unflatten(1, (config.kv_heads, -1))
    k, v = (
        draw(length, config.kv_heads, size).transpose(1, 2)
        for size in (config.head_dim, config.value_dim or config.head_dim)
    )
    return partial(scaled_dot_product_attention, q, k, v)


def _print(batch: int, rows: Sequence[Mapping[str, Any]]) -> None:
    heads = [f"batch {batch}, context length"]
    for what in ("attention ms", "KB read"):
        heads += [f"nsa {what}", f"dense {what}", "dense/nsa"]
    lines, errors = [heads], dict[str, Result]()
    for row in rows:
        results, cells = row["implementations"], [f"{row['length']:,}"]
        for what, unit in FIGURES.items():
            cells += [cell(ratio(results[kind][what], 1 / unit)) for kind in KINDS]
            cells.append(cell(row["dense_over_nsa"][what]))
        lines.append(cells)
        errors |= {f"T={row['length']} {kind}": results[kind] for kind in KINDS}
    print_table(lines, errors)
