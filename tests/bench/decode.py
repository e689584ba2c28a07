"""`python -m tests.bench decode`: a layer's attention for one decoded token, sparse and dense.

At growing context length, with M7C's heads; on a GPU replayed as a CUDA graph. Caches hold random
numbers: the time of a token does not depend on them. Dense attention is PyTorch's without a mask,
its fastest form.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa.model import ModelConfig
from nsa.ops.decode import decode_attention
from nsa.ops.inputs import DecodeInputs
from tests.bench.harness import Report, Result, Step, add_gpu_flags, lengths, time_step
from tests.bench.train import KINDS

FIGURES = ("attention_ms", "read_bytes_per_token")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_gpu_flags(parser, tokens=524_288)
    context = "1k,2k,4k,8k,16k,32k,64k"
    parser.add_argument("--lengths", type=lengths, default=context, help="(%(default)s)")
    parser.add_argument("--batches", type=lengths, default="1,8", help="batch sizes (1,8)")


def run(report: Report) -> None:
    """Measure every length and batch within the time limit; print a table per case."""
    flags = report.flags
    for batch, length in product(flags.batches, flags.lengths):
        if batch * length <= flags.tokens:
            report.attempt(f"T={length} batch {batch}", partial(_case, length, batch, report))


@torch.no_grad()
def _case(length: int, batch: int, report: Report) -> None:
    configs = {
        kind: ModelConfig(attention=replace(attention, backend=report.backend))
        for kind, attention in KINDS.items()
    }

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, device=report.device).to(report.dtype)

    def measure(kind: str, call: Step, result: Result) -> None:
        result["read_bytes_per_token"] = read_bytes(configs[kind], length, report.dtype)
        result["attention_ms"] = time_step(call, report.device, report.flags.seconds, graph=True)

    calls = {kind: partial(layer, config, length, draw) for kind, config in configs.items()}
    row = {"length": length, "batch": batch, "layers": configs["dense"].layers}
    report.compare(row, calls, FIGURES, measure, base="index")


def read_bytes(config: ModelConfig, length: int, dtype: torch.dtype) -> int:
    """Count the bytes that attention reads for the last of `length` tokens, in all layers."""
    spec, last = config.attention.spec, length - 1
    key = value = config.head_dim
    numbers = length * (key + value)
    if config.attention.has_index:
        numbers = spec.visible_selected(last) * (key + value) + spec.visible_compressed(last) * key
    elif config.attention.kind == "nsa":
        seen = spec.visible_compressed(last) + spec.visible_selected(last)
        numbers = (seen + spec.visible_window(last)) * (key + value)
    return numbers * config.layers * config.kv_heads * dtype.itemsize


def layer(config: ModelConfig, length: int, draw: Callable[..., Tensor]) -> Step:
    """Return a layer's attention for one token of each sequence; `draw` takes shapes."""
    spec, heads, size = config.attention.spec, config.kv_heads, config.head_dim
    q, k, v = draw(config.heads, size), draw(length, heads, size), draw(length, heads, size)
    if config.attention.kind == "dense":  # the query heads of a group are rows of one query
        q, k, v = q.unflatten(1, (heads, -1)), k.transpose(1, 2), v.transpose(1, 2)
        return partial(scaled_dot_product_attention, q, k, v)
    lengths = torch.full((len(q),), length, device=q.device)
    blocks, window = spec.compressed_len(length), min(spec.window, length)
    k_cmp = draw(blocks, heads, size)
    if config.attention.has_index:
        tensors = draw(heads, size), k_cmp, None, k, v, None, None, None
    else:
        v_cmp, k_win, v_win = (draw(n, heads, size) for n in (blocks, window, window))
        tensors = None, k_cmp, v_cmp, k, v, k_win, v_win, q.new_full((*q.shape[:2], 3), 0.5)
    rest = lengths, spec, config.attention.branches, size**-0.5
    return partial(decode_attention, DecodeInputs(q, *tensors, *rest), config.attention.backend)
