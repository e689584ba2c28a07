"""`python -m tests.bench decode`: a layer's attention for one decoded token, sparse and dense.

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
from nsa.ops.decode import decode_attention
from tests.bench.harness import (
    Report,
    Result,
    Step,
    add_gpu_flags,
    cell,
    lengths,
    print_table,
    ratio,
    time_step,
)
from tests.bench.train import KINDS, model_config

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
    configs = {kind: model_config(report, kind) for kind in KINDS}

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, device=report.device).to(report.dtype)

    def measure(kind: str, call: Step, result: Result) -> None:
        result["read_bytes_per_token"] = read_bytes(configs[kind], length, report.dtype)
        timing = time_step(call, report.device, report.flags.seconds, graph=True)
        result |= {"attention_timing": timing, "attention_ms": timing["median"]}

    calls = {kind: partial(attention, config, length, draw) for kind, config in configs.items()}
    results = report.each(calls, FIGURES, measure)
    row: Result = {"length": length, "batch": batch, "layers": report.flags.layers}
    for kind in results.keys() - {"dense"}:
        row[f"dense_over_{kind}"] = {
            what: ratio(results["dense"][what], results[kind][what]) for what in FIGURES
        }
    report.add(row | {"implementations": results})


def read_bytes(config: ModelConfig, length: int, dtype: torch.dtype) -> int:
    """Count the bytes that attention reads for the last of `length` tokens, in all layers."""
    spec, last = config.attention.spec, length - 1
    key, value = config.head_dim, config.value_dim or config.head_dim
    numbers = length * (key + value)
    if config.attention.has_index:
        numbers = spec.visible_selected(last) * (key + value) + spec.visible_compressed(last) * key
    elif config.attention.kind == "nsa":
        seen = spec.visible_compressed(last) + spec.visible_selected(last)
        numbers = (seen + spec.visible_window(last)) * (key + value)
    return numbers * config.layers * config.kv_heads * dtype.itemsize


def attention(config: ModelConfig, length: int, draw: Callable[..., Tensor]) -> Step:
    """Return a layer's attention for one token of each sequence; `draw` takes shapes."""
    spec, heads = config.attention.spec, config.kv_heads
    key, value = config.head_dim, config.value_dim or config.head_dim
    q = draw(config.heads, key)
    if config.attention.kind == "dense":  # the query heads of a group are rows of one query
        k, v = (draw(length, heads, size).transpose(1, 2) for size in (key, value))
        return partial(scaled_dot_product_attention, q.unflatten(1, (heads, -1)), k, v)
    lengths = torch.full((len(q),), length, device=q.device)
    call = partial(decode_attention, q, backend=config.attention.backend)
    blocks, window = spec.compressed_len(length), min(spec.window, length)
    if config.attention.has_index:
        caches = (
            draw(blocks, heads, key),
            None,
            draw(length, heads, key),
            draw(length, heads, value),
        )
        index = draw(heads, key)
        return partial(
            call, *caches, None, None, None, lengths, spec, q_cmp=index, branches=("sel",)
        )
    caches = [draw(n, heads, size) for n in (blocks, length, window) for size in (key, value)]
    gates = q.new_full((*q.shape[:2], 3), 0.5)
    return partial(call, *caches, gates, lengths, spec)


def _print(batch: int, rows: Sequence[Mapping[str, Any]]) -> None:
    heads = [f"batch {batch}, context length"]
    for what in ("attention ms", "KB read"):
        heads += [f"{kind} {what}" for kind in KINDS]
        heads += [f"dense/{kind}" for kind in KINDS if kind != "dense"]
    lines, errors = [heads], dict[str, Result]()
    for row in rows:
        results, cells = row["implementations"], [f"{row['length']:,}"]
        for what, unit in FIGURES.items():
            cells += [cell(ratio(results[kind][what], 1 / unit)) for kind in KINDS]
            cells += [cell(row[f"dense_over_{kind}"][what]) for kind in KINDS if kind != "dense"]
        lines.append(cells)
        errors |= {f"T={row['length']} {kind}": results[kind] for kind in KINDS}
    print_table(lines, errors)
