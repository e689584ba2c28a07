"""Activation memory of a micro-batch on a GPU, with a term for each tensor that a layer saves."""

from __future__ import annotations

from dataclasses import dataclass

from nsa.constants import BRANCHES
from nsa.planner.inputs import BatchShape, Model


@dataclass(frozen=True)
class Activations:
    """Bytes that one micro-batch keeps for, or allocates during, its backward pass."""

    kept_layer: int  # per layer, from its forward to its backward pass
    recomputed: int  # of one layer
    shared: int  # RoPE tables, block grid, tokens
    final: int  # last norm and its output
    loss: int  # logits and gradients of the head, during the loss
    in_layer: int  # gradients inside one layer's backward pass


def activations(model: Model, batch: BatchShape) -> Activations:
    """Count activations, with the Triton kernels."""
    tokens, size, width = batch.tokens, model.weight_bytes, model.config.width
    stream, hidden = size * width * tokens, size * model.config.mlp_width * tokens
    weights = 2 * size * width * model.config.mlp_width  # gate and up side by side
    layer = 4 * stream + 3 * hidden + weights + _attention(model, batch)  # norms save their input
    kept, reused = layer, 0
    if batch.checkpointing != "none":
        # Two tensors per layer: the residual stream, and the previous layer's output, which is
        # added to it next. The first layer has no previous one.
        kept = (2 * model.config.layers - 1) * stream // model.config.layers
    if batch.checkpointing == "selective":  # saves that output anyway
        kept = stream + _selective_outputs(model, batch)
        reused = _selective_reused(model, batch)
    rope = 4 * model.config.head_dim * batch.seq_len
    grid = 8 * model.spec.block_len * _blocks(model, batch.seq_len) if model.spec else 0
    return Activations(
        kept_layer=kept,
        recomputed=0 if batch.checkpointing == "none" else layer - reused,
        shared=8 * tokens + rope + grid,
        final=2 * stream,
        loss=_loss(model, tokens),
        in_layer=2 * hidden + 2 * stream,
    )


def _attention(model: Model, batch: BatchShape) -> int:
    """Return the bytes that attention saves: queries, keys, values, gates, outputs, φ."""
    query, output, key, value = model.head_sizes
    saved = query + len(model.branches) * model.config.heads  # and gates
    if model.spec is not None:
        saved += output  # the gated sum; dense attention's only output is counted below
    # Keys and values of the branches that read tokens; those of compressed blocks are added below.
    copies = len({"sel", "win"}.intersection(model.branches)) if model.branches else 1
    elements = batch.tokens * (saved + copies * (key + value))
    elements += model.config.width * (model.attention_size - output)  # projections side by side
    if model.spec is not None and "cmp" in model.branches:
        compressed = key + value
        if model.config.attention.compressor == "mlp":
            hidden = model.config.head_dim
            compressed += model.spec.block_len * (key + value)
            compressed += 4 * hidden * model.config.kv_heads
        elif model.config.attention.compressor == "pool":
            elements += batch.tokens * (key + value)  # the first copy, before RoPE
            # In fp32: means before scale and RoPE, and the softmax's lse.
            compressed += (key + value) * 2 * 4 // model.weight_bytes
        blocks = _blocks(model, batch.seq_len) * batch.micro_batch
        elements += blocks * compressed // batch.ranks_per_sequence
    return model.weight_bytes * elements + _branch_outputs(model, batch)


def _branch_outputs(model: Model, batch: BatchShape) -> int:
    """Return the bytes of the branches' outputs, their fp32 lse, and the selected blocks."""
    from nsa.ops.triton.configs import one_tile

    config, output = model.config, model.weight_bytes * model.head_sizes[1]
    per_token = max(1, len(model.branches)) * (output + 4 * config.heads)
    head = max(config.head_dim, config.value_dim or 0)
    blocks = _blocks(model, batch.seq_len)
    if _returns_gated_sum(model) and one_tile(blocks, head, model.weight_bytes):
        per_token -= output  # the compressed branch's, which one tile computes again
    if model.spec is not None and "sel" in model.branches:
        per_token += 4 * model.config.kv_heads * model.spec.select_top
    return per_token * batch.tokens


def _selective_outputs(model: Model, batch: BatchShape) -> int:
    """Return the bytes that `selective` saves per layer: outputs of products and attention."""
    config, (_, output, key, value) = model.config, model.head_sizes
    elements = model.attention_size - output + 2 * config.width + 2 * config.mlp_width
    if batch.ranks_per_sequence > 1:  # results of both exchanges
        elements += model.attention_size
    if _returns_gated_sum(model):
        elements += output
    lse = 0
    if "sel" in model.branches and "cmp" not in model.branches:
        elements += output  # compressed attention, run for its lse
        lse = 4 * config.heads
    total = (model.weight_bytes * elements + lse) * batch.tokens + _branch_outputs(model, batch)
    if "cmp" in model.branches and config.attention.compressor == "mlp":
        hidden = config.head_dim
        blocks = _blocks(model, batch.seq_len) * batch.micro_batch // batch.ranks_per_sequence
        total += model.weight_bytes * blocks * (2 * config.kv_heads * hidden + key + value)
    return total


def _selective_reused(model: Model, batch: BatchShape) -> int:
    """Return the bytes of those outputs that the backward pass reads: not recomputed."""
    output = model.head_sizes[1] if _returns_gated_sum(model) else 0
    elements = 2 * model.config.mlp_width + output
    return model.weight_bytes * elements * batch.tokens + _branch_outputs(model, batch)


def _returns_gated_sum(model: Model) -> bool:
    """Return whether attention's op returns the gated sum besides the branches' outputs."""
    return len(model.branches) == len(BRANCHES)


def _loss(model: Model, tokens: int) -> int:
    """Return the bytes of one chunk's logits and the head's gradient.

    A second chunk's gradient needs a tensor of its own; more chunks are summed in fp32.
    Distillation follows: it holds both losses' gradients, and both models' logits of few tokens.
    """
    from nsa.model.distillation import LOG_PROBABILITIES
    from nsa.model.loss import CHUNK_LOGITS

    vocab_size, size = model.config.vocab_size, model.weight_bytes
    chunks = -(-tokens * vocab_size // CHUNK_LOGITS)
    logits = -(-tokens // chunks) * vocab_size
    parts = {1: size, 2: 2 * size}.get(chunks, 2 * size + 4)
    loss = size * (logits + model.config.width * tokens) + parts * model.embedding
    if model.teacher is None:
        return loss
    gradients = 2 * size * (model.config.width * tokens + model.embedding)
    part = (3 * size + 4 * 4) * logits // LOG_PROBABILITIES
    return size * model.teacher.width * tokens + max(loss, gradients + part)


def _blocks(model: Model, seq_len: int) -> int:
    return model.spec.compressed_len(seq_len) if model.spec else 0
