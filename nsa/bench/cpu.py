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
from nsa.bench.results import print_figures
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
    seconds = {name: _seconds(dtype) for name, dtype in PRECISIONS.items()}
    long = {str(length): _nsa_step(length, torch.float32) for length in LENGTHS}
    per_token = {n: s / int(n) for n, s in median_seconds(long, ROUNDS // 2).items()}
    result: dict[str, Any] = {
        "shape": {"heads": SHAPE.heads, "kv_heads": SHAPE.kv_heads, "head_dim": SHAPE.key},
        "matrix_products_gflops": {
            name: 2 * SEQ_LEN**3 / one["product"] / 1e9 for name, one in seconds.items()
        },
        "attention": {
            name: {what: one[what] for what in ("nsa", "sdpa")}
            | {"nsa_over_sdpa": one["nsa"] / one["sdpa"]}
            for name, one in seconds.items()
        },
        "length": {
            n: {"us_per_token": s * 1e6, "growth": s / per_token[str(SEQ_LEN)]}
            for n, s in per_token.items()
        },
        "layer": {
            name: {
                "seconds": one["layer"],
                "times_faster": EARLIER_LAYER_SECONDS / one["layer"],
            }
            for name, one in seconds.items()
        },
    }
    print_figures(result)
    return result


def _seconds(dtype: torch.dtype) -> dict[str, float]:
    a, b = torch.randn(2, SEQ_LEN, SEQ_LEN).to(dtype)
    steps: dict[str, Step] = {
        "product": lambda: a @ b,
        "nsa": _nsa_step(SEQ_LEN, dtype),
        "sdpa": _sdpa_step(SEQ_LEN, dtype),
        "layer": _layer_step(dtype),
    }
    return median_seconds(steps, ROUNDS)


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
    return lambda: torch.autograd.backward(block(x, None, metadata), [grad_output, grad_output])
