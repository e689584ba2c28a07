"""Kernel check of M7C on a GPU, decoding included: python -m tests.ops.m7c_kernels

It needs only torch and triton. A run checks the operations of its own model before step 1.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa.model import kernel_check
from nsa.model.config import INDEXED, AttentionConfig, ModelConfig
from nsa.model.kernel_check import (
    KernelResult,
    Operation,
    check_kernels,
    lengths,
    problems_of,
    random_tensors,
)
from nsa.ops.decode import decode_attention
from nsa.ops.inputs import DecodeInputs


def decoding(config: ModelConfig, device: torch.device) -> Operation:
    """Return the attention of a new token in a long sequence, and in one shorter than a block."""
    random, spec = random_tensors(device), config.attention.spec
    longest = lengths(config, False, 0)[0]
    sizes = config.head_dim, config.value_dim or config.head_dim
    buffers = [
        random(2, length, config.kv_heads, size)
        for length in (spec.compressed_len(longest), longest, min(spec.window, longest))
        for size in sizes
    ]
    q, gates = random(2, config.heads, sizes[0]), random(2, config.heads, 3).abs()
    at = torch.tensor([longest, spec.block_len - 1], device=device)
    if config.attention.has_index:
        k_index, _, k, v = buffers[:4]
        ranking = random(2, config.kv_heads, sizes[0])
        inputs: tuple[Tensor | None, ...] = q, ranking, k_index, None, k, v, None, None, None, at
    else:
        inputs = q, None, *buffers, gates, at

    @torch.no_grad()
    def attend(*tensors: Any, backend: str) -> Tensor:
        rest = spec, config.attention.branches, config.head_dim**-0.5
        return decode_attention(DecodeInputs(*tensors, *rest), backend)

    return Operation("decode_attention", inputs, attend)


def table(results: Sequence[KernelResult]) -> list[str]:
    """Return a line per operation."""
    form = "{:<16} {:>8} {:>8} {:>8}  {}"
    rows = [form.format("operation", "error", "allowed", "seconds", "")]
    for x in results:
        figures = f"{x.error:.1e}", f"{x.allowed:.1e}", f"{x.seconds:.1f}"
        rows.append(form.format(x.operation, *figures, x.problem or "ok"))
    return rows


def check_m7c(device: torch.device | None = None) -> list[KernelResult]:
    """Check the kernels of M7C with each φ of its recipes, in bf16, on a device or this GPU.

    Return nothing without either.
    """
    if device is None:
        if not torch.cuda.is_available():
            return []
        device = torch.device("cuda", torch.cuda.current_device())
    pool = ModelConfig(attention=AttentionConfig(compressor="pool", selector_loss=1.0))
    mean = ModelConfig(attention=AttentionConfig())
    indexed = replace(pool, attention=replace(pool.attention, branches="sel", spec=INDEXED))
    models = (pool, False), (pool, True), (mean, False), (indexed, False), (indexed, True)
    decoded = [
        kernel_check.check(decoding(model, device), torch.bfloat16) for model in (pool, indexed)
    ]
    return [
        result
        for model, packed in models
        for result in check_kernels(model, torch.bfloat16, device, packed)
    ] + [result for result in decoded if result is not None]


if __name__ == "__main__":  # where only torch and triton are installed
    checked = check_m7c()
    print(*table(checked), "" if checked else "no GPU here", sep="\n")
    sys.exit(bool(problems_of([checked])))
