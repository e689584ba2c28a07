"""`python -m nsa.bench decode`: decoding at growing context length, M7C and its dense twin.

The twins alternate at each length and batch. Caches hold random numbers: the time of a token does
not depend on them. Two figures:

    step        one token of each sequence through the model; a mean over as many tokens as a
                compressed block's stride, so that one block is appended
    attention   one layer's attention for such a token; on a GPU replayed as a CUDA graph

Dense attention alone is PyTorch's without a mask, with a group's heads as rows of one query: its
fastest form.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa.bench.options import Shape, add_gpu_flags, lengths
from nsa.bench.results import Report, Result, cell, figure, print_table, ratio
from nsa.bench.roofline import BF16, token_bytes
from nsa.bench.timing import Step
from nsa.bench.train import model_config
from nsa.constants import BRANCHES
from nsa.model import LanguageModel, ModelConfig
from nsa.model.cache import KVCache, cache_bytes
from nsa.model.config import ATTENTION_KINDS as KINDS
from nsa.model.decode import step
from nsa.ops.decode import decode_attention

RATIOS = ("step_ms", "attention_ms", "read_bytes_per_token", "cache_bytes_per_token")


def add_flags(parser: argparse.ArgumentParser) -> None:
    skip = "skip cases with more tokens in their caches (%(default)s)"
    add_gpu_flags(parser, "1k,2k,4k,8k,16k,32k,64k", tokens=524_288, tokens_help=skip)
    parser.add_argument("--batches", type=lengths, default="1,8", help="batch sizes (1,8)")


def run(report: Report) -> None:
    """Measure every length and batch within the time limit; print a table per batch."""
    flags = report.flags
    models = {kind: _model(kind, report) for kind in KINDS}
    for batch in flags.batches:
        for length in flags.lengths:
            if batch * length <= flags.tokens:
                case = partial(_case, models, length, batch, report)
                report.attempt(f"T={length} batch {batch}", case)
        _print(batch, report.data["rows"])


def _model(kind: str, report: Report) -> LanguageModel:
    torch.manual_seed(0)
    config = model_config(report, kind)
    return LanguageModel(config).to(device=report.device, dtype=report.dtype).eval()


@torch.no_grad()
def _case(models: Mapping[str, LanguageModel], length: int, batch: int, report: Report) -> None:
    count = models["nsa"].config.attention.spec.block_stride
    caches = {
        kind: random_cache(model.config, length, batch, length + count, report.dtype, report.device)
        for kind, model in models.items()
    }
    attention, results = report.build(
        {kind: partial(_attention, caches[kind], length) for kind in KINDS},
        ("step_timing", "attention_timing"),
    )
    steps = {kind: partial(_decode, models[kind], caches[kind], length, count) for kind in KINDS}
    report.time(steps, results, "step_timing")
    report.time(attention, results, "attention_timing")
    for kind, result in results.items():
        result["step_ms"] = ratio(figure(result, "step_timing"), count)
        result["attention_ms"] = figure(result, "attention_timing")
        result["tokens_per_s"] = ratio(1e3 * batch, result["step_ms"])
        result |= _counts(caches[kind], length)
    over = {what: ratio(results["dense"][what], results["nsa"][what]) for what in RATIOS}
    row = {
        "length": length,
        "batch": batch,
        "layers": report.flags.layers,
        "implementations": results,
        "dense_over_nsa": over,
    }
    report.add(row)


def random_cache(
    config: ModelConfig,
    length: int,
    batch: int,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """Return a cache after `length` tokens of each sequence, with random keys and values."""
    cache = KVCache(config, batch, dtype=dtype, device=device, capacity=capacity)
    cache.start([length] * batch)
    for layer in cache.layers:
        for buffer in layer.buffers.values():
            buffer.normal_()
    return cache


def _decode(model: LanguageModel, cache: KVCache, length: int, count: int) -> Tensor:
    """Decode `count` tokens, starting at `length` each time."""
    cache.start([length] * cache.batch)
    token = torch.zeros(cache.batch, dtype=torch.int64, device=cache.device)
    for _ in range(count):
        token = step(model, token, cache).argmax(-1)
    return token


def _counts(cache: KVCache, length: int) -> Result:
    """Count the bytes that a sequence's attention reads per token, all layers, and caches."""
    config = cache.config
    counts = token_bytes(Shape.of(config), length, config.attention.spec)
    read = counts["read" if config.attention.kind == "nsa" else "dense"]
    cached = cache_bytes(config, length, cache.dtype)
    return {
        "read_bytes_per_token": config.layers * read * cache.dtype.itemsize // BF16,
        "cache_bytes": cached,
        "cache_bytes_per_token": cached / length,
        "cache_bytes_measured": {"capacity": cache.capacity, "bytes": cache.nbytes},
    }


def _attention(cache: KVCache, length: int) -> Step:
    """Return one layer's attention for one token of each sequence."""
    build = _sparse if cache.config.attention.kind == "nsa" else _dense
    call = build(cache, length)
    return _graph(call) if cache.device.type == "cuda" else call


def _queries(cache: KVCache) -> Tensor:
    shape = cache.batch, cache.config.heads, cache.config.head_dim
    return torch.randn(shape, device=cache.device).to(cache.dtype)


def _sparse(cache: KVCache, length: int) -> Step:
    attention, q, read = cache.config.attention, _queries(cache), cache.layers[0].read
    cmp, sel, win = ((read(f"k_{branch}"), read(f"v_{branch}")) for branch in BRANCHES)
    gates = q.new_full((*q.shape[:2], 3), 0.5)
    lengths = torch.full((cache.batch,), length, device=cache.device)
    spec, backend = attention.spec, attention.backend
    return partial(decode_attention, q, *cmp, *sel, *win, gates, lengths, spec, backend=backend)


def _dense(cache: KVCache, length: int) -> Step:
    q = _queries(cache).unflatten(1, (cache.config.kv_heads, -1))
    k, v = cache.layers[0].read("k_all"), cache.layers[0].read("v_all")
    assert k is not None
    assert v is not None
    k, v = (x[:, :length].transpose(1, 2) for x in (k, v))
    return partial(scaled_dot_product_attention, q, k, v)


def _graph(call: Step) -> Step:
    """Record the launches as a CUDA graph, which has no launch time on the host.

    The result holds `call`: a graph reads its inputs' memory without owning it.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(held: Step = call) -> None:
        graph.replay()

    return replay


def _print(batch: int, rows: Sequence[Mapping[str, Any]]) -> None:
    heads = [f"batch {batch}, context length", "nsa ms", "dense ms", "dense/nsa"]
    heads += ["nsa attention ms", "dense attention ms", "dense/nsa"]
    heads += ["nsa KB read", "dense KB read", "dense/nsa", "nsa KB cached", "dense KB cached"]
    lines, errors = [[*heads, "dense/nsa"]], dict[str, Result]()
    for row in rows:
        if row["batch"] == batch:
            results, cells = row["implementations"], [f"{row['length']:,}"]
            for what in RATIOS:
                unit = 1e3 if "bytes" in what else 1.0
                cells += [cell(ratio(results[kind][what], unit)) for kind in KINDS]
                cells.append(cell(row["dense_over_nsa"][what]))
            lines.append(cells)
            errors |= {f"T={row['length']} {kind}": results[kind] for kind in KINDS}
    if len(lines) > 1:
        print_table(lines, errors)
