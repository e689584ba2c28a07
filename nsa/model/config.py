"""Model configuration. The defaults are M7C: 12 layers, width 768, 12 query and 2 KV heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

from nsa.constants import BRANCHES
from nsa.ops.backend import BACKENDS
from nsa.spec import NSASpec
from nsa.validation import one_of, whole_numbers

ATTENTION_KINDS = ("nsa", "dense")
COMPRESSORS = ("mean", "mlp")
SUBSETS = tuple("+".join(names) for count in (3, 2, 1) for names in combinations(BRANCHES, count))
ACTIVATION_CHECKPOINTING = ("none", "reentrant", "non_reentrant", "deepspeed", "selective")


@dataclass
class AttentionConfig:
    """The attention of every layer."""

    kind: str = "nsa"  # "nsa", or "dense": plain causal attention, the twin to measure against
    compressor: str = "mean"  # φ: "mean", or "mlp" with learned intra-block positions
    compressor_hidden: int | None = None  # width of the mlp φ's hidden layer; None: head_dim
    branches: str = "cmp+sel+win"  # "win", "cmp+sel" …: fewer branches, for ablations
    shared_kv: bool = False  # one key/value projection for all branches
    spec: NSASpec = field(default_factory=NSASpec)  # the sparse pattern
    backend: str = "auto"  # of the ops: "auto", "triton", "blockwise" or "reference"

    @property
    def branch_names(self) -> tuple[str, ...]:
        return tuple(self.branches.split("+"))

    def check_branches(self) -> None:
        """Refuse unknown names, and parameters that would get no gradient."""
        if self.branches not in SUBSETS:
            raise ValueError(
                f"model.attention.branches = {self.branches!r}: choose one of {', '.join(SUBSETS)}"
            )
        if self.compressor == "mlp" and "cmp" not in self.branch_names:
            raise ValueError(
                f"model.attention.compressor = 'mlp' learns by the compressed branch, which "
                f"model.attention.branches = {self.branches!r} lacks; set the compressor to mean"
            )


@dataclass
class ModelConfig:
    """A Llama-like decoder: pre-norm RMSNorm, SwiGLU, RoPE, grouped queries, tied embedding."""

    vocab_size: int = 50_304  # rows of the embedding, which is also the head
    layers: int = 12  # transformer blocks
    width: int = 768  # residual stream
    heads: int = 12  # query heads
    kv_heads: int = 2  # key/value heads; heads / kv_heads queries share one
    head_dim: int = 64  # Dk: size of a query and a key
    value_dim: int | None = None  # Dv: size of a value; None: head_dim
    mlp_width: int = 2_368  # hidden width of SwiGLU; 125.7M parameters in all
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5  # RMSNorm's epsilon
    init_std: float = 0.02  # standard deviation of the initial weights
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    # "none", "reentrant", "non_reentrant", "deepspeed" or "selective"; all give the same numbers
    activation_checkpointing: str = "none"

    def validate(self) -> None:
        """Raise a ValueError that names the first invalid setting."""
        attention = self.attention
        whole_numbers(1, "model", self, "vocab_size", "layers", "width", "mlp_width")
        whole_numbers(1, "model", self, "heads", "kv_heads", "head_dim")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads = {self.heads} is not a multiple of model.kv_heads = "
                f"{self.kv_heads}; every KV head must serve the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim = {self.head_dim}: RoPE rotates pairs; make it even")
        for name, value in (
            ("value_dim", self.value_dim),
            ("attention.compressor_hidden", attention.compressor_hidden),
        ):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"model.{name} = {value!r}: must be a whole number, 1 or more, or null"
                )
        for name in ("rope_theta", "norm_eps", "init_std"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"model.{name} = {value!r}: must be a number above 0")
        one_of("model.attention", attention, kind=ATTENTION_KINDS, compressor=COMPRESSORS)
        one_of("model.attention", attention, backend=BACKENDS)
        one_of("model", self, activation_checkpointing=ACTIVATION_CHECKPOINTING)
        attention.check_branches()
