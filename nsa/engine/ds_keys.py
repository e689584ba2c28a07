"""Keys of DeepSpeed's JSON: the names that the installed DeepSpeed reads, and those refused here.

DeepSpeed ignores unknown keys. Their names come from its pydantic models, and elsewhere from
recording the keys that its parser looks up.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
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
OTHER_WAYS = (
    *("autotuning", "compile", "data_efficiency", "expert_parallel", "hybrid_engine"),
    *("pipeline", "tensor_parallel", "weight_quantization", "zero_optimization.zenflow"),
)

# Keys that would change the numbers or lose data: why, and what to do.
REFUSED = {
    "bfloat16": 'write "bf16"',
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
    **dict.fromkeys(
        OTHER_WAYS,
        "it starts another way of training, which the recipe does not support; remove it",
    ),
}


def key_problems(
    block: dict[str, Any], known: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the path of each key that is refused or unknown or no block, and why and the fix."""
    for key, value in block.items():
        path = f"{prefix}{key}"
        if path in REFUSED:
            yield path, REFUSED[path]
        elif key not in known:
            near = get_close_matches(key.lower(), known, 1)
            fix = f'did you mean "{near[0]}"? If not, remove it' if near else "remove it"
            yield path, f"DeepSpeed {deepspeed.__version__} has no such key; {fix}"
        elif isinstance(known[key], dict):
            if isinstance(value, dict):
                yield from key_problems(value, known[key], f"{path}.")
            else:
                yield path, "this is a block; write an object: {…}"
        elif isinstance(value, dict):
            yield path, "this is a single value, not a block; write a value"
        elif isinstance(known[key], bool) and not isinstance(value, bool) and value != "auto":
            yield path, "this is a switch; write true or false"


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


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    """Return the fields of a pydantic model, nested models included, without deprecated ones."""
    names: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        extra: Any = field.json_schema_extra or {}
        if not extra.get("deprecated"):
            types = [field.annotation, *get_args(field.annotation)]
            nested = [t for t in types if isinstance(t, type) and issubclass(t, BaseModel)]
            names[field.alias or name] = _fields(nested[0]) if nested else None
    return names
