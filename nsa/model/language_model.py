"""The Llama-like language model that the recipes train."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.model.attention import NSAttention
from nsa.model.block import Block
from nsa.model.compressor import MLPCompressor
from nsa.model.config import BRANCHES, ModelConfig
from nsa.model.layout import Layout
from nsa.model.loss import linear_cross_entropy
from nsa.model.segments import segment_runner
from nsa.model.sequence_parallel import SequenceParallel
from nsa.ops.checks import check_documents


class LanguageModel(nn.Module):
    """Tokens to logits, or to a loss where labels are given.

    Embedding, final norm and head stay outside the checkpoint segments, and every other parameter
    is in exactly one: that is what lets ZeRO-2 live with a reentrant backward pass. The forward
    pass keeps no state, so running a segment again computes the same thing.

    Where ranks share a `sequence`, input_ids, labels and logits are this rank's part of each,
    cu_seqlens is that of the whole, and the loss is the same mean on all of them.
    """

    def __init__(self, config: ModelConfig, sequence: SequenceParallel | None = None) -> None:
        super().__init__()
        config.validate()
        if sequence is not None and config.kv_heads % sequence.size:
            raise ValueError(
                f"model.kv_heads = {config.kv_heads} cannot be divided over {sequence.size} ranks "
                "that share a sequence: each attends with whole KV heads"
            )
        self.config, self.sequence = config, sequence
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self._initialise()

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Logits [B, T, V]; with `labels` [B, T] the mean loss over those that are not -100.

        labels[b, t] is the token that follows input_ids[b, t]: they are already shifted. Where
        every label is -100 the loss is 0.
        """
        if labels is not None and labels.shape != input_ids.shape:
            raise ValueError(
                f"labels has shape {tuple(labels.shape)} and input_ids {tuple(input_ids.shape)}; "
                "labels[b, t] is the token after input_ids[b, t]"
            )
        x = self.hidden(input_ids, cu_seqlens)
        if labels is None:
            return F.linear(x, self.embed.weight)
        return linear_cross_entropy(
            x.flatten(0, 1), self.embed.weight, labels.flatten(), self.sequence
        )

    def hidden(self, input_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """What the head reads, [B, T, width]: all logits of a long text would not fit."""
        config = self.config
        if input_ids.dim() != 2 or input_ids.shape[1] < 1:
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; it must be [B, T]")
        seq_len = input_ids.shape[1] * (1 if self.sequence is None else self.sequence.size)
        check_documents(cu_seqlens, input_ids[:, :1].expand(-1, seq_len), "input_ids")
        layout = Layout.of(
            seq_len,
            cu_seqlens,
            config.attention.spec if config.attention.kind == "nsa" else None,
            config.head_dim,
            config.rope_theta,
            input_ids.device,
            self.sequence,
        )
        x = self.embed(input_ids)
        recompute = torch.is_grad_enabled() and x.requires_grad
        run = segment_runner(config.activation_checkpointing if recompute else "none")
        for block in self.blocks:
            x = run(partial(block, layout=layout), x)
        return self.norm(x)

    @torch.no_grad()
    def _initialise(self) -> None:
        """Weights at `init_std`, so that a sum over the width keeps the stream's scale near 1.

        Projections back into the stream are smaller by √(2·layers): that many of them add up.
        Gates start at 0, so every branch has the weight ½ and none is favoured before it has
        learned anything. The positions of an mlp φ start like embeddings.
        """
        std, back = self.config.init_std, (2 * self.config.layers) ** -0.5
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, MLPCompressor):
                nn.init.normal_(module.position, std=std)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.attention.o.weight.mul_(back)
            block.mlp.down.weight.mul_(back)
            if isinstance(block.attention, NSAttention):
                nn.init.zeros_(block.attention.gates.weight)

    def sparse_layers(self) -> dict[str, NSAttention]:
        """The attention of each layer by name, for who watches it.

        Empty for the dense twin, and where a branch is missing: there is no choice or mix to watch.
        """
        return {
            name: module
            for name, module in self.named_modules()
            if isinstance(module, NSAttention) and module.branches == BRANCHES
        }
