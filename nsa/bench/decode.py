"""`python -m nsa.bench decode`: what a token costs behind a cache, as what is behind it grows.

M7C and its dense twin take turns, at each length and batch. A cache is filled with random numbers:
what a token costs does not depend on them. Two figures:

    step        a token through the whole model, one for each sequence of the batch; a mean over as
                many tokens as a compressed block's stride, so that one block is appended
    attention   one layer's attention of such a token alone; on a GPU replayed as a CUDA graph

Dense attention alone is PyTorch's without a mask, with a group's heads as rows of one query: the
fastest way that there is to ask for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa.bench.gpu import Step, recover, take_turns
from nsa.bench.report import Report, ratio, shown, table
from nsa.bench.roofline import HALF, token
from nsa.bench.shapes import Shape
from nsa.model import AttentionConfig, LanguageModel, ModelConfig
from nsa.model.cache import KVCache, cache_bytes
from nsa.model.decode import step
from nsa.ops.decode import decode_attention

KINDS = ("nsa", "dense")
TIMED = ("step", "attention")


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Measure every length and batch that fits into the time; prints a table a batch."""
    report = Report(flags)
    backend = flags.backend or ("triton" if report.device.type == "cuda" else "blockwise")
    report.data["settings"]["backend"] = backend
    models = {kind: _model(kind, backend, report) for kind in KINDS}
    for batch in flags.batches:
        for length in flags.lengths:
            if batch * length <= flags.tokens:
                case = partial(_case, models, length, batch, report)
                report.attempt(f"T={length} batch {batch}", case)
        _show(batch, report.data["rows"])
    return report.finish()


def _model(kind: str, backend: str, report: Report) -> LanguageModel:
    torch.manual_seed(0)
    attention = AttentionConfig(kind=kind, backend=backend)
    flags = report.flags
    config = ModelConfig(layers=flags.layers, vocab_size=flags.vocab, attention=attention)
    return LanguageModel(config).to(device=report.device, dtype=report.dtype).eval()


@torch.no_grad()
def _case(models: Mapping[str, LanguageModel], length: int, batch: int, report: Report) -> None:
    turn = models["nsa"].config.attention.spec.block_stride
    caches = {
        kind: filled(model.config, length, batch, length + turn, report.dtype, report.device)
        for kind, model in models.items()
    }
    found = {kind: _counted(caches[kind], length) for kind in KINDS}
    steps: dict[str, Step] = {
        kind: partial(_tokens, models[kind], caches[kind], length, turn) for kind in KINDS
    }
    _time("step", steps, turn, found, report)
    alone: dict[str, Step] = {}
    for kind, make in (("nsa", _sparse), ("dense", _dense)):
        try:
            call = make(caches[kind], length)
            alone[kind] = _graph(call) if report.device.type == "cuda" else call
        except Exception as error:  # its reason is its result
            found[kind]["why_not"]["attention"] = recover(error, report.device)
    _time("attention", alone, 1, found, report)
    for one in found.values():
        one["tokens_per_s"] = ratio(1e3 * batch, one["step_ms"])
    figures = ("step_ms", "attention_ms", "read_bytes_per_token", "cache_bytes_per_token")
    report.add(
        {
            "length": length,
            "batch": batch,
            "layers": report.flags.layers,
            "contenders": found,
            "dense_over_nsa": {
                what: ratio(found["dense"][what], found["nsa"][what]) for what in figures
            },
        }
    )


def filled(
    config: ModelConfig,
    length: int,
    batch: int,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """A cache as behind `length` tokens of each sequence, with random keys and values."""
    cache = KVCache(config, batch, dtype=dtype, device=device, capacity=capacity)
    cache.start([length] * batch)
    for layer in cache.layers:
        for buffer in layer.buffers.values():
            buffer.normal_()
    return cache


def _tokens(model: LanguageModel, cache: KVCache, length: int, count: int) -> Tensor:
    """So many tokens, from the same place each time."""
    cache.start([length] * cache.batch)
    token = torch.zeros(cache.batch, dtype=torch.int64, device=cache.device)
    for _ in range(count):
        logits = step(model, token, cache)
        token = logits.argmax(-1)
    return token


def _time(
    what: str,
    calls: Mapping[str, Step],
    tokens: int,
    found: Mapping[str, dict[str, Any]],
    report: Report,
) -> None:
    """Milliseconds a token, and the turns that they come from."""
    flags = report.flags
    timings, failed = take_turns(calls, report.device, seconds=flags.seconds, rounds=flags.rounds)
    for kind, one in found.items():
        one[f"{what}_ms"] = timings[kind].median / tokens if kind in timings else None
        one[f"{what}_turns"] = asdict(timings[kind]) if kind in timings else None
        if kind in failed:
            one["why_not"][what] = failed[kind]


def _counted(cache: KVCache, length: int) -> dict[str, Any]:
    """What attention reads for a token of one sequence, all layers, and what is kept for one."""
    config, size = cache.config, cache.dtype.itemsize
    value = config.value_dim or config.head_dim
    shape = Shape("", config.heads, config.kv_heads, config.head_dim, value)
    read = token(shape, length, config.attention.spec)
    keys = read.keys if config.attention.kind == "nsa" else read.dense
    kept = cache_bytes(config, length, cache.dtype)
    return {
        "read_bytes_per_token": config.layers * keys * size // HALF,
        "cache_bytes": kept,
        "cache_bytes_per_token": kept / length,
        "cache_bytes_measured": {"capacity": cache.capacity, "bytes": cache.nbytes},
        "why_not": {},
    }


def _queries(cache: KVCache) -> Tensor:
    config = cache.config
    shape = cache.batch, config.heads, config.head_dim
    return torch.randn(shape, device=cache.device).to(cache.dtype)


def _sparse(cache: KVCache, length: int) -> Step:
    layer, attention, q = cache.layers[0], cache.config.attention, _queries(cache)
    gates = q.new_full((*q.shape[:2], 3), 0.5)
    lengths = torch.full((cache.batch,), length, device=cache.device)
    return lambda: decode_attention(
        q,
        layer.read("k_cmp"),
        layer.read("v_cmp"),
        layer.read("k_sel"),
        layer.read("v_sel"),
        layer.read("k_win"),
        layer.read("v_win"),
        gates,
        lengths,
        attention.spec,
        backend=attention.backend,
    )


def _dense(cache: KVCache, length: int) -> Step:
    q = _queries(cache).unflatten(1, (cache.config.kv_heads, -1))
    k, v = cache.layers[0].read("k_all"), cache.layers[0].read("v_all")
    assert k is not None
    assert v is not None
    k, v = (x[:, :length].transpose(1, 2) for x in (k, v))
    return partial(scaled_dot_product_attention, q, k, v)


def _graph(call: Step) -> Step:
    """The same launches without what the host takes to make them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, call: Step) -> None:
    """`call` is there to be kept: a graph reads its inputs' memory, and does not hold it."""
    graph.replay()


def _show(batch: int, rows: Sequence[Mapping[str, Any]]) -> None:
    lines = [[f"batch {batch}, tokens behind", *(f"{kind} ms" for kind in KINDS), "dense/nsa"]]
    lines[0] += [f"{kind} attention ms" for kind in KINDS] + ["dense/nsa", "KB read", "KB kept"]
    for row in rows:
        if row["batch"] != batch:
            continue
        found, over = row["contenders"], row["dense_over_nsa"]
        cells = [f"{row['length']:,}"]
        for what in TIMED:
            cells += [shown(found[kind][f"{what}_ms"]) for kind in KINDS]
            cells.append(shown(over[f"{what}_ms"]))
        for what in ("read", "cache"):
            both = (found[kind][f"{what}_bytes_per_token"] / 1e3 for kind in KINDS)
            cells.append(" / ".join(f"{kb:,.1f}" for kb in both))
        lines.append(cells)
        for kind in KINDS:
            for what, why in found[kind]["why_not"].items():
                print(f"  T={row['length']} {kind}, {what}: {why}")
    if len(lines) > 1:
        table(lines)
        print(flush=True)
