"""The language model, its attention layer and its configuration."""

from nsa.model.attention import NSAttention
from nsa.model.config import AttentionConfig, ModelConfig
from nsa.model.count import flops_per_token, parameter_count
from nsa.model.language_model import LanguageModel

__all__ = [
    "AttentionConfig",
    "LanguageModel",
    "ModelConfig",
    "NSAttention",
    "flops_per_token",
    "parameter_count",
]
