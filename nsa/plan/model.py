"""What the planner knows of a model: sizes as plain numbers, and what one micro-batch keeps alive.

A byte count here is a sum over the tensors that a layer saves for its backward pass, one term each.
"""

from __future__ import annotations

from dataclasses import dataclass

from nsa.spec import NSASpec

CHECKPOINTING = ("none", "reentrant", "non_reentrant", "deepspeed", "selective")
BRANCHES = 3
# Logits that the loss makes at a time, and of these in fp32, on a GPU and on a CPU: as in
# nsa/model/loss.py, where it says why.
PRODUCT, IN_FLOAT32, IN_CACHE = 2**27, 2**23, 2**20


@dataclass(frozen=True)
class Model:
    """The sizes that memory, traffic and time follow from. `spec` is None for dense attention."""

    parameters: int
    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    mlp_width: int
    spec: NSASpec | None
    shared_kv: bool = False
    compressor_hidden: int | None = None  # of an mlp φ; None: the mean
    weight_bytes: int = 2  # bf16 and fp16; 4: fp32
    flops: float = 0.0  # forward and backward of a token, at the batch's sequence length
    layers_flops: float = 0.0  # of these, the layers' forward pass
    attention_flops: float = 0.0  # of these, scores and weighted values

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, which is also the head: its gradient is complete last."""
        return self.vocab_size * self.width

    @property
    def layer(self) -> int:
        """Parameters of one layer, the final norm shared out among all."""
        return (self.parameters - self.embedding) // self.layers


@dataclass(frozen=True)
class Batch:
    """What one rank computes between two updates of the weights."""

    seq_len: int
    micro_batch: int
    accumulation: int
    checkpointing: str

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return self.seq_len * self.micro_batch


def flops_per_token(model: Model, checkpointing: str) -> float:
    """What is executed: with checkpointing the forward pass of the layers runs again, or part."""
    again = 0.0 if checkpointing == "none" else model.layers_flops
    return model.flops + again - (model.attention_flops if checkpointing == "selective" else 0.0)


@dataclass(frozen=True)
class Activations:
    """Bytes that the backward pass of one micro-batch waits for."""

    kept_layer: int  # of each layer, from its forward pass to its backward pass
    again: int  # what recomputation brings back of one layer
    shared: int  # rotary tables, block grid, tokens
    final: int  # the last norm and what it hands to the head
    loss: int  # logits and gradients of the head, for a moment
    in_layer: int  # gradients on their way through one layer
    in_norm: int  # and through the last norm
    in_head: int  # the head's gradient, and its copy scaled for the backward pass


def activations(model: Model, batch: Batch, *, fused: bool = True) -> Activations:
    """`fused`: norms as on a GPU, one kernel that saves its input; else as PyTorch on a CPU."""
    tokens, size = batch.tokens, model.weight_bytes
    stream, hidden = size * model.width * tokens, size * model.mlp_width * tokens
    norm = (stream if fused else 2 * 4 * model.width * tokens) + 4 * tokens
    whole = 2 * (norm + stream) + 4 * hidden + _attention(model, batch)
    dear = _dear(model, batch) if batch.checkpointing == "selective" else 0
    known = stream if fused or size == 4 else 0  # what the first norm saves is the layer's input
    copies = 2 * size if fused or size == 4 else 2 * size + 2 * 4  # a CPU makes them in fp32
    rotary = 4 * model.head_dim * batch.seq_len
    grid = 8 * model.spec.block_len * _blocks(model, batch.seq_len) if model.spec else 0
    return Activations(
        kept_layer=whole if batch.checkpointing == "none" else stream + dear,
        again=0 if batch.checkpointing == "none" else whole - dear - known,
        shared=8 * tokens + rotary + grid,
        final=norm + stream,
        loss=_loss(model, tokens, fused),
        in_layer=2 * hidden + 2 * stream,
        in_norm=2 * stream if fused else 3 * 4 * model.width * tokens,
        in_head=copies * model.embedding,
    )


def _attention(model: Model, batch: Batch) -> int:
    """What attention saves beside its norm: queries, keys, values, gates, outputs, φ."""
    tokens, size = batch.tokens, model.weight_bytes
    query, output = model.heads * model.head_dim, model.heads * model.value_dim
    key, value = model.kv_heads * model.head_dim, model.kv_heads * model.value_dim
    own = query + output  # output: the mixed one, which the last projection saves
    if model.spec is None:
        return size * tokens * (own + key + value) + _dear(model, batch)
    copies = 1 if model.shared_kv else BRANCHES
    turned = 1 if model.shared_kv else 2  # the keys of the compressed branch are not kept
    own += turned * key + copies * value + BRANCHES * model.heads
    blocks = _blocks(model, batch.seq_len) * batch.micro_batch
    compressed = key + value
    if model.compressor_hidden is not None:
        both = model.head_dim + model.value_dim
        inside = model.spec.block_len * both + 4 * model.compressor_hidden
        compressed += model.kv_heads * inside
    return size * (tokens * own + blocks * compressed) + _dear(model, batch)


def _dear(model: Model, batch: Batch) -> int:
    """Outputs of the attention's branches, their log-sums in fp32, and the blocks chosen."""
    branches = 1 if model.spec is None else BRANCHES
    a_token = branches * model.heads * (model.weight_bytes * model.value_dim + 4)
    if model.spec is not None:
        a_token += 4 * model.kv_heads * model.spec.select_top
    return a_token * batch.tokens


def _loss(model: Model, tokens: int, fused: bool) -> int:
    """Logits of one product and the head's gradient; summed up in fp32 where there are several."""
    products = -(-tokens * model.vocab_size // PRODUCT)
    logits = -(-tokens // products) * model.vocab_size
    gradient = model.weight_bytes * model.embedding
    if products > 1:
        gradient += (4 + model.weight_bytes) * model.embedding
    rows = min(IN_FLOAT32 if fused else IN_CACHE, logits)
    copies = (1 if fused else 2) + (logits > rows)  # a CPU converts first; the last rows' are there
    softmax = 4 * rows * copies
    own = model.weight_bytes * (logits + model.width * tokens)
    return own + max(gradient, softmax)


def _blocks(model: Model, seq_len: int) -> int:
    return model.spec.compressed_len(seq_len) if model.spec else 0
