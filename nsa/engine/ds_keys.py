"""Keys of DeepSpeed's JSON: the names that the installed DeepSpeed reads, and those refused here.

DeepSpeed ignores unknown keys. Their names come from its pydantic models, and elsewhere from
recording the keys that its parser looks up.
"""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args

import deepspeed
import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, WandbConfig
from deepspeed.runtime import config as runtime_config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel

from nsa.engine.resolve import walk

MODELS: dict[str, type[BaseModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    "comms_logger": CommsLoggerConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
    "csv_monitor": CSVConfig,
}
WITHOUT_MODEL = ("activation_checkpointing", "aio", "checkpoint", "data_types", "flops_profiler")
OF_MUON = ("muon_lr", "momentum", "ns_method")

# Keys that would change the numbers or lose data why, and what to do.
REFUSED = {
    "scheduler": "the recipe sets the learning rate; remove it and set train.learning_rate, "
    "train.min_learning_rate and train.warmup_steps",
    "torch_autocast": "the recipe sets the precision; remove it and set train.precision",
    "data_types.param_dtype": "the recipe sets the precision; remove it and set train.precision",
    "fp16.fp16_master_weights_and_grads": "loses the fp32 master weights; remove it",
    "bf16.check_grad_overflow": "a step with non-finite gradients must be skipped; remove it",
    "zero_optimization.compute_grad_norm": "without the norm such a step is not skipped; remove it",
    "checkpoint.load_universal": "remove it; use --resume --universal",
    "zero_optimization.elastic_checkpoint": "remove it; use --resume --universal",
    "tensorboard": "remove it and set monitor.tensorboard",
}
OTHER_WAYS = (
    *("autotuning", "compile", "data_efficiency", "expert_parallel", "hybrid_engine"),
    *("pipeline", "tensor_parallel", "weight_quantization", "zero_optimization.zenflow"),
)
REFUSED |= dict.fromkeys(
    OTHER_WAYS, "it starts another way of training, which the recipe does not support; remove it"
)


def key_error(path: str, value: Any) -> str | None:
    """Return the problem with a key or its value's type, and the fix; None if valid."""
    if path in REFUSED:
        return REFUSED[path]
    if path in renamed_keys():
        return f'this is an old name; write "{renamed_keys()[path]}"'
    *parents, name = path.split(".")
    siblings = known_keys()
    for parent in parents:
        nested = siblings.get(parent) or {}
        if not isinstance(nested, dict):
            return f"{parent} is a single value, not a block; write a value"
        siblings = nested
    if name in siblings:
        if isinstance(siblings[name], dict) and not isinstance(value, dict):
            return "this is a block; write an object: {…}"
        if isinstance(siblings[name], bool) and not isinstance(value, bool) and value != "auto":
            return "this is a switch; write true or false"
        return None
    if not siblings:  # inside a block that is refused as a whole
        return None
    paths = [known for known, _ in walk(known_keys())]
    near = [known for known in paths if known.split(".")[-1] == name]
    near = near if len(near) == 1 else get_close_matches(name.lower(), siblings, 1, 0.6)
    fix = f'did you mean "{near[0]}"? If not, remove it' if near else "remove it"
    return f"DeepSpeed {deepspeed.__version__} has no such key; {fix}"


class _Recorder(dict[str, Any]):
    """A dictionary that records which keys are looked up, and with which default."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.looked_up: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        self.looked_up.setdefault(key, default)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.looked_up.setdefault(str(key), None)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # records `name in config.keys()` too


@cache
def known_keys() -> dict[str, Any]:
    """Return every key that DeepSpeed reads, with its default or its nested keys."""
    blocks = {name: _Recorder() for name in WITHOUT_MODEL}
    blocks["optimizer"] = _Recorder({"type": "adamw"})
    minimal = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    config = _Recorder(minimal | blocks)
    runtime_config.DeepSpeedConfig(config)
    known: dict[str, Any] = {
        key: None if default == {} else default for key, default in config.looked_up.items()
    }
    known |= {name: dict(block.looked_up) for name, block in blocks.items()}
    known["timers"] = {}
    for path, model in MODELS.items():
        *parents, name = path.split(".")
        block = known[parents[0]] if parents else known
        block[name] = _fields(model)
    adamw = [name for name in inspect.signature(torch.optim.AdamW).parameters if name != "params"]
    known["optimizer"]["params"] = dict.fromkeys([*adamw, "torch_adam", *OF_MUON])
    # DeepSpeed looks up those that it has removed, to refuse them.
    removed = getattr(runtime_config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {})
    return {name: nested for name, nested in known.items() if name not in removed}


@cache
def renamed_keys() -> dict[str, str]:
    """Return deprecated keys and their replacements."""
    renamed = {"bfloat16": "bf16"}
    for path, model in MODELS.items():
        for name, field in model.model_fields.items():
            new = _replacement(field) or field.alias
            if new:
                alias = getattr(model.model_fields.get(new), "alias", None)
                renamed[f"{path}.{name}"] = alias or new
    return renamed


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    """Return the fields of a pydantic model, nested models included, without deprecated ones."""
    names: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if not _replacement(field):
            types = [field.annotation, *get_args(field.annotation)]
            nested = [t for t in types if isinstance(t, type) and issubclass(t, BaseModel)]
            names[field.alias or name] = _fields(nested[0]) if nested else None
    return names


def _replacement(field: Any) -> str:
    extra = field.json_schema_extra or {}
    return str(extra["new_param"]) if extra.get("deprecated") else ""
