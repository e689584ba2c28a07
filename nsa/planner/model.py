"""Planner inputs `Model`, `BatchShape` and `Zero`, and the activation memory of a micro-batch.

Byte counts are sums over the tensors that a layer saves for its backward pass, one term each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from nsa.constants import BRANCHES
from nsa.spec import NSASpec

if TYPE_CHECKING:
    from nsa.model.config import ModelConfig

# Norms, RoPE and SwiGLU, of the time of the layers' forward pass. Estimated from their bytes
# (python -m nsa.bench traffic), not measured.
ELEMENTWISE_FRACTION = 0.25


@dataclass(frozen=True, eq=False)
class Model:
    """A model's settings, and the sizes that follow from them."""

    config: ModelConfig
    seq_len: int  # over which FLOPs are averaged
    weight_bytes: int = 2  # 2: bf16 or fp16; 4: fp32

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each parameter."""
        from nsa.model.count import parameter_sizes

        return parameter_sizes(self.config)

    @cached_property
    def parameters(self) -> int:
        return sum(self.sizes)

    @property
    def embedding(self) -> int:
        """Parameters of the tied embedding and head; their gradient is complete last."""
        return self.config.vocab_size * self.config.width

    @property
    def layer(self) -> int:
        """Parameters per layer (the final norm is spread over all)."""
        return (self.parameters - self.embedding) // self.config.layers

    @property
    def spec(self) -> NSASpec | None:
        """The sparse pattern; None for dense attention."""
        attention = self.config.attention
        return attention.spec if attention.kind == "nsa" else None

    @property
    def branches(self) -> tuple[str, ...]:
        return () if self.spec is None else self.config.attention.branch_names

    @property
    def heads_sizes(self) -> tuple[int, int, int, int]:
        """Elements per token of all heads' queries, outputs, keys and values."""
        config = self.config
        heads, kv_heads, key = config.heads, config.kv_heads, config.head_dim
        value = config.value_dim or key
        return heads * key, heads * value, kv_heads * key, kv_heads * value

    @property
    def kv_sets(self) -> int:
        """Number of key/value projections: one, or one per branch."""
        return 1 if self.config.attention.shared_kv else max(1, len(self.branches))

    @property
    def exchanged(self) -> int:
        """Elements per token of attention's inputs, gates included, and output."""
        query, output, key, value = self.heads_sizes
        gates = len(self.branches) * self.config.heads
        return query + gates + self.kv_sets * (key + value) + output

    @cached_property
    def flops(self) -> dict[str, float]:
        """FLOPs per token: of a step, and of these the layers' forward pass."""
        from nsa.model.count import flops_per_token

        step = flops_per_token(self.config, self.seq_len)
        return {"step": step, "layers": (step - 6 * self.embedding) / 3}


@dataclass(frozen=True)
class BatchShape:
    """One rank's work per optimizer step."""

    seq_len: int
    micro_batch: int
    accumulation: int
    checkpointing: str
    ranks_per_sequence: int = 1

    @property
    def tokens(self) -> int:
        """This rank's tokens per micro-batch; in attention it has all tokens and fewer heads."""
        return self.seq_len * self.micro_batch // self.ranks_per_sequence


@dataclass(frozen=True)
class Zero:
    """The ZeRO settings that memory and traffic depend on."""

    stage: int
    reduce_bytes: int = 2  # bytes per gradient element in a reduction
    accumulate_bytes: int = 2  # bytes per accumulated gradient element
    bucket: int = 0  # elements; 0: one collective after the backward pass
    overlap: bool = False  # buckets are reduced during the backward pass
    prefetch: int = 0  # stage 3: prefetched parameters
    persistent: int = 0  # stage 3: parameters that are not sharded
    persistent_tensors: int = 0  # stage 3: tensors that are not sharded
    gathers: int = 1  # stage 3: all-gathers of the weights per micro-batch
    muon: bool = False  # one moment per matrix instead of two
    offload: bool = False  # to the CPU or NVMe, which no figure accounts for

    @property
    def bf16_optimizer(self) -> bool:
        """Whether each rank keeps all gradients in fp32 (BF16_Optimizer)."""
        return self.stage == 1 and self.accumulate_bytes == 4 and self.bucket == 0


def flops_per_token(model: Model, checkpointing: str) -> float:
    """Return the FLOPs per token that take as long as a step, including recomputation.

    `selective` recomputes no product. What it does recompute is memory traffic.
    """
    fraction = {"none": 0.0, "selective": ELEMENTWISE_FRACTION}.get(checkpointing, 1.0)
    return model.flops["step"] + fraction * model.flops["layers"]


def exchange_bytes(model: Model, batch: BatchShape) -> float:
    """Return the bytes that a rank sends per micro-batch for sequence parallelism.

    Recomputation repeats the exchanges, except with `selective`, which keeps received tensors.
    """
    sent = 1 - 1 / batch.ranks_per_sequence  # a rank keeps its part
    passes = _passes(batch) * model.config.layers
    return passes * sent * batch.tokens * model.exchanged * model.weight_bytes


def exchange_count(model: Model, batch: BatchShape) -> int:
    """Return the number of exchanges per micro-batch, including the loss's all-reduce."""
    return 2 * model.config.layers * _passes(batch) + 1 if batch.ranks_per_sequence > 1 else 0


def _passes(batch: BatchShape) -> int:
    return 2 if batch.checkpointing in ("none", "selective") else 3


@dataclass(frozen=True)
class Activations:
    """Bytes that one micro-batch keeps for, or allocates during, its backward pass."""

    kept_layer: int  # per layer, from its forward to its backward pass
    recomputed: int  # of one layer
    shared: int  # RoPE tables, block grid, tokens
    final: int  # last norm and its output
    loss: int  # logits and gradients of the head, during the loss
    in_layer: int  # gradients inside one layer's backward pass
    in_norm: int  # gradients inside the last norm's backward pass
    in_head: int  # the head's gradient, and its scaled copy


def activations(model: Model, batch: BatchShape, *, fused: bool = True) -> Activations:
    """Count activations. Norms save their input and, if not `fused` (CPU), a number per token."""
    tokens, size, width = batch.tokens, model.weight_bytes, model.config.width
    stream, hidden = size * width * tokens, size * model.config.mlp_width * tokens
    norm = stream if fused else stream + 4 * tokens
    weights = 2 * size * width * model.config.mlp_width  # gate and up side by side
    layer = 2 * (norm + stream) + 3 * hidden + weights + _attention(model, batch, fused)
    kept, reused = layer, 0
    if batch.checkpointing != "none":
        # The residual stream, and what is still to be added to it: nothing in the first layer.
        kept = (2 * model.config.layers - 1) * stream // model.config.layers
    if batch.checkpointing == "selective":  # the latter is a saved product of the layer before
        kept = stream + _selective_outputs(model, batch, fused)
        reused = _selective_reused(model, batch, fused)
    copies = 2 * size if fused or size == 4 else 2 * size + 2 * 4  # a CPU uses fp32
    rope = 4 * model.config.head_dim * batch.seq_len
    grid = 8 * model.spec.block_len * _blocks(model, batch.seq_len) if model.spec else 0
    return Activations(
        kept_layer=kept,
        recomputed=0 if batch.checkpointing == "none" else layer - reused,
        shared=8 * tokens + rope + grid,
        final=norm + stream,
        loss=_loss(model, tokens, fused),
        in_layer=(2 if fused else 3) * hidden + 2 * stream,
        in_norm=2 * stream if fused else 3 * 4 * width * tokens,
        in_head=copies * model.embedding,
    )


def _attention(model: Model, batch: BatchShape, fused: bool) -> int:
    """Return the bytes that attention saves: queries, keys, values, gates, outputs, φ."""
    query, output, key, value = model.heads_sizes
    saved = query + len(model.branches) * model.config.heads  # and gates
    if model.spec is not None:
        saved += output  # the gated sum; dense attention's only output is counted below
    # Keys and values of the branches that read tokens; the compressed branch reads blocks.
    copies = len({"sel", "win"}.intersection(model.branches)) if model.branches else 1
    if model.config.attention.shared_kv:
        copies = min(copies, 1)
    elements = batch.tokens * (saved + copies * (key + value))
    elements += model.config.width * (model.exchanged - output)  # projections side by side
    if model.spec is not None and "cmp" in model.branches:
        compressed = key + value
        if model.config.attention.compressor == "mlp":
            hidden = model.config.attention.compressor_hidden or model.config.head_dim
            compressed += model.spec.block_len * (key + value)
            compressed += 4 * hidden * model.config.kv_heads
        blocks = _blocks(model, batch.seq_len) * batch.micro_batch
        elements += blocks * compressed // batch.ranks_per_sequence
    return model.weight_bytes * elements + _branch_outputs(model, batch, fused)


def _branch_outputs(model: Model, batch: BatchShape, fused: bool) -> int:
    """Return the bytes of the branches' outputs, their fp32 lse, and the selected blocks."""
    from nsa.ops.triton.configs import one_tile

    config, output = model.config, model.weight_bytes * model.heads_sizes[1]
    per_token = max(1, len(model.branches)) * (output + 4 * config.heads)
    head = max(config.head_dim, config.value_dim or 0)
    if _mixes(model, fused) and one_tile(_blocks(model, batch.seq_len), head, model.weight_bytes):
        per_token -= output  # the compressed branch's
    if model.spec is not None and "sel" in model.branches:
        per_token += 4 * model.config.kv_heads * model.spec.select_top
    return per_token * batch.tokens


def _selective_outputs(model: Model, batch: BatchShape, fused: bool) -> int:
    """Return the bytes that `selective` saves per layer: outputs of products and attention."""
    config, (_, output, key, value) = model.config, model.heads_sizes
    elements = model.exchanged - output + 2 * config.width + 2 * config.mlp_width
    if batch.ranks_per_sequence > 1:  # results of both exchanges
        elements += model.exchanged
    if _mixes(model, fused):
        elements += output
    lse = 0
    if "sel" in model.branches and "cmp" not in model.branches:
        elements += output  # compressed attention, run for its lse
        lse = 4 * config.heads
    total = (model.weight_bytes * elements + lse) * batch.tokens + _branch_outputs(
        model, batch, fused
    )
    if "cmp" in model.branches and config.attention.compressor == "mlp":
        hidden = config.attention.compressor_hidden or config.head_dim
        blocks = _blocks(model, batch.seq_len) * batch.micro_batch // batch.ranks_per_sequence
        total += model.weight_bytes * blocks * (2 * config.kv_heads * hidden + key + value)
    return total


def _selective_reused(model: Model, batch: BatchShape, fused: bool) -> int:
    """Return the bytes of these outputs that autograd saves too: they are not recomputed."""
    output = model.heads_sizes[1] if _mixes(model, fused) else 0
    elements = 2 * model.config.mlp_width + output
    return model.weight_bytes * elements * batch.tokens + _branch_outputs(model, batch, fused)


def _mixes(model: Model, fused: bool) -> bool:
    """Return whether attention's op returns the gated sum besides the branches' outputs."""
    return fused and len(model.branches) == len(BRANCHES)


def _loss(model: Model, tokens: int, fused: bool) -> int:
    """Return the bytes of one chunk's logits and the head's gradient.

    Of two chunks, the second's part is overwritten by the sum; the sum of more chunks is fp32.
    """
    from nsa.model.loss import CHUNK_LOGITS, CHUNK_LOGITS_CPU
    from nsa.ops.cross_entropy import SOFTMAX_LOGITS

    vocab_size, size = model.config.vocab_size, model.weight_bytes
    chunks = -(-tokens * vocab_size // (CHUNK_LOGITS if fused else CHUNK_LOGITS_CPU))
    logits = -(-tokens // chunks) * vocab_size
    parts = {1: size, 2: 2 * size}.get(chunks, 2 * size + 4)
    gradient = parts * model.embedding
    rows = 0 if fused else min(SOFTMAX_LOGITS, logits)
    softmax = 4 * rows * (2 + (logits > rows))  # converted, computed; earlier rows remain
    return size * (logits + model.config.width * tokens) + max(gradient, softmax)


def _blocks(model: Model, seq_len: int) -> int:
    return model.spec.compressed_len(seq_len) if model.spec else 0
