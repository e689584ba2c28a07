"""Remedies for selection that is not learned, as variants of the tasks: changes to a built model.

Each changes NSA as in the paper in one way. None is a setting of the library.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.model import LanguageModel
from nsa.model.attention import NSAttention, attention_layer
from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.compressor import Compressor
from nsa.model.rotary import Rotary, apply_rotary
from nsa.ops import blockwise

REMEDIES = (
    "dense first",
    "window, then global layer",
    "global, then window layer",
    "mean of pre-RoPE keys",
    "unrotated mean",
    "convolution",
    "gated values",
    "gates favour selected",
    "noise",
    "gates learn faster",
)


class PreRopeMean(Compressor):
    """The mean of pre-RoPE keys, rotated at the block's last position."""

    rotate_first = False

    def compress_blocks(self, k: Tensor, v: Tensor, last: Rotary) -> tuple[Tensor, Tensor]:
        return apply_rotary(k.mean(2), last), v.mean(2)


class UnrotatedMean(Compressor):
    """The mean of pre-RoPE keys, not rotated: queries compare at an unknown distance."""

    rotate_first = False

    def compress_blocks(self, k: Tensor, v: Tensor, last: Rotary) -> tuple[Tensor, Tensor]:
        return k.mean(2), v.mean(2)


class Convolution(Compressor):
    """A causal depthwise convolution of four tokens before the mean; starts as the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 4))
        nn.init.ones_(self.weight[:, -1])

    def forward(self, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        x = F.pad(k.flatten(2).transpose(1, 2), (3, 0))  # [B, K · D, T + 3]
        x = F.conv1d(x, self.weight[:, None], groups=len(self.weight))
        return super().forward(x.transpose(1, 2).unflatten(2, k.shape[2:]), v, metadata)

    def compress_blocks(self, k: Tensor, v: Tensor, last: Rotary) -> tuple[Tensor, Tensor]:
        return k.mean(2), v.mean(2)


class GatedValues(Compressor):
    """The mean of keys; values weighted by a softmax of a learned score of each."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.score = nn.Linear(size, 1, bias=False)
        nn.init.zeros_(self.score.weight)

    def compress_blocks(self, k: Tensor, v: Tensor, last: Rotary) -> tuple[Tensor, Tensor]:
        return k.mean(2), (self.score(v).softmax(2) * v).sum(2)


def apply_remedy(model: LanguageModel, name: str) -> None:
    """Change a model of NSA as in the paper."""
    config = model.config
    kv, size = config.kv_heads, config.head_dim
    compressors = {
        "mean of pre-RoPE keys": PreRopeMean,
        "unrotated mean": UnrotatedMean,
        "convolution": lambda: Convolution(kv * size),
        "gated values": lambda: GatedValues(size),
    }
    orders = {
        "window, then global layer": ("win", "cmp+sel"),
        "global, then window layer": ("cmp+sel", "win"),
    }
    if name in orders:
        for block, branches in zip(model.blocks, orders[name], strict=True):
            attention = replace(config.attention, branches=branches)
            block.attention = attention_layer(replace(config, attention=attention))
        model._initialize()
    for block in model.blocks:
        attention = block.attention
        if name in compressors:
            attention.compress = compressors[name]()
            pre_rope = not attention.compress.rotate_first
            attention.layout = attention.layout._replace(
                mean=False, pre_rope=pre_rope, first_copy=int(pre_rope)
            )
        if name == "gates favour selected":
            attention.attend = _favour_selected(attention)


def _favour_selected(attention: NSAttention):
    attend = attention.attend

    def changed(q: Tensor, gates: Tensor, kv, metadata: AttentionMetadata) -> Tensor:
        compressed, selected, window = gates.unbind(-1)
        odds = 7.389 * selected / (1 - selected)  # e² times: 0.88 instead of 0.5 at the start
        return attend(q, torch.stack([compressed, odds / (1 + odds), window], -1), kv, metadata)

    return changed


def on_step(model: LanguageModel, name: str, progress: float) -> None:
    """Change what changes during training; `progress` is the fraction of steps done."""
    if name == "dense first":
        top = 10_000 if progress < 0.5 else model.config.attention.spec.select_top
        for block in model.blocks:
            block.attention.spec = replace(block.attention.spec, select_top=top)
    if name == "noise":
        NOISE[0] = max(0.0, 1 - 2 * progress)


NOISE = [0.0]  # scale of the Gumbel noise on the logarithm of importance
_sum_overlaps = blockwise.sum_overlaps


def _noisy_overlaps(p: Tensor, blocks: Tensor, weights: Tensor) -> Tensor:
    importance = _sum_overlaps(p, blocks, weights)
    if not NOISE[0]:
        return importance
    gumbel = -torch.log(-torch.log(torch.rand_like(importance).clamp(1e-6, 1 - 1e-6)))
    return importance * torch.exp(NOISE[0] * gumbel)


blockwise.sum_overlaps = _noisy_overlaps


def parameter_groups(model: LanguageModel, name: str) -> list[dict]:
    """Return the optimizer's groups; `scale` multiplies the learning rate."""
    fast = [p for n, p in model.named_parameters() if "gates" in n or "compress" in n]
    ids = {id(p) for p in fast}
    rest = [p for p in model.parameters() if id(p) not in ids]
    return (
        [{"params": rest, "scale": 1.0}, {"params": fast, "scale": 5.0}]
        if name == "gates learn faster"
        else [{"params": [*model.parameters()], "scale": 1.0}]
    )
