"""The language model and its configuration."""

from nsa.model.config import AttentionConfig, ModelConfig
from nsa.model.count import flops_per_token, parameter_count
from nsa.model.language_model import LanguageModel

__all__ = ["AttentionConfig", "LanguageModel", "ModelConfig", "flops_per_token", "parameter_count"]
