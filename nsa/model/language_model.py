"""Language model: a Llama-like decoder with sparse or dense attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nsa.constants import IGNORE_INDEX
from nsa.model.attention import NSAttention
from nsa.model.attention_metadata import QUERIES, QUERIES_ALONE, AttentionMetadata
from nsa.model.block import Block
from nsa.model.compressor import BlockMLP
from nsa.model.config import INIT_STD, ModelConfig
from nsa.model.fused import add_norm
from nsa.model.loss import Head, distillation_loss, linear_cross_entropy, token_divergence
from nsa.ops.inputs import check_documents

# Activation checkpointing "selective" saves the outputs of these ops: matrix products, attention
# and block selection have nearly all FLOPs of a forward pass. Norms, RoPE, pooling and SwiGLU are
# cheap to recompute. Listed by name, because a backend that is not imported registers no ops.
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
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}


class LanguageModel(nn.Module):
    """Maps tokens to logits, or to a loss if labels are given.

    ZeRO-2 with a reentrant backward requires that every parameter is in at most one checkpoint
    segment: each block is one, and embedding, final norm and head are in none. The forward pass
    keeps no state, so recomputing a segment gives the same result.
    """

    def __init__(self, config: ModelConfig, block: type[Block] = Block) -> None:
        super().__init__()
        config.validate()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(block(config) for _ in range(config.layers))
        for number, layer in enumerate(self.blocks, 1):
            assert isinstance(layer, Block)
            if config.no_rope_every and number % config.no_rope_every == 0:
                layer.attention.rope = False
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head: nn.Linear | None = None  # None: the embedding is the head
        if not config.tied_head:
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.initialize()

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        loss_weight: float = 1.0,
        selector_only: bool = False,
        teacher: Head | None = None,
        divergence: bool = False,
    ) -> Tensor:
        """Return logits [B, T, V], or with `labels` [B, T] the mean loss times `loss_weight`.

        `labels` are already shifted: labels[b, t] is the token after input_ids[b, t]. Labels of
        -100 are skipped; without any others the mean is 0. `loss_weight` does not apply to the
        selector loss, which is a mean over queries. With `selector_only` only the weights that rank
        blocks learn, from each layer's selector loss; the other weights get a gradient of 0.

        `teacher` is the input [B · T, width] of another model's head, and the head's weight. It
        adds the gradient of KL(teacher ‖ this model). With `divergence`, return the
        `token_divergence` of each label instead of the loss, [B · T, 4].
        """
        if labels is not None and labels.shape != input_ids.shape:
            raise ValueError(
                f"labels has shape {tuple(labels.shape)} and input_ids {tuple(input_ids.shape)}; "
                "labels[b, t] is the token after input_ids[b, t]"
            )
        if labels is not None:
            check_tokens(labels, self.config.vocab_size, "labels")
        # `detached`: the loss's backward pass skips the layers, so `_WithZeroGradients` gives the
        # weights their gradients. With ZeRO-3, whose weights have a `ds_id`, the backward pass must
        # visit the layers, because ZeRO-3 gathers a layer's weights only for such a visit.
        detached = selector_only and not hasattr(self.embed.weight, "ds_id")
        queries = QUERIES_ALONE if selector_only else QUERIES
        x, selector_loss = self._hidden(input_ids, cu_seqlens, queries, detached)
        weight = self.head_weight
        if detached:
            x, weight = x.detach(), weight.detach()
        if labels is None:
            return F.linear(x, weight)
        head, labels = (x.flatten(0, 1), weight), labels.flatten()
        if divergence:
            assert teacher is not None
            return token_divergence(head, teacher, labels)
        loss = linear_cross_entropy(*head, labels)
        if loss_weight != 1.0:
            loss = loss * loss_weight
        if detached:
            loss = _WithZeroGradients.apply(loss, *self.parameters())
        elif selector_only:
            loss = loss.detach() + 0.0 * loss  # a gradient of 0 that visits all layers
        auxiliary_losses = []
        if selector_loss is not None:
            auxiliary_losses.append(self.config.attention.selector_loss * selector_loss)
        if teacher is not None and not selector_only:
            auxiliary_losses.append(loss_weight * distillation_loss(head, teacher, labels))
        for auxiliary in auxiliary_losses:  # add only the gradient: the loss stays comparable
            loss = loss + (auxiliary - auxiliary.detach())
        return loss

    def hidden(self, input_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return the head's input [B, T, width]; all logits at once might not fit into memory."""
        return self._hidden(input_ids, cu_seqlens)[0]

    def _hidden(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor | None,
        loss_queries: int = QUERIES,
        detached: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the head's input, and the sum of selector losses: in training, if configured."""
        if input_ids.dim() != 2 or input_ids.shape[1] < 1:
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; it must be [B, T]")
        check_tokens(input_ids, self.config.vocab_size)
        check_documents(cu_seqlens, input_ids, "input_ids")
        offset = self.loss_offset(input_ids)
        metadata = AttentionMetadata.build(
            self.config, input_ids.shape[1], cu_seqlens, input_ids.device, offset, loss_queries
        )
        return self.run_blocks(self.embed(input_ids), metadata, detached=detached)

    def loss_offset(self, tokens: Tensor) -> Tensor | None:
        """Return an integer that shifts the selector loss's queries; None if there is no such loss.

        It is the sum of `tokens`, which are ids or embeddings: it differs from step to step, and
        needs no random generator.
        """
        # Not self.training: the Hugging Face model registers the blocks and not this module, so its
        # train() sets only the blocks' flag.
        training = self.blocks.training and torch.is_grad_enabled()
        if not (training and self.config.attention.selector_loss):
            return None
        offset = tokens.detach().sum()
        if offset.is_floating_point():
            offset = (offset.float() * 2**16).long()
        return offset

    def run_blocks(
        self,
        x: Tensor,
        metadata: AttentionMetadata,
        intercept: Callable[[Tensor], Tensor] | None = None,
        detached: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run all blocks on embeddings x [B, T, width].

        Return the head's input and the sum of the layers' selector losses, which is None without
        `metadata.sampled`. `intercept` receives each block's input and returns the input to use.
        With `detached` only the selector losses have a gradient. Blocks are then not recomputed,
        which would save no memory: they keep no activations for a gradient of their output.
        """
        has_gradient = torch.is_grad_enabled() and (
            x.requires_grad or any(weight.requires_grad for weight in self.blocks.parameters())
        )
        recompute = has_gradient and not detached
        run = checkpoint_function(self.config.activation_checkpointing if recompute else "none")
        if recompute and not x.requires_grad:  # required by reentrant segments
            x = x.detach().requires_grad_()
        delta: Tensor | None = None
        losses = []
        for block in self.blocks:
            if detached:
                x, delta = x.detach(), None if delta is None else delta.detach()
            if intercept is not None:
                x, delta = intercept(x if delta is None else x + delta), None
            x, delta, *loss = run(partial(block, metadata=metadata), x, delta)
            losses += loss
        return self.final_norm(x, delta), torch.stack(losses).sum() if losses else None

    @property
    def head_weight(self) -> Tensor:
        """The matrix [V, width] that maps the head's input to logits."""
        return self.embed.weight if self.head is None else self.head.weight

    def final_norm(self, x: Tensor, delta: Tensor | None) -> Tensor:
        """Return the head's input from the last block's output."""
        return add_norm(x, delta, self.norm, self.config.attention.backend)[1]

    @torch.no_grad()
    def initialize(self, std: float = INIT_STD) -> None:
        """Draw weights, and the position embeddings of φ `mlp`, with this standard deviation.

        The weights of projections into the residual stream are scaled by 1/√(2·layers), because the
        stream sums the outputs of 2·layers projections.
        """
        residual_scale = (2 * self.config.layers) ** -0.5
        for name, module in self.named_modules():
            if ".index." in name:  # `start_index` below sets an index's weights
                continue
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, BlockMLP):
                nn.init.normal_(module.position, std=std)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.attention.o.weight.mul_(residual_scale)
            block.mlp.down.weight.mul_(residual_scale)
            if isinstance(block.attention, NSAttention):
                if block.attention.index is not None:
                    block.attention.start_index()
                else:
                    nn.init.zeros_(block.attention.gates.weight)  # gates start at ½

    def set_dense(self, dense: bool) -> None:
        """Attend to all tokens if `dense`, else to the blocks that the index selects."""
        assert self.config.attention.has_index or not dense
        for layer in self.sparse_layers().values():
            layer.dense = dense

    def sparse_layers(self) -> dict[str, NSAttention]:
        """Return by name the attention layers that select blocks, which an observer can watch."""
        return {
            name: module
            for name, module in self.named_modules()
            if isinstance(module, NSAttention) and module.config.attention.can_rank
        }


class _WithZeroGradients(torch.autograd.Function):
    """Return the loss; give each parameter 0 times the loss's gradient, so that NaN stays NaN."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros_like(parameter) * gradient for parameter in ctx.parameters)


def checkpoint_function(mode: str) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that runs a segment on its inputs, checkpointed in this mode.

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


def check_tokens(tokens: Tensor, vocab_size: int, name: str = "input_ids") -> None:
    """Raise a ValueError for tokens that are no ids; on a GPU check only their dtype."""
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} has dtype {tokens.dtype}; it must be int64 or int32")
    if tokens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    ids = tokens[tokens != IGNORE_INDEX] if name == "labels" else tokens
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        ignored = f", or {IGNORE_INDEX}" if name == "labels" else ""
        raise ValueError(
            f"{name} contains {wrong[0]}; ids are 0 to {vocab_size - 1} with this "
            f"vocabulary{ignored}"
        )


class _WithoutInit(TorchFunctionMode):
    """Skip torch.nn.init, whose first call on meta imports torch._dynamo for over a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def meta_model(config: ModelConfig) -> LanguageModel:
    """Build a model on the meta device: shapes, without storage or initialization."""
    with torch.device("meta"), _WithoutInit():
        return LanguageModel(config)
