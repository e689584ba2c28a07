"""The five activation-checkpointing modes. Each transformer block is one checkpoint segment."""

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

# A block's inputs and outputs: x, delta and, if configured, the selector loss.
Stream = tuple[Tensor, ...]
Segment = Callable[..., Stream]

# "selective" saves the outputs of these ops: matrix products, attention outputs, lse and block
# indices, which hold nearly all FLOPs of a forward pass. Norms, RoPE, pooling and SwiGLU are cheap
# to recompute. Listed by name: a backend that is not imported registers no ops.
SAVED_OPS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "nsa::blockwise_attention",
    "nsa::blockwise_select_blocks",
    "nsa::selector_loss",
    "nsa::triton_band",
    "nsa::triton_select",
    "nsa::triton_selected",
    "nsa::triton_selector_loss",
    "nsa::triton_gated",
    "nsa::exchange",  # sequence parallelism: no second all-to-all
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}


def checkpoint_function(mode: str) -> Callable[..., Stream]:
    """Return the function that runs a segment on its inputs under this mode.

    The forward pass draws no random numbers, so no generator state is saved for recomputation.
    """
    if mode == "auto":
        raise ValueError(
            "model.activation_checkpointing = 'auto': only a run resolves it, from its GPU's "
            "memory; set it to none or to another mode"
        )
    if mode == "none":
        return lambda segment, *stream: segment(*stream)
    if mode == "deepspeed":
        import deepspeed  # takes seconds to import

        return deepspeed.checkpointing.checkpoint
    run = partial(checkpoint, use_reentrant=mode == "reentrant", preserve_rng_state=False)
    if mode == "selective":
        return partial(run, context_fn=partial(create_selective_checkpoint_contexts, _policy))
    return run


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op.name() in SAVED_OPS
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
