"""What the planner knows of a model: sizes as plain numbers, and what one micro-batch keeps alive.

A byte count here is a sum over the tensors that a layer saves for its backward pass, one term each.
"""

from __future__ import annotations

from dataclasses import dataclass

from nsa.constants import BRANCHES
from nsa.spec import NSASpec


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
    branches: tuple[str, ...] = BRANCHES
    shared_kv: bool = False
    compressor_hidden: int | None = None  # of an mlp φ; None: the mean
    weight_bytes: int = 2  # bf16 and fp16; 4: fp32
    flops: float = 0.0  # forward and backward of a token, at the batch's sequence length
    layers_flops: float = 0.0  # of these, the layers' forward pass
    attention_flops: float = 0.0  # of these, scores and weighted values
    product: int = 0  # logits that the loss makes at a time
    in_float32: int = 0  # of these, in fp32 on a GPU
    in_cache: int = 0  # and on a CPU

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, which is also the head: its gradient is complete last."""
        return self.vocab_size * self.width

    @property
    def layer(self) -> int:
        """Parameters of one layer, the final norm shared out among all."""
        return (self.parameters - self.embedding) // self.layers

    @property
    def copies(self) -> int:
        """Of keys and values."""
        return 1 if self.spec is None or self.shared_kv else len(self.branches)

    @property
    def gates(self) -> int:
        return 0 if self.spec is None else len(self.branches) * self.heads

    @property
    def attends_with(self) -> int:
        """Values of a token that attention is given: queries, keys, values, gates."""
        own = self.heads * self.head_dim + self.gates
        return own + self.copies * self.kv_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class Batch:
    """What one rank computes between two updates of the weights."""

    seq_len: int
    micro_batch: int
    accumulation: int
    checkpointing: str
    shared_by: int = 1  # ranks that share each sequence

    @property
    def tokens(self) -> int:
        """Of one micro-batch; inside attention a rank has all of a sequence's, and fewer heads."""
        return self.seq_len * self.micro_batch // self.shared_by


def flops_per_token(model: Model, checkpointing: str) -> float:
    """What is executed: with checkpointing the forward pass of the layers runs again, or part."""
    again = 0.0 if checkpointing == "none" else model.layers_flops
    return model.flops + again - (model.attention_flops if checkpointing == "selective" else 0.0)


def exchanged(model: Model, batch: Batch) -> float:
    """Bytes that a rank sends to those that share its sequences, in one micro-batch.

    A rank keeps its own part of what it exchanges. Recomputation exchanges anew, but for
    `selective`, which keeps what came.
    """
    values = model.attends_with + model.heads * model.value_dim
    others = (batch.shared_by - 1) / batch.shared_by
    passes = _passes(batch) * model.layers
    return passes * others * batch.tokens * values * model.weight_bytes


def exchanges(model: Model, batch: Batch) -> int:
    """How often they exchange in one micro-batch; the loss's sum is one more."""
    return 2 * model.layers * _passes(batch) + 1 if batch.shared_by > 1 else 0


def _passes(batch: Batch) -> int:
    return 2 if batch.checkpointing in ("none", "selective") else 3


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
    selective = batch.checkpointing == "selective"
    dear = _dear(model, batch) if selective else 0
    more = _kept_besides(model, batch) if selective else 0
    known = stream if fused or size == 4 else 0  # what the first norm saves is the layer's input
    copies = 2 * size if fused or size == 4 else 2 * size + 2 * 4  # a CPU makes them in fp32
    rotary = 4 * model.head_dim * batch.seq_len
    grid = 8 * model.spec.block_len * _blocks(model, batch.seq_len) if model.spec else 0
    return Activations(
        kept_layer=whole if batch.checkpointing == "none" else stream + dear + more,
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
    own += _turned(model) * key + model.copies * value + model.gates
    if "cmp" not in model.branches:
        return size * tokens * own + _dear(model, batch)
    compressed = key + value
    if model.compressor_hidden is not None:
        both = model.head_dim + model.value_dim
        inside = model.spec.block_len * both + 4 * model.compressor_hidden
        compressed += model.kv_heads * inside
    blocks = _blocks(model, batch.seq_len) * batch.micro_batch * compressed // batch.shared_by
    return size * (tokens * own + blocks) + _dear(model, batch)


def _turned(model: Model) -> int:
    """Keys that are kept: each turned once. Those of the compressed branch are not."""
    turned = len({"sel", "win"}.intersection(model.branches))
    return 1 if model.shared_kv and "cmp" in model.branches else turned


def _dear(model: Model, batch: Batch) -> int:
    """Outputs of the attention's branches, their log-sums in fp32, and the blocks chosen."""
    branches = 1 if model.spec is None else len(model.branches)
    a_token = branches * model.heads * (model.weight_bytes * model.value_dim + 4)
    if model.spec is not None and "sel" in model.branches:
        a_token += 4 * model.kv_heads * model.spec.select_top
    return a_token * batch.tokens


def _kept_besides(model: Model, batch: Batch) -> int:
    """What `selective` keeps of operations whose results nothing saves as they are."""
    values = 0
    if batch.shared_by > 1:  # of both exchanges; what is saved are copies
        values += model.attends_with + model.heads * model.value_dim
    extra = 0
    if model.spec is not None and "sel" in model.branches and "cmp" not in model.branches:
        values += model.heads * model.value_dim  # compressed attention, run for its log-sums
        extra = 4 * model.heads
    return (model.weight_bytes * values + extra) * batch.tokens


def _loss(model: Model, tokens: int, fused: bool) -> int:
    """Logits of one product and the head's gradient; summed up in fp32 where there are several."""
    products = -(-tokens * model.vocab_size // model.product)
    logits = -(-tokens // products) * model.vocab_size
    gradient = model.weight_bytes * model.embedding
    if products > 1:
        gradient += (4 + model.weight_bytes) * model.embedding
    rows = min(model.in_float32 if fused else model.in_cache, logits)
    copies = (1 if fused else 2) + (logits > rows)  # a CPU converts first; the last rows' are there
    softmax = 4 * rows * copies
    own = model.weight_bytes * (logits + model.width * tokens)
    return own + max(gradient, softmax)


def _blocks(model: Model, seq_len: int) -> int:
    return model.spec.compressed_len(seq_len) if model.spec else 0
