"""`python -m nsa.bench cpu`: the blockwise backend beside PyTorch's attention, as ratios."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.bench.measure import environment, side_by_side
from nsa.model import ModelConfig
from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.block import Block
from nsa.ops import NSASpec, nsa_attention

# One layer of the system that this one replaces, with its MLP, forward and backward, measured on
# two cores at T = 2048, batch 1, fp32. Those cores did 180 GFLOP/s in fp32 matrix products.
EARLIER_LAYER_SECONDS = 10.5
EARLIER_GFLOPS = 180.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEADS, KV_HEADS, SIZE = 12, 2, 64


def run(rounds: int = 5, longest: int = 16_384) -> dict[str, Any]:
    """Measure everything, print a table as it goes, return the raw figures."""
    torch.manual_seed(0)
    result: dict[str, Any] = {
        "environment": environment(),
        "shape": {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": SIZE, "batch": 1},
        "matrix_products_gflops": {name: _gflops(dtype, rounds) for name, dtype in DTYPES.items()},
        "attention": _attention(rounds),
        "length": _length(rounds, longest),
        "layer": _layer(rounds),
    }
    _report(result)
    return result


def _attention(rounds: int) -> dict[str, dict[str, float]]:
    rows = {}
    for name, dtype in DTYPES.items():
        seconds = side_by_side(
            {"nsa": _nsa_step(2_048, dtype), "sdpa": _sdpa_step(2_048, dtype)}, rounds
        )
        rows[name] = {**seconds, "nsa_over_sdpa": seconds["nsa"] / seconds["sdpa"]}
    return rows


def _length(rounds: int, longest: int) -> list[dict[str, float]]:
    """Microseconds a token as T grows; the lengths take turns."""
    lengths = [length for length in (2_048, 4_096, 8_192, 16_384) if length <= longest]
    seconds = side_by_side(
        {str(length): _nsa_step(length, torch.float32) for length in lengths}, max(1, rounds // 2)
    )
    base = seconds["2048"] / 2_048
    return [
        {
            "seq_len": length,
            "us_per_token": seconds[str(length)] / length * 1e6,
            "growth": seconds[str(length)] / length / base,
        }
        for length in lengths
    ]


def _layer(rounds: int) -> dict[str, dict[str, float]]:
    steps = {name: _layer_step(dtype) for name, dtype in DTYPES.items()}
    seconds = side_by_side(steps, rounds)
    return {
        name: {"seconds": taken, "times_faster": EARLIER_LAYER_SECONDS / taken}
        for name, taken in seconds.items()
    }


def _gflops(dtype: torch.dtype, rounds: int) -> float:
    size = 2_048
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / side_by_side({"mm": lambda: a @ b}, rounds)["mm"] / 1e9


def _nsa_step(seq_len: int, dtype: torch.dtype) -> Callable[[], object]:
    spec = NSASpec()
    blocks = spec.compressed_len(seq_len)
    q = _random(seq_len, HEADS, dtype)
    k_cmp, v_cmp = (_random(blocks, KV_HEADS, dtype) for _ in range(2))
    k_sel, v_sel, k_win, v_win = (_random(seq_len, KV_HEADS, dtype) for _ in range(4))
    gates = torch.rand(1, seq_len, HEADS, 3).to(dtype).requires_grad_()
    into = torch.randn(1, seq_len, HEADS, SIZE).to(dtype)

    def step() -> None:
        o = nsa_attention(
            q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, spec, backend="blockwise"
        )
        o.backward(into)

    return step


def _sdpa_step(seq_len: int, dtype: torch.dtype) -> Callable[[], object]:
    q, k, v = (_random(seq_len, heads, dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    into = torch.randn(1, HEADS, seq_len, SIZE).to(dtype)

    def step() -> None:
        q_heads, k_heads, v_heads = (x.transpose(1, 2) for x in (q, k, v))
        F.scaled_dot_product_attention(
            q_heads, k_heads, v_heads, is_causal=True, enable_gqa=True
        ).backward(into)

    return step


def _layer_step(dtype: torch.dtype, seq_len: int = 2_048) -> Callable[[], object]:
    config = ModelConfig()
    block = Block(config).to(dtype)
    metadata = AttentionMetadata.build(config, seq_len, None, torch.device("cpu"))
    x = torch.randn(1, seq_len, config.width).to(dtype).requires_grad_()
    into = torch.randn(1, seq_len, config.width).to(dtype)

    def step() -> None:
        block(x, metadata).backward(into)

    return step


def _random(length: int, heads: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(1, length, heads, SIZE).to(dtype).requires_grad_()


def _report(result: dict[str, Any]) -> None:
    gflops = result["matrix_products_gflops"]
    print(f"{result['environment']['processor']}, {result['environment']['threads']} threads")
    print(f"matrix products      fp32 {gflops['fp32']:.0f}, bf16 {gflops['bf16']:.0f} GFLOP/s")
    for name, row in result["attention"].items():
        print(
            f"T=2048 {name}          NSA {row['nsa'] * 1e3:.0f} ms, SDPA causal "
            f"{row['sdpa'] * 1e3:.0f} ms: {row['nsa_over_sdpa']:.2f} times as long"
        )
    for row in result["length"]:
        print(
            f"T={row['seq_len']:<6} fp32        {row['us_per_token']:.0f} us a token, "
            f"{row['growth']:.2f} times that of 2048"
        )
    for name, row in result["layer"].items():
        print(
            f"M7C layer {name}       {row['seconds'] * 1e3:.0f} ms forward and backward: "
            f"{row['times_faster']:.1f} times as fast as the earlier system's "
            f"{EARLIER_LAYER_SECONDS} s (fp32, on cores of {EARLIER_GFLOPS:.0f} GFLOP/s)"
        )
