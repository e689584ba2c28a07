"""`python -m nsa.bench cpu`: the blockwise backend against PyTorch's attention, as ratios."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.bench.implementations import Implementation
from nsa.bench.inputs import Inputs
from nsa.bench.measure import Step, median_seconds
from nsa.bench.options import SHAPES
from nsa.bench.results import print_table
from nsa.dtypes import DTYPES
from nsa.model import ModelConfig
from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.block import Block
from nsa.ops import NSASpec, nsa_attention

# One layer of the system that this one replaces, with its MLP, forward and backward, measured on
# two cores at T = 2048, batch 1, fp32. Those cores reached 180 GFLOP/s in fp32 matrix products.
EARLIER_LAYER_SECONDS = 10.5
PRECISIONS = {name: DTYPES[name] for name in ("fp32", "bf16")}
SHAPE, SEQ_LEN, CPU = SHAPES["m7c"], 2_048, torch.device("cpu")
LENGTHS = (SEQ_LEN, 4_096, 8_192, 16_384)
ROUNDS = 5


def run(_: object) -> dict[str, Any]:
    """Measure and print."""
    torch.manual_seed(0)
    result: dict[str, Any] = {
        "shape": {"heads": SHAPE.heads, "kv_heads": SHAPE.kv_heads, "head_dim": SHAPE.key},
        "matrix_products_gflops": {name: _gflops(dtype) for name, dtype in PRECISIONS.items()},
        "attention": {name: _attention(dtype) for name, dtype in PRECISIONS.items()},
        "length": _lengths(),
        "layer": _layer(),
    }
    _print(result)
    return result


def _gflops(dtype: torch.dtype) -> float:
    size = 2_048
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / median_seconds({"mm": lambda: a @ b}, ROUNDS)["mm"] / 1e9


def _attention(dtype: torch.dtype) -> dict[str, float]:
    steps = {"nsa": _nsa_step(SEQ_LEN, dtype), "sdpa": _sdpa_step(SEQ_LEN, dtype)}
    seconds = median_seconds(steps, ROUNDS)
    return {**seconds, "nsa_over_sdpa": seconds["nsa"] / seconds["sdpa"]}


def _lengths() -> list[dict[str, float]]:
    """Microseconds per token at growing length."""
    steps = {str(length): _nsa_step(length, torch.float32) for length in LENGTHS}
    seconds = median_seconds(steps, ROUNDS // 2)
    per_token = {length: seconds[str(length)] / length for length in LENGTHS}
    return [
        {
            "seq_len": length,
            "us_per_token": per_token[length] * 1e6,
            "growth": per_token[length] / per_token[SEQ_LEN],
        }
        for length in LENGTHS
    ]


def _layer() -> dict[str, dict[str, float]]:
    steps = {name: _layer_step(dtype) for name, dtype in PRECISIONS.items()}
    return {
        name: {"seconds": seconds, "times_faster": EARLIER_LAYER_SECONDS / seconds}
        for name, seconds in median_seconds(steps, ROUNDS).items()
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
    rates = result["matrix_products_gflops"].items()
    products = ", ".join(f"{name} {rate:.0f} GFLOP/s" for name, rate in rates)
    print(f"{torch.get_num_threads()} threads; matrix products: {products}")
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
    print(f"earlier system: {EARLIER_LAYER_SECONDS} s in fp32, on cores of 180 GFLOP/s")
