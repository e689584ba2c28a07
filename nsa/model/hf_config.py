"""Hugging Face configuration: `ModelConfig` as a transformers `PreTrainedConfig`."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig

from nsa.model.config import INIT_STD, AttentionConfig, ModelConfig
from nsa.spec import NSASpec
from nsa.withdrawn import drop_withdrawn

# config.json stores the model's shape, not how it is trained.
SHAPE = tuple(
    field.name for field in fields(ModelConfig) if field.name != "activation_checkpointing"
)


class NSAConfig(PreTrainedConfig):
    """`ModelConfig` under Hugging Face's names, with its own names as aliases.

    Older exports hold the aliases in config.json; both load.
    """

    model_type: ClassVar[str] = "nsa"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "width": "hidden_size",
        "mlp_width": "intermediate_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "norm_eps": "rms_norm_eps",
        "init_std": "initializer_range",
        "tied_head": "tie_word_embeddings",
    }

    def __init__(
        self,
        attention: dict[str, Any] | None = None,  # AttentionConfig's settings; `spec`: NSASpec's
        max_position_embeddings: int = 2_048,  # training sequence length; longer inputs work
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        initializer_range: float = INIT_STD,  # standard deviation of a new model's weights
        **kwargs: Any,
    ) -> None:
        default = ModelConfig()
        for name in SHAPE:
            by_alias = kwargs.pop(name, getattr(default, name))
            setattr(self, name, kwargs.pop(self.attribute_map.get(name, name), by_alias))
        self.attention = asdict(_attention_config(attention or {}))
        self.max_position_embeddings = max_position_embeddings
        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id
        self.pad_token_id = pad_token_id
        self.initializer_range = initializer_range
        self.auto_map: dict[str, str] = {}  # TRL reads it; empty without remote code
        super().__init__(**kwargs)
        self.model_config().validate()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Load a saved configuration; kwargs override it, `attention` key by key."""
        if (overrides := kwargs.get("attention")) is not None:
            saved = asdict(_attention_config(config_dict.get("attention") or {}))
            overrides = _check_names(AttentionConfig, overrides, "attention")
            spec = saved["spec"] | (overrides.get("spec") or {})
            kwargs["attention"] = asdict(_attention_config({**saved, **overrides, "spec": spec}))
        loaded = super().from_dict(config_dict, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        config.model_config().validate()  # kwargs were applied after __init__
        return loaded

    @classmethod
    def of(cls, config: ModelConfig, **more: Any) -> NSAConfig:
        """Convert a `ModelConfig`; the backend is reset to "auto", the selector loss to 0.

        An index keeps its selector loss: nothing else trains it.
        """
        attention = replace(config.attention, backend="auto")
        if not attention.has_index:
            attention.selector_loss = 0.0
        tree = asdict(replace(config, attention=attention))
        return cls(**{name: tree[name] for name in SHAPE}, **more)

    def model_config(self) -> ModelConfig:
        shape = {name: getattr(self, name) for name in SHAPE if name != "attention"}
        return ModelConfig(**shape, attention=_attention_config(self.attention))

    def to_dict(self) -> dict[str, Any]:
        """Drop auto_map from config.json unless the model's code is saved with it."""
        tree = super().to_dict()
        if self._auto_class is None:
            tree.pop("auto_map", None)
        return tree


def _attention_config(settings: dict[str, Any]) -> AttentionConfig:
    settings, lost = drop_withdrawn(settings, "model.attention")
    if lost:
        raise ValueError(f"config.json: {lost[0]}; use the version that exported it")
    settings = _check_names(AttentionConfig, settings, "attention")
    spec = NSASpec(**_check_names(NSASpec, settings.get("spec") or {}, "attention.spec"))
    return AttentionConfig(**{**settings, "spec": spec})


def _check_names(kind: type, settings: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the settings, or raise a ValueError for a name that `kind` does not have."""
    if not isinstance(settings, dict):
        raise ValueError(f"{path} = {settings!r}: must be a dict of settings")
    names = [field.name for field in fields(kind)]
    for name in settings:
        if name not in names:
            raise ValueError(f"{path}.{name}: no such setting; choose one of {', '.join(names)}")
    return settings


def register_peft_targets() -> None:
    """Register a Llama's `target_modules` in PEFT, without "_proj", and the embedding."""
    try:
        from peft.utils import constants
    except ImportError:
        return
    for table in vars(constants).values():
        llama = table.get("llama") if isinstance(table, dict) else None
        if isinstance(llama, list) and all(name.endswith("_proj") for name in llama):
            table.setdefault(NSAConfig.model_type, [name.removesuffix("_proj") for name in llama])
    # The names by which PEFT finds an embedding, to save it or to warn that the head is tied.
    if "embed" not in constants.EMBEDDING_LAYER_NAMES:
        constants.EMBEDDING_LAYER_NAMES.append("embed")
