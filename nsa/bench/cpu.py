"""`python -m nsa.bench cpu`: attention and a layer of M7C on this CPU, forward and backward.

Attention of the blockwise backend relative to PyTorch's dense attention, its time per token at
growing length, and the layer relative to that of the system that this one replaces.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from nsa.bench.baselines import sdpa
from nsa.bench.implementations import Implementation, Inputs
from nsa.bench.options import SHAPES
from nsa.bench.results import print_figures
from nsa.bench.timing import Step, median_seconds
from nsa.dtypes import DTYPES
from nsa.model import ModelConfig
from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.block import Block
from nsa.ops import NSASpec, nsa_attention

# One layer of the system that this one replaces, with its MLP, forward and backward, measured on
# two cores at T = 2048, batch 1, fp32. Those cores reached 180 GFLOP/s in fp32 matrix products.
EARLIER_LAYER_SECONDS = 10.5
PRECISIONS = ("fp32", "bf16")
SHAPE, CPU = SHAPES["m7c"], torch.device("cpu")
SEQ_LEN = 2_048
LENGTHS = (SEQ_LEN, 4_096, 8_192, 16_384)
ROUNDS = 5


def run(_: object) -> dict[str, Any]:
    """Measure and print."""
    steps = {str(length): _nsa_step(_inputs(length, torch.float32)) for length in LENGTHS}
    per_token = {n: s / int(n) for n, s in median_seconds(steps, ROUNDS // 2).items()}
    result: dict[str, Any] = {
        "shape": {"heads": SHAPE.heads, "kv_heads": SHAPE.kv_heads, "head_dim": SHAPE.key},
        "matrix_products_gflops": {},
        "attention": {},
        "length": {
            n: {"us_per_token": s * 1e6, "growth": s / per_token[str(LENGTHS[0])]}
            for n, s in per_token.items()
        },
        "layer": {},
    }
    for name in PRECISIONS:
        x, (a, b) = _inputs(SEQ_LEN, DTYPES[name]), torch.randn(2, SEQ_LEN, SEQ_LEN)
        steps = {
            "product": partial(torch.matmul, a.to(x.q.dtype), b.to(x.q.dtype)),
            "nsa": _nsa_step(x),
            "sdpa": sdpa("sdpa-flash", x, SHAPE).step,
            "layer": _layer_step(x.q.dtype),
        }
        product, nsa, dense, layer = median_seconds(steps, ROUNDS).values()
        result["matrix_products_gflops"][name] = 2 * SEQ_LEN**3 / product / 1e9
        result["attention"][name] = {"nsa": nsa, "sdpa": dense, "nsa_over_sdpa": nsa / dense}
        faster = EARLIER_LAYER_SECONDS / layer
        result["layer"][name] = {"seconds": layer, "times_faster": faster}
    print_figures(result)
    return result


def _inputs(seq_len: int, dtype: torch.dtype) -> Inputs:
    return Inputs.random(SHAPE, 1, seq_len, NSASpec(), CPU, dtype)


def _nsa_step(inputs: Inputs) -> Step:
    attention = partial(nsa_attention, spec=NSASpec(), backend="blockwise")
    return Implementation(attention, *inputs).step


def _layer_step(dtype: torch.dtype) -> Step:
    config = ModelConfig()
    block = Block(config).to(dtype)
    metadata = AttentionMetadata.build(config, SEQ_LEN, None, CPU)
    x, grad_output = torch.randn(2, 1, SEQ_LEN, config.width).to(dtype)
    x.requires_grad_()
    return lambda: torch.autograd.backward(
        block(x, None, metadata=metadata), [grad_output, grad_output]
    )
