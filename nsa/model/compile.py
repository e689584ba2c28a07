"""torch.compile of transformer blocks, in place: parameters and modules keep their names.

A block is compiled inside its checkpoint segment, so every recomputation calls compiled code. All
blocks but the first share one graph per shape and mode (with gradients, without). Packed
documents change the lengths of cu_seqlens and of the compressed blocks; from the second batch on
these lengths are dynamic, and later batches do not compile again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from nsa.model.attention import NSAttention
from nsa.model.block import Block

# Inductor's disk cache does not include the strides of custom ops' outputs in its key: after a
# change of strides, an old entry computed wrong gradients without an error. So each run compiles
# again.
OPTIONS = {"fx_graph_cache": False}


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each Block of `model` at its first call; a graph break is an error."""
    # Graphs differ by: first block or not, gradients or not, fixed or dynamic lengths, training or
    # evaluation.
    torch._dynamo.config.recompile_limit = 32  # the default is 8, and more is an error
    options = OPTIONS if backend == "inductor" else None
    for block in model.modules():
        if isinstance(block, Block):
            if isinstance(block.attention, NSAttention):
                block.attention.compiled = True
            block.compile(fullgraph=True, backend=backend, options=options)
            compiled = block._compiled_call_impl
            assert compiled is not None
            block._compiled_call_impl = partial(_call, block, compiled)


def _call(block: Block, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the compiled block, then the attention's observer, which cannot be compiled."""
    result = compiled(*args, **kwargs)
    if isinstance(block.attention, NSAttention):
        block.attention.call_observer()
    return result
