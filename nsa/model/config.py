"""Model configuration. The defaults are M7C: 12 layers, width 768, 12 query and 2 KV heads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import combinations

from nsa.constants import BRANCHES
from nsa.ops.backend import BACKENDS
from nsa.spec import NSASpec
from nsa.validation import at_least, at_most, one_of, whole_numbers

ATTENTION_KINDS = ("nsa", "dense")
COMPRESSORS = ("mean", "pool", "mlp")
SUBSETS = tuple("+".join(names) for count in (3, 2, 1) for names in combinations(BRANCHES, count))
UNTRAINED_INDEX = "selector_loss = 0: nothing else trains the index of branches=sel; set it to 1"
INIT_STD = 0.02  # standard deviation of the initial weights
# The numbers that each kind of RoPE needs; transformers has defaults for YARN_OPTIONS.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}  # fmt: skip
YARN_OPTIONS = (
    "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate",
)  # fmt: skip
# Attention with an index: a document's first block, the last 8 up to a query's own, and the 13 of
# the others that the index ranks highest.
INDEXED = NSASpec(block_len=64, block_stride=64, select_len=64, select_top=22, local_blocks=8)
# For a dense model that becomes sparse: an index key per token raises its loss least.
IMPORTED = replace(INDEXED, block_len=1, block_stride=1)
ACTIVATION_CHECKPOINTING = ("none", "reentrant", "non_reentrant", "deepspeed", "selective")


@dataclass
class AttentionConfig:
    """The attention layers' settings, equal for all layers."""

    kind: str = "nsa"  # "nsa", or "dense": plain causal attention, the baseline
    compressor: str = "mean"  # φ: "mean", "pool" (a learned weighted mean) or "mlp" (the paper's)
    # "sel": one set of keys and values, and an index that selects blocks; "cmp+sel+win": the
    # paper's three, each with keys and values of its own; others are ablations
    branches: str = "cmp+sel+win"
    # Weight of the loss that trains compressed keys to rank blocks by the selected branch's
    # attention; 0: off, as in the paper. It changes gradients, not the value of the training loss
    selector_loss: float = 0.0
    spec: NSASpec = field(default_factory=NSASpec)  # the sparse pattern
    backend: str = "auto"  # of nsa.ops: "auto", "triton", "blockwise" or "reference"

    @property
    def branch_names(self) -> tuple[str, ...]:
        return tuple(self.branches.split("+"))

    @property
    def has_index(self) -> bool:
        """Whether an index selects blocks for one set of keys and values."""
        return self.kind == "nsa" and self.branches == "sel"

    @property
    def can_rank(self) -> bool:
        """Whether there is an index or a compressed branch for the selector loss to train."""
        return self.kind == "nsa" and (self.has_index or self.branch_names == BRANCHES)

    def validate(self) -> None:
        one_of("model.attention", self, kind=ATTENTION_KINDS, compressor=COMPRESSORS)
        one_of("model.attention", self, branches=SUBSETS, backend=BACKENDS)
        at_least(0, "model.attention", self, "selector_loss")
        if self.selector_loss and not self.can_rank:
            raise ValueError(
                f"model.attention.selector_loss = {self.selector_loss}: needs kind nsa with "
                f"branches sel or all three, not {self.kind} with {self.branches}; set it to 0"
            )
        if self.has_index:
            self._validate_index()
        elif self.kind == "nsa" and self.compressor != "mean" and "cmp" not in self.branch_names:
            raise ValueError(
                f"model.attention.compressor = {self.compressor!r}: gets no gradient from "
                f"model.attention.branches = {self.branches!r}; add cmp, or set it to mean"
            )

    def _validate_index(self) -> None:
        spec = self.spec
        if self.compressor == "mlp":
            raise ValueError(
                "model.attention.compressor = 'mlp': compresses keys with values, and an index has "
                "keys alone; set it to pool or mean, or branches to cmp+sel+win"
            )
        if self.compressor == "pool" and spec.block_len == 1:
            raise ValueError(
                "model.attention.compressor = 'pool': weighs the keys of a block, and with "
                "spec.block_len = 1 a block has one; set it to mean"
            )
        if spec.window != NSASpec.window:
            raise ValueError(
                f"model.attention.spec.window = {spec.window}: branches=sel has no window; remove "
                "it and set local_blocks, the last blocks that are always selected"
            )
        always = spec.init_blocks + spec.local_blocks
        if spec.select_top <= always:
            raise ValueError(
                f"model.attention.spec.select_top = {spec.select_top}: leaves the index nothing to "
                f"select, as init_blocks and local_blocks are {always}; set it to {always + 1} or "
                "more"
            )


@dataclass
class ModelConfig:
    """A Llama-like decoder: pre-norm RMSNorm, SwiGLU, RoPE, tied embedding by default."""

    vocab_size: int = 50_304  # rows of the embedding and of the output head
    layers: int = 12  # transformer blocks
    width: int = 768  # of the residual stream
    heads: int = 12  # query heads
    kv_heads: int = 2  # key/value heads; each is shared by heads / kv_heads query heads
    head_dim: int = 64  # Dk: size of a query and a key
    value_dim: int | None = None  # Dv: size of a value; None: head_dim
    mlp_width: int = 2_368  # hidden width of SwiGLU
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    rope_type: str = "default"  # "default", "linear", "llama3" or "yarn", as in transformers
    rope_extension: dict[str, float] | None = None  # the numbers of a rope_type: factor, …
    no_rope_every: int = 0  # every n-th layer has no RoPE: 4 in SmolLM3; 0: all have it
    qkv_bias: bool = False  # q, k and v have biases, as in Qwen2
    qk_norm: bool = False  # RMSNorm of each head's q and k before RoPE, as in Qwen3
    norm_eps: float = 1e-5  # RMSNorm's epsilon
    tied_head: bool = True  # the output head is the embedding; false: a matrix of its own
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    # "none", "reentrant", "non_reentrant", "deepspeed" or "selective"; all give the same numbers;
    # or "auto": the fastest of none, selective and reentrant that fits into the GPU's memory
    activation_checkpointing: str = "none"

    def validate(self) -> None:
        sizes = ["vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width"]
        if self.value_dim is not None:
            sizes.append("value_dim")
        whole_numbers(1, "model", self, *sizes)
        at_most(1_024, "model", self, "layers")
        at_most(2**20, "model", self, *sizes)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads = {self.heads}: not a multiple of model.kv_heads = {self.kv_heads}; "
                "change one of them"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim = {self.head_dim}: RoPE rotates pairs; make it even")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"model.{name} = {value!r}: must be a number above 0")
        whole_numbers(0, "model", self, "no_rope_every")
        self._validate_rope()
        one_of("model", self, activation_checkpointing=(*ACTIVATION_CHECKPOINTING, "auto"))
        self.attention.validate()

    def _validate_rope(self) -> None:
        one_of("model", self, rope_type=tuple(ROPE_TYPES))
        needed, given = ROPE_TYPES[self.rope_type], self.rope_extension or {}
        options = YARN_OPTIONS if self.rope_type == "yarn" else ()
        where = f"model.rope_extension = {self.rope_extension}: rope_type {self.rope_type}"
        for name in needed:
            if name not in given:
                raise ValueError(f"{where} needs {name}; add it")
        for name, value in given.items():
            if name not in needed and name not in options:
                raise ValueError(f"{where} does not read {name}; remove it")
            least = 1 if name == "factor" else 0
            if not isinstance(value, int | float) or not least <= value < math.inf:
                raise ValueError(f"{where}: {name} = {value!r} must be a number, {least} or more")
