"""The five ways of activation checkpointing; a segment is one block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Run = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]

# Small and dear: attention outputs, lse and block indices. All else is large and cheap. By name,
# because an operation of a backend that this machine never imports is not registered.
KEPT = {
    "nsa::blockwise_attention",
    "nsa::blockwise_select_blocks",
    "nsa::triton_band",
    "nsa::triton_select",
    "nsa::triton_selected",
    "nsa::triton_gated",
    "nsa::exchange",  # nothing is sent twice between ranks that share a sequence
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}


def segment_runner(mode: str) -> Run:
    """How a segment is run in training: a function of (segment, its input).

    The forward pass draws no random numbers, so no generator state is kept for recomputation.
    """
    if mode == "none":
        return _call
    if mode == "reentrant":
        return partial(checkpoint, use_reentrant=True, preserve_rng_state=False)
    if mode == "non_reentrant":
        return partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if mode == "selective":
        return partial(
            checkpoint,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(create_selective_checkpoint_contexts, _keep),
        )
    assert mode == "deepspeed"
    import deepspeed  # only this mode needs it; importing it takes seconds

    return deepspeed.checkpointing.checkpoint


def _call(segment: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return segment(x)


def _keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op.name() in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
