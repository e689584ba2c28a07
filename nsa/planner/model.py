"""Planner inputs `Model` and `BatchShape`, and the activation memory of a micro-batch.

Byte counts are sums over the tensors that a layer saves for its backward pass, one term each.
"""

from __future__ import annotations

from dataclasses import dataclass

from nsa.constants import BRANCHES
from nsa.spec import NSASpec


@dataclass(frozen=True)
class Model:
    """Model sizes that memory, traffic and time depend on."""

    parameters: int
    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    mlp_width: int
    spec: NSASpec | None  # None: dense attention
    branches: tuple[str, ...] = BRANCHES
    shared_kv: bool = False
    compressor_hidden: int | None = None  # hidden width of an mlp φ; None: mean
    weight_bytes: int = 2  # 2: bf16 or fp16; 4: fp32
    flops: float = 0.0  # forward and backward per token, at the batch's sequence length
    layers_flops: float = 0.0  # of these, the layers' forward pass
    attention_flops: float = 0.0  # of these, scores and weighted values
    # Constants of nsa/model/loss.py:
    chunk_logits: int = 0  # logits per chunk of the loss
    softmax_logits: int = 0  # fp32 logits per softmax on a GPU
    softmax_logits_cpu: int = 0  # the same on a CPU

    @property
    def embedding(self) -> int:
        """Parameters of the tied embedding and head; their gradient is complete last."""
        return self.vocab_size * self.width

    @property
    def layer(self) -> int:
        """Parameters per layer (the final norm is spread over all)."""
        return (self.parameters - self.embedding) // self.layers

    @property
    def kv_sets(self) -> int:
        """Number of key/value projections: one, or one per branch."""
        return 1 if self.spec is None or self.shared_kv else len(self.branches)

    @property
    def gates(self) -> int:
        return 0 if self.spec is None else len(self.branches) * self.heads

    @property
    def attention_inputs(self) -> int:
        """Elements per token: queries, keys, values and gates."""
        queries = self.heads * self.head_dim + self.gates
        return queries + self.kv_sets * self.kv_heads * (self.head_dim + self.value_dim)


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


def flops_per_token(model: Model, checkpointing: str) -> float:
    """Return the executed FLOPs per token, including recomputation."""
    recomputed = 0.0 if checkpointing == "none" else model.layers_flops
    if checkpointing == "selective":
        recomputed -= model.attention_flops
    return model.flops + recomputed


def exchange_bytes(model: Model, batch: BatchShape) -> float:
    """Return the bytes that a rank sends per micro-batch for sequence parallelism.

    Recomputation repeats the exchanges, except with `selective`, which keeps received tensors.
    """
    elements = model.attention_inputs + model.heads * model.value_dim
    sent = 1 - 1 / batch.ranks_per_sequence  # a rank keeps its part
    passes = _passes(batch) * model.layers
    return passes * sent * batch.tokens * elements * model.weight_bytes


def exchange_count(model: Model, batch: BatchShape) -> int:
    """Return the number of exchanges per micro-batch, including the loss's all-reduce."""
    return 2 * model.layers * _passes(batch) + 1 if batch.ranks_per_sequence > 1 else 0


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
    """Count activations; `fused` norms (GPU) save their input, PyTorch's (CPU) two fp32 copies."""
    tokens, size = batch.tokens, model.weight_bytes
    stream, hidden = size * model.width * tokens, size * model.mlp_width * tokens
    norm = (stream if fused else 2 * 4 * model.width * tokens) + 4 * tokens
    layer = 2 * (norm + stream) + 4 * hidden + _attention(model, batch)
    selective = batch.checkpointing == "selective"
    outputs = _branch_outputs(model, batch) if selective else 0
    extra = _selective_extra(model, batch) if selective else 0
    already = stream if fused or size == 4 else 0  # the first norm saves the layer's input
    copies = 2 * size if fused or size == 4 else 2 * size + 2 * 4  # a CPU uses fp32
    rope = 4 * model.head_dim * batch.seq_len
    grid = 8 * model.spec.block_len * _blocks(model, batch.seq_len) if model.spec else 0
    return Activations(
        kept_layer=layer if batch.checkpointing == "none" else stream + outputs + extra,
        recomputed=0 if batch.checkpointing == "none" else layer - outputs - already,
        shared=8 * tokens + rope + grid,
        final=norm + stream,
        loss=_loss(model, tokens, fused),
        in_layer=2 * hidden + 2 * stream,
        in_norm=2 * stream if fused else 3 * 4 * model.width * tokens,
        in_head=copies * model.embedding,
    )


def _attention(model: Model, batch: BatchShape) -> int:
    """Return the bytes that attention saves: queries, keys, values, gates, outputs, φ."""
    tokens, size = batch.tokens, model.weight_bytes
    query, output = model.heads * model.head_dim, model.heads * model.value_dim
    key, value = model.kv_heads * model.head_dim, model.kv_heads * model.value_dim
    saved = query + output  # the mixed output, which the last projection saves
    if model.spec is None:
        return size * tokens * (saved + key + value) + _branch_outputs(model, batch)
    saved += _rope_keys(model) * key + model.kv_sets * value + model.gates
    if "cmp" not in model.branches:
        return size * tokens * saved + _branch_outputs(model, batch)
    compressed = key + value
    if model.compressor_hidden is not None:
        both = model.head_dim + model.value_dim
        mlp = model.spec.block_len * both + 4 * model.compressor_hidden
        compressed += model.kv_heads * mlp
    blocks = (
        _blocks(model, batch.seq_len) * batch.micro_batch * compressed // batch.ranks_per_sequence
    )
    return size * (tokens * saved + blocks) + _branch_outputs(model, batch)


def _rope_keys(model: Model) -> int:
    """Return how many sets of keys are saved after RoPE; compressed keys are not rotated."""
    rotated = len({"sel", "win"}.intersection(model.branches))
    return 1 if model.shared_kv and "cmp" in model.branches else rotated


def _branch_outputs(model: Model, batch: BatchShape) -> int:
    """Return the bytes of the branches' outputs, their fp32 lse, and the selected blocks."""
    branches = 1 if model.spec is None else len(model.branches)
    per_token = branches * model.heads * (model.weight_bytes * model.value_dim + 4)
    if model.spec is not None and "sel" in model.branches:
        per_token += 4 * model.kv_heads * model.spec.select_top
    return per_token * batch.tokens


def _selective_extra(model: Model, batch: BatchShape) -> int:
    """Return the bytes that `selective` keeps on top of what autograd saves."""
    elements, lse = 0, 0
    if batch.ranks_per_sequence > 1:  # results of both exchanges; autograd saves copies
        elements += model.attention_inputs + model.heads * model.value_dim
    if model.spec is not None and "sel" in model.branches and "cmp" not in model.branches:
        elements += model.heads * model.value_dim  # compressed attention, run for its lse
        lse = 4 * model.heads
    return (model.weight_bytes * elements + lse) * batch.tokens


def _loss(model: Model, tokens: int, fused: bool) -> int:
    """Return the bytes of one chunk's logits and the head's gradient (fp32 if several chunks)."""
    chunks = -(-tokens * model.vocab_size // model.chunk_logits)
    logits = -(-tokens // chunks) * model.vocab_size
    gradient = model.weight_bytes * model.embedding
    if chunks > 1:
        gradient += (4 + model.weight_bytes) * model.embedding
    rows = min(model.softmax_logits if fused else model.softmax_logits_cpu, logits)
    copies = (1 if fused else 2) + (logits > rows)  # a CPU converts first; earlier rows remain
    softmax = 4 * rows * copies
    return model.weight_bytes * (logits + model.width * tokens) + max(gradient, softmax)


def _blocks(model: Model, seq_len: int) -> int:
    return model.spec.compressed_len(seq_len) if model.spec else 0
