"""Rotary position embeddings (RoPE): tables of cosines and sines, and their application."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.model.config import ModelConfig
from nsa.ops.rotary import rotate


class Rotary(NamedTuple):
    """Tables of cosines and sines, float32 [positions, 1, head_dim / 2]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, position: Tensor, config: ModelConfig) -> Rotary:
        frequency, factor = _frequencies(config, position.device)
        angle = position[:, None].float() * frequency
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return cls(cos, sin) if factor == 1.0 else cls(cos * factor, sin * factor)

    def none(self) -> Rotary:
        """Return tables of the same shape that rotate by nothing."""
        return Rotary(torch.ones_like(self.cos), torch.zeros_like(self.sin))


def _frequencies(config: ModelConfig, device: torch.device) -> tuple[Tensor, float]:
    """Return each pair's angle per position [head_dim / 2], and a factor of cosines and sines."""
    if config.rope_type == "default":
        exponent = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
        return config.rope_theta ** (-exponent / config.head_dim), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # a second to import

    scaling = {"rope_theta": config.rope_theta, **(config.rope_extension or {})}
    like = SimpleNamespace(  # of a transformers config, what these functions read
        hidden_size=config.width,
        num_attention_heads=config.heads,
        head_dim=config.head_dim,
        rope_parameters=scaling,
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[config.rope_type](like, device)


def apply_rotary(x_BTHD: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the two halves of each head as pairs, in at least float32."""
    return rotate(x_BTHD, *rotary).to(x_BTHD.dtype)
