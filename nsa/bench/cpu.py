"""`python -m nsa.bench cpu`: the blockwise backend against PyTorch's attention, as ratios."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.bench.environment import environment
from nsa.bench.implementations import Implementation
from nsa.bench.inputs import Inputs
from nsa.bench.measure import Step, median_seconds
from nsa.bench.options import SHAPES, add_out
from nsa.bench.results import print_table, save
from nsa.dtypes import DTYPES
from nsa.model import ModelConfig
from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.block import Block
from nsa.ops import NSASpec, nsa_attention

# One layer of the system that this one replaces, with its MLP, forward and backward, measured on
# two cores at T = 2048, batch 1, fp32. Those cores reached 180 GFLOP/s in fp32 matrix products.
EARLIER_LAYER_SECONDS = 10.5
EARLIER_GFLOPS = 180.0
PRECISIONS = {name: DTYPES[name] for name in ("fp32", "bf16")}
SHAPE, SEQ_LEN, CPU = SHAPES["m7c"], 2_048, torch.device("cpu")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each measurement")
    parser.add_argument("--longest", type=int, default=16_384, help="longest sequence")
    add_out(parser)


def run(flags: argparse.Namespace) -> None:
    """Measure, print and save."""
    torch.manual_seed(0)
    precisions = PRECISIONS.items()
    result: dict[str, Any] = {
        "environment": environment(flags.arguments),
        "shape": {"heads": 12, "kv_heads": 2, "head_dim": 64, "batch": 1},
        "matrix_products_gflops": {
            name: _gflops(dtype, flags.rounds) for name, dtype in precisions
        },
        "attention": {name: _attention(dtype, flags.rounds) for name, dtype in precisions},
        "length": _lengths(flags.rounds, flags.longest),
        "layer": _layer(flags.rounds),
    }
    _print(result)
    save(flags.out, result)


def _gflops(dtype: torch.dtype, rounds: int) -> float:
    size = 2_048
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / median_seconds({"mm": lambda: a @ b}, rounds)["mm"] / 1e9


def _attention(dtype: torch.dtype, rounds: int) -> dict[str, float]:
    steps = {"nsa": _nsa_step(SEQ_LEN, dtype), "sdpa": _sdpa_step(SEQ_LEN, dtype)}
    seconds = median_seconds(steps, rounds)
    return {**seconds, "nsa_over_sdpa": seconds["nsa"] / seconds["sdpa"]}


def _lengths(rounds: int, longest: int) -> list[dict[str, float]]:
    """Microseconds per token at growing length."""
    lengths = [length for length in (SEQ_LEN, 4_096, 8_192, 16_384) if length <= longest]
    steps = {str(length): _nsa_step(length, torch.float32) for length in lengths}
    seconds = median_seconds(steps, max(1, rounds // 2))
    per_token = {length: seconds[str(length)] / length for length in lengths}
    return [
        {
            "seq_len": length,
            "us_per_token": per_token[length] * 1e6,
            "growth": per_token[length] / per_token[SEQ_LEN],
        }
        for length in lengths
    ]


def _layer(rounds: int) -> dict[str, dict[str, float]]:
    steps = {name: _layer_step(dtype) for name, dtype in PRECISIONS.items()}
    return {
        name: {"seconds": seconds, "times_faster": EARLIER_LAYER_SECONDS / seconds}
        for name, seconds in median_seconds(steps, rounds).items()
    }


def _nsa_step(seq_len: int, dtype: torch.dtype) -> Step:
    inputs = Inputs.random(SHAPE, 1, seq_len, NSASpec(), CPU, dtype)
    attention = partial(nsa_attention, spec=NSASpec(), backend="blockwise")
    return Implementation(attention, *inputs).step


def _sdpa_step(seq_len: int, dtype: torch.dtype) -> Step:
    inputs = Inputs.random(SHAPE, 1, seq_len, NSASpec(), CPU, dtype)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return Implementation(attention, inputs.q, inputs.k_win, inputs.v_win).step


def _layer_step(dtype: torch.dtype) -> Step:
    config = ModelConfig()
    block = Block(config).to(dtype)
    metadata = AttentionMetadata.build(config, SEQ_LEN, None, CPU)
    x = torch.randn(1, SEQ_LEN, config.width).to(dtype).requires_grad_()
    grad_output = torch.randn(1, SEQ_LEN, config.width).to(dtype)
    return lambda: block(x, metadata).backward(grad_output)


def _print(result: dict[str, Any]) -> None:
    env, gflops = result["environment"], result["matrix_products_gflops"]
    print(f"{env['processor']}, {env['threads']} threads; matrix products:", end=" ")
    print(", ".join(f"{name} {rate:.0f} GFLOP/s" for name, rate in gflops.items()))
    lines = [["", "ms", "compared with"]]
    for name, row in result["attention"].items():
        over = f"{row['nsa_over_sdpa']:.2f} times SDPA's {row['sdpa'] * 1e3:.0f} ms"
        lines.append([f"NSA T={SEQ_LEN} {name}", f"{row['nsa'] * 1e3:.0f}", over])
    for row in result["length"]:
        ms, growth = row["us_per_token"] * row["seq_len"] / 1e3, row["growth"]
        over = f"{growth:.2f} times the time per token at {SEQ_LEN}"
        lines.append([f"NSA T={row['seq_len']} fp32", f"{ms:.0f}", over])
    for name, row in result["layer"].items():
        over = f"{row['times_faster']:.1f} times as fast as the earlier system"
        lines.append([f"M7C layer {name}", f"{row['seconds'] * 1e3:.0f}", over])
    print_table(lines)
    cores = f"cores of {EARLIER_GFLOPS:.0f} GFLOP/s"
    print(f"Earlier system: {EARLIER_LAYER_SECONDS} s in fp32, on {cores}")
