"""Attention layers: dense causal attention, and Native Sparse Attention, which extends it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.constants import BRANCHES
from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.compressor import Compressor, MLPCompressor, PoolCompressor
from nsa.model.config import UNTRAINED_INDEX, AttentionConfig, ModelConfig
from nsa.model.fused import head_norm, is_plain, norm_outputs, parallel_linear
from nsa.model.index import Index, index_start
from nsa.ops import (
    PackedLayout,
    compressed_attention,
    nsa_attention_and_blocks,
    rotary_pool,
    select_blocks,
    selected_attention,
    selector_loss,
    window_attention,
)
from nsa.ops.inputs import GatedInputs, check_documents, document_slices
from nsa.ops.rotary import RotaryPooled
from nsa.spec import NSASpec

# Replaces a layer's forward pass during decoding: (layer, x, metadata) -> output.
CachedAttention = Callable[[Any, Tensor, AttentionMetadata], Tensor]
BranchKV = dict[str, tuple[Tensor, Tensor]]  # keys and values by branch
# Settings of ModelConfig that a layer takes besides its sizes; qk_norm reads norm_eps.
MODEL_SETTINGS = ("rope_type", "rope_extension", "qkv_bias", "qk_norm", "norm_eps")
HAS_FLASH_ATTN = find_spec("flash_attn") is not None  # a search of the disk: once, not per call
AUTOCAST_DTYPES = {torch.float32, torch.float16, torch.bfloat16}  # autocast converts these
_UNUSED_LOSS = (
    "the selector loss of the last forward pass was not used, so it trains nothing: add "
    "selector_loss * layer.take_selector_loss() to the training loss"
)


class Attention(nn.Module):
    """Dense causal attention: the baseline, and the steps of a forward pass that NSA shares.

        x -> project      q, keys and values by branch, and gate logits side by side
          -> rotary_pool  RoPE, gates and mean-pooled keys and values
          -> attend       gated sum of the branches
          -> o

    Dense attention has one branch, "all", and no gates.
    """

    # Of the last selector loss: sampled queries [S], target of M blocks [B, Hkv, S, M].
    selector_target: tuple[Tensor, Tensor] | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.selector_loss: Tensor | None = None  # of the last forward pass, until it is taken
        attention, dense = config.attention, config.attention.kind == "dense"
        self.branches = ("all",) if dense else attention.branch_names
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.key_dim, self.value_dim = config.head_dim, config.value_dim or config.head_dim
        self.backend = attention.backend
        kv_sets = len(self.branches)
        bias = config.qkv_bias
        self.q = nn.Linear(config.width, self.heads * self.key_dim, bias=bias)
        self.k = nn.Linear(config.width, kv_sets * self.kv_heads * self.key_dim, bias=bias)
        self.v = nn.Linear(config.width, kv_sets * self.kv_heads * self.value_dim, bias=bias)
        self.rope = True  # False: a layer without RoPE
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(self.key_dim, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(self.key_dim, eps=config.norm_eps)
        # fork_rng: an index does not change which other weights a seed gives.
        with torch.random.fork_rng(devices=()):
            self.index = Index(config) if attention.has_index else None
        gates = 0 if dense or attention.has_index else len(self.branches)
        if gates:
            self.gates = nn.Linear(config.width, self.heads * gates, bias=False)
        self.o = nn.Linear(self.heads * self.value_dim, config.width, bias=False)
        sizes = self.heads, self.kv_heads, self.key_dim, self.value_dim
        self.layout = PackedLayout(*sizes, kv_sets, gates, indexed=self.index is not None)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        metadata: AttentionMetadata | None = None,
        cached: CachedAttention | None = None,
        attention_mask: None = None,
    ) -> Tensor:
        """Map [B, T, width] to [B, T, width]; cu_seqlens packs documents into a batch of 1.

        `metadata`, built once for all layers of a model, replaces cu_seqlens.
        """
        if metadata is None:
            weight = getattr(self.q, "weight", None)
            check_hidden_states(x, self.config.width, weight, attention_mask)
            check_documents(cu_seqlens, x, "x")
            offset = None
            if self.training and self.config.attention.selector_loss:
                offset = torch.randint(2**31, (), device=x.device)
            elif self.training and self.index is not None:
                warnings.warn(UNTRAINED_INDEX, stacklevel=2)
            metadata = AttentionMetadata.build(
                self.config, x.shape[1], cu_seqlens, x.device, loss_offset=offset
            )
        if not self.rope:
            metadata = metadata.without_rope()
        if cached is not None:
            return cached(self, x, metadata)
        if self.selector_loss is not None:
            warnings.warn(_UNUSED_LOSS, stacklevel=2)
        parts = self.rotary_pool(self.project(x), metadata)
        kv = self.branch_kv(parts, metadata)
        self.selector_loss = None
        if metadata.sampled is not None:
            self.selector_loss, target = self.compute_selector_loss(x, parts.q, kv, metadata)
            self.selector_target = metadata.sampled, target
        return self.o(self.attend(parts.q, parts.gates, kv, metadata).flatten(-2))

    def project(self, x: Tensor) -> Tensor:
        """Project to q, k, v, and an index or gate logits, [B, T, P] as in PackedLayout.

        The index's gradient does not reach x.
        """
        linears, index = [self.q, self.k, self.v], self.index
        if self.layout.gates:
            linears.append(self.gates)
        packed = parallel_linear(x, linears, () if index is None else (index.q, index.k))
        if self.config.qk_norm:
            norms: list[tuple[nn.Linear, nn.RMSNorm | None]]
            norms = [(self.q, self.q_norm), (self.k, self.k_norm)]
            if index is not None:
                norms += [(self.v, None), (index.q, index.q_norm), (index.k, index.k_norm)]
            packed = norm_outputs(packed, norms)
        return packed

    def rotary_pool(
        self, packed: Tensor, metadata: AttentionMetadata, all_sets: bool = False
    ) -> RotaryPooled:
        """Split a projection [B, T, P] and apply RoPE, the gates' sigmoid and the mean φ to it.

        `all_sets`: also return the keys and values that only the compressor reads, for the cache.
        """
        layout = self.layout
        if all_sets:
            layout = layout._replace(first_set=0)
        if layout.mean and metadata.block_tokens is None:
            layout = layout._replace(mean=False)
        tables = *metadata.rotary, metadata.block_tokens, metadata.token_blocks
        return rotary_pool(packed, layout, *tables, backend=self.backend)

    def branch_kv(self, parts: RotaryPooled, metadata: AttentionMetadata) -> BranchKV:
        """Return each branch's keys and values."""
        return dict(zip(self.branches, parts.kv_sets, strict=False))  # of 3 sets, some are empty

    def compute_selector_loss(
        self, x: Tensor, q: Tensor, kv: BranchKV, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """Return the selector loss and its target; `kv` is what `branch_kv` returned."""
        raise NotImplementedError

    def take_selector_loss(self) -> Tensor | None:
        """Return the last forward pass's selector loss, and clear it.

        Return None if the loss is not configured or already taken, and in evaluation. Multiply the
        loss by the setting `selector_loss` and add it to the training loss: an index shares the
        layer's graph, so a separate backward pass would need `retain_graph`.
        """
        loss, self.selector_loss = self.selector_loss, None
        return loss

    def attend(
        self, q: Tensor, gates: Tensor | None, kv: BranchKV, metadata: AttentionMetadata
    ) -> Tensor:
        """Return the gated sum of the branches, [B, T, Hq, Dv]."""
        return causal_attention(q, *kv["all"], metadata.cu_seqlens)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return attention [B, T, Hq, Dv] over all previous tokens of the document.

    Call PyTorch once per document, for which the host waits for `cu_seqlens`. On a GPU call
    flash-attn instead, if it is installed: once for all documents.
    """
    if cu_seqlens is not None and flash_attn_supports(q, v):
        from flash_attn import flash_attn_varlen_func

        # The length of the sequence bounds a document's; the exact length would be a host sync.
        # `deterministic`: gradients have equal bits in each run.
        cu, longest = cu_seqlens.int(), q.shape[1]
        limits = cu, cu, longest, longest
        o = flash_attn_varlen_func(q[0], k[0], v[0], *limits, causal=True, deterministic=True)
        return o[None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    outputs = [
        F.scaled_dot_product_attention(
            q[:, :, doc], k[:, :, doc], v[:, :, doc], is_causal=True, enable_gqa=True
        )
        for doc in document_slices(q.shape[2], cu_seqlens)
        if doc.stop > doc.start
    ]
    o = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)  # one document: no copy
    return o.transpose(1, 2)


def flash_attn_supports(q: Tensor, v: Tensor) -> bool:
    """Whether flash-attn is installed and has a kernel for these tensors."""
    return (
        HAS_FLASH_ATTN
        and q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] == v.shape[-1] <= 256  # the largest head of its kernels
        and q.shape[-1] % 8 == 0
    )


class NSAttention(Attention):
    """Sparse attention of hidden states: a drop-in for a causal attention layer.

    With branches = "sel" the layer has one set of keys and values: a query attends, in one softmax,
    to the blocks that an index selects. Otherwise it is Native Sparse Attention: compressed,
    selected and window branches, mixed by one gate per query head and branch. A disabled branch has
    no parameters; without the compressed branch, blocks are selected by the mean of the selected
    branch's keys. RoPE and the projections are included.

    `observer`, if set, receives gates [B, T, Hq, 3] or None, selected blocks [B, T, Hkv, n],
    cu_seqlens and the selector loss of every forward pass. Recomputed passes call it too, and so do
    passes in which an index learns beside dense attention. It must not modify these tensors.

    With `selector_loss`, outside of `LanguageModel`: after each forward pass in training add
    `selector_loss * layer.take_selector_loss()` to your loss, or it trains nothing.
    """

    observer: Callable[[Tensor | None, Tensor, Tensor | None, Tensor | None], None] | None = None
    dense: bool = False  # `LanguageModel.set_dense` sets it

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int | None = None,  # None: one per query head
        spec: NSASpec | None = None,
        *,
        head_dim: int | None = None,  # None: hidden_size / heads
        value_dim: int | None = None,  # None: head_dim
        rope_theta: float = 10_000.0,
        **settings: Any,  # MODEL_SETTINGS, and the other fields of AttentionConfig
    ) -> None:
        for name, value in (("hidden_size", hidden_size), ("heads", heads)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} = {value!r}: must be a whole number, 1 or more")
        if head_dim is None and hidden_size % heads:
            raise ValueError(
                f"heads = {heads}: does not divide hidden_size = {hidden_size}; give head_dim"
            )
        shared = {name: settings.pop(name) for name in MODEL_SETTINGS if name in settings}
        names = [f.name for f in fields(AttentionConfig) if f.name not in ("kind", "spec")]
        names += MODEL_SETTINGS
        if unknown := [name for name in settings if name not in names]:
            raise ValueError(
                f"NSAttention has no setting {unknown[0]!r}; choose one of {', '.join(names)}; "
                "sizes of blocks and window belong in spec"
            )
        spec = NSASpec() if spec is None else spec
        if type(spec).__name__ != "NSASpec":  # by name: an export's code may hold the class twice
            values = spec.items() if isinstance(spec, dict) else ()
            example = ", ".join(f"{name}={value}" for name, value in values) or "..."
            kind = type(spec).__name__
            raise ValueError(f"spec = {spec!r}: is a {kind}; give NSASpec({example})")
        attention = AttentionConfig("nsa", spec=spec, **settings)
        config = ModelConfig(
            width=hidden_size,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=hidden_size // heads if head_dim is None else head_dim,
            value_dim=value_dim,
            rope_theta=rope_theta,
            attention=attention,
            **shared,
        )
        config.validate()
        super().__init__(config)
        self.spec = attention.spec
        if self.index is not None:
            self.start_index()
            return
        self.compress: Compressor | None = None  # φ; None: the mean
        if attention.compressor == "mlp":
            self.compress = MLPCompressor(self.spec.block_len, self.key_dim, self.value_dim)
        elif attention.compressor == "pool":
            sizes = self.kv_heads, self.key_dim, self.value_dim
            self.compress = PoolCompressor(self.spec.block_len, *sizes, self.backend)
        if self.branches == ("win",):  # nothing to compress
            return
        mean = attention.compressor == "mean"
        # The compressed branch's keys and values, the first set, are read only as blocks.
        first_set = int("cmp" in self.branches)
        self.layout = self.layout._replace(first_set=first_set, mean=mean, pre_rope=not mean)

    def start_index(self) -> None:
        """Initialize the index with the layer's own projections."""
        assert self.index is not None
        start = index_start(self.state_dict(), self.kv_heads)
        self.index.load_state_dict(start, strict=False)  # without φ, which starts as the mean

    def branch_kv(self, parts: RotaryPooled, metadata: AttentionMetadata) -> BranchKV:
        """Add an index's queries and keys as "index", or compressed keys and values as "cmp".

        Without a compressed branch, compressed keys only select blocks.
        """
        kv = super().branch_kv(parts, metadata)
        if self.index is not None:
            learns = metadata.sampled is not None
            if learns or not self.dense:
                assert parts.indexed is not None
                queries, keys = parts.indexed
                with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
                    kv["index"] = queries, self.index.compress(keys, metadata)
        elif parts.compressed is not None:
            kv["cmp"] = parts.compressed  # means, or pre-RoPE keys and values for φ
            if self.compress is not None:
                kv["cmp"] = self.compress(*parts.compressed, metadata)
        return kv

    def compute_selector_loss(
        self, x: Tensor, q: Tensor, kv: BranchKV, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        assert metadata.sampled is not None
        if self.index is not None:
            q_cmp, k_cmp = kv["index"]
        else:
            q_cmp, k_cmp = None, self.ranking_keys(x, metadata)
        inputs = q, k_cmp, kv["sel"][0], metadata.sampled, self.spec
        return selector_loss(*inputs, q_cmp=q_cmp, **self._common(metadata))

    def ranking_keys(self, x: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return the compressed branch's keys [B, N, Hkv, Dk] as a function of detached x.

        They are projected and compressed a second time, so that the selector loss trains the
        ranking and not the hidden states that other layers read. With M7C's sizes this is a twelfth
        of the work of projection and φ.
        """
        x = x.detach()
        rows = self.kv_heads * self.key_dim  # of the first set, which φ reads
        if is_plain(self.k, nn.Linear):
            bias = None if self.k.bias is None else self.k.bias[:rows]
            k = F.linear(x, self.k.weight[:rows], bias)
        else:
            k = self.k(x)[..., :rows]
        if self.config.qk_norm:
            k = head_norm(k, self.k_norm)
        if self.layout.mean:
            # Of one set of keys only the means are returned.
            layout = self.layout._replace(heads=0, value_dim=0, kv_sets=1, gates=0, first_set=1)
            tables = *metadata.rotary, metadata.block_tokens, metadata.token_blocks
            means = rotary_pool(k, layout, *tables, backend=self.backend).compressed
            assert means is not None
            return means[0]
        k = k.unflatten(-1, (self.kv_heads, self.key_dim))
        if isinstance(self.compress, PoolCompressor):
            return self.compress.key(k, metadata.block_rotary, metadata)
        assert self.compress is not None
        return self.compress(k, k.new_zeros(*k.shape[:3], self.value_dim), metadata)[0]

    def attend(
        self, q: Tensor, gates: Tensor | None, kv: BranchKV, metadata: AttentionMetadata
    ) -> Tensor:
        if self.index is not None:
            common = self._common(metadata)
            # Beside dense attention, blocks are selected for the observer alone.
            if not self.dense or (self.observer is not None and "index" in kv):
                block_index = select_blocks(*kv["index"], None, self.spec, **common)
                self._observe(None, block_index, metadata.cu_seqlens)
            if self.dense:
                return causal_attention(q, *kv["sel"], metadata.cu_seqlens)
            return selected_attention(q, *kv["sel"], block_index, self.spec, **common)
        assert gates is not None
        if self.branches != BRANCHES:
            return self._attend_subset(q, gates, kv, metadata)
        pairs = *kv["cmp"], *kv["sel"], *kv["win"]
        rest = gates, metadata.cu_seqlens, self.spec, self.key_dim**-0.5
        o, block_index = nsa_attention_and_blocks(GatedInputs(q, *pairs, *rest), self.backend)
        self._observe(gates, block_index, metadata.cu_seqlens)
        return o

    def _common(self, metadata: AttentionMetadata) -> dict[str, Any]:
        """Return the arguments that all ops of this layer take."""
        return {"cu_seqlens": metadata.cu_seqlens, "backend": self.backend}

    def _observe(
        self, gates: Tensor | None, block_index: Tensor, cu_seqlens: Tensor | None
    ) -> None:
        if self.observer is not None:
            loss = None if self.selector_loss is None else self.selector_loss.detach()
            self.observer(gates, block_index, cu_seqlens, loss)

    def _attend_subset(
        self, q: Tensor, gates: Tensor, kv: BranchKV, metadata: AttentionMetadata
    ) -> Tensor:
        """Call one op per branch, without fusion or observer.

        Without a compressed branch, compressed keys only select blocks and get no gradient.
        """
        common = self._common(metadata)
        outputs: dict[str, Tensor] = {}
        if "cmp" in kv:
            with torch.set_grad_enabled(torch.is_grad_enabled() and "cmp" in self.branches):
                outputs["cmp"], lse = compressed_attention(q, *kv["cmp"], self.spec, **common)
        if "sel" in kv:
            block_index = select_blocks(q, kv["cmp"][0], lse, self.spec, **common)
            outputs["sel"] = selected_attention(q, *kv["sel"], block_index, self.spec, **common)
        if "win" in kv:
            outputs["win"] = window_attention(q, *kv["win"], self.spec.window, **common)
        weights = zip(self.branches, gates.unbind(-1), strict=True)
        return torch.stack([gate[..., None] * outputs[name] for name, gate in weights]).sum(0)


def check_hidden_states(x: Tensor, width: int, weight: Any, attention_mask: Any) -> None:
    """Raise a ValueError if a layer with this projection cannot read x, or is given a mask."""
    if attention_mask is not None:
        raise ValueError(
            "attention_mask is given: the layer's attention is always causal and reads no mask; "
            "omit it, and pack texts of different lengths without padding, by cu_seqlens"
        )
    if x.dim() != 3 or x.shape[1] < 1 or x.shape[2] != width:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [B, T, {width}]")
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return  # quantized weights multiply x of any dtype
    if x.dtype == weight.dtype:
        return
    if torch.is_autocast_enabled(x.device.type) and {x.dtype, weight.dtype} <= AUTOCAST_DTYPES:
        return
    raise ValueError(
        f"x has dtype {x.dtype} and the layer {weight.dtype}; convert one: x.to({weight.dtype})"
    )
