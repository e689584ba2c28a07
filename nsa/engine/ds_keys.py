"""Which keys a DeepSpeed JSON may hold, and which do nothing in a given setting.

The names come from DeepSpeed itself: from its pydantic models where it has them, and elsewhere
from watching which keys its parser asks for. What does nothing was read from the source of
DeepSpeed 0.19.8, so that is written down here, each with its reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, get_args

import deepspeed
import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CometConfig, WandbConfig
from deepspeed.runtime import config as runtime_config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel

MODELS: dict[str, type[BaseModel]] = {  # blocks that DeepSpeed itself describes
    "zero_optimization": DeepSpeedZeroConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    "comms_logger": CommsLoggerConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
}
PARSED = ("activation_checkpointing", "aio", "checkpoint", "data_types", "flops_profiler")
REMOVED: dict[str, str] = getattr(runtime_config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {})


@dataclass(frozen=True)
class Setting:
    """What decides which of DeepSpeed's optimizers serves a run, and so which keys it reads."""

    stage: int
    precision: str  # "bf16", "fp16" or "fp32"
    accumulation: str  # what gradients accumulate in
    overlap: bool = False  # reduction during the backward pass
    static_scale: bool = False  # fp16 with a fixed loss scale
    devices: frozenset[str] = frozenset()  # where the optimizer and the parameters are offloaded to

    @property
    def bf16_optimizer(self) -> bool:
        """Stage 1 with bf16 weights and fp32 accumulation has an optimizer of its own."""
        return (
            (self.stage, self.precision, self.accumulation) == (1, "bf16", "fp32")
        ) and "cpu" not in self.devices

    @property
    def buckets(self) -> bool:
        """Whether gradients are reduced through buckets of `reduce_bucket_size` elements."""
        return self.stage > 0 and not self.bf16_optimizer

    @property
    def stage_1_or_2(self) -> bool:
        """Whether DeepSpeed's optimizer of the stages 1 and 2 is the one in charge."""
        return self.stage in (1, 2) and self.buckets


@dataclass(frozen=True)
class Refusal:
    """Keys that are not for this project's JSON, when, why, and what to do instead."""

    keys: tuple[str, ...]  # dotted; * stands for any letters
    why: str
    fix: str = "remove it"
    when: Callable[[Setting], bool] = lambda setting: True

    def applies(self, path: str, setting: Setting) -> bool:
        """Whether `path`, written down in `setting`, is what this refuses."""
        return any(fnmatchcase(path, key) for key in self.keys) and self.when(setting)


def _zero(*names: str) -> tuple[str, ...]:
    return tuple(f"zero_optimization.{name}" for name in names)


ELSEWHERE = (
    Refusal(
        ("scheduler",),
        "the recipe owns the learning rate's schedule",
        "remove it and set train.learning_rate, train.min_learning_rate and train.warmup_steps",
    ),
    Refusal(("tensorboard",), "the recipe owns it", "remove it and set monitor.tensorboard"),
    Refusal(
        ("csv_monitor",), "the run writes its own metrics.csv", "remove it and set monitor.csv"
    ),
    Refusal(
        ("torch_autocast", "data_types.param_dtype"),
        "the recipe owns the precision",
        "remove it and set train.precision",
    ),
    Refusal(
        ("managed_gradient_accumulation",),
        "the training loop leaves the accumulation boundary to DeepSpeed",
        "remove it and set train.accumulation",
    ),
    Refusal(
        ("optimizer.params.max_grad_norm",),
        "DeepSpeed clips by gradient_clipping alone",
        'remove it, write "gradient_clipping": "auto" and set train.clip',
    ),
    Refusal(
        ("dataloader_drop_last", "data_efficiency"),
        "batches don't come from DeepSpeed's loader",
        "remove it; data.* says where they come from",
    ),
    Refusal(
        (
            "autotuning",
            "compile",
            "expert_parallel",
            "hybrid_engine",
            "pipeline",
            "seq_parallel_communication_data_type",
            "sequence_parallel_size",
            "tensor_parallel",
            "use_data_before_expert_parallelism",
            "weight_quantization",
            "checkpoint.parallel_write",
        ),
        "it configures a part of DeepSpeed that this project doesn't start",
    ),
    Refusal(
        ("checkpoint.writer", "datastates_ckpt"),
        "saving through anything but DeepSpeed's default writer failed in trials",
    ),
    Refusal(
        (*_zero("zenflow"), "fp16.fp16_master_weights_and_grads"),
        "it needs DeepSpeed's own CPU Adam, a C++ extension that this project doesn't build",
    ),
    Refusal(
        _zero("legacy_stage1"), "DeepSpeed removed the old stage 1 and stops when asked for it"
    ),
    Refusal(
        _zero("elastic_checkpoint"),
        "it is the old way to change the number of ranks",
        'remove it; a universal checkpoint does that: "checkpoint": {"load_universal": true}',
    ),
    Refusal(
        _zero("compute_grad_norm"), "the run logs the gradient's norm, so it is always computed"
    ),
)
IDLE_EVERYWHERE = (
    Refusal(
        ("disable_allgather", *_zero("allgather_partitions")),
        "it does nothing: DeepSpeed parses it and never looks at it again",
    ),
    Refusal(
        _zero("allgather_bucket_size"),
        "it does nothing: each parameter group is gathered in one collective, whatever its size",
    ),
    Refusal(("vocabulary_size",), "it does nothing but print a warning"),
    Refusal(
        ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
        "it does nothing: it only concerns optimizers other than the AdamW that the JSON asks for",
    ),
    Refusal(
        ("optimizer.legacy_fusion", *_zero("save_muon_momentum_buffer_in_memory")),
        "it does nothing for torch's AdamW",
    ),
)
STAGE_3_KEYS = _zero(
    "stage3_*",
    "zero_*",
    "sub_group_size",
    "offload_param",
    "memory_efficient_linear",
    "pipeline_loading_checkpoint",
    "override_module_apply",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "leaf_module",
)
BUCKET_KEYS = _zero(
    "reduce_bucket_size",
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
    "use_multi_rank_bucket_allreduce",
    "round_robin_gradients",
    "parameter_alignment",
)
IDLE_BY_SETTING = (
    Refusal(STAGE_3_KEYS, "it does nothing below stage 3", when=lambda s: s.stage < 3),
    Refusal(
        (*BUCKET_KEYS, *_zero("offload_optimizer", "load_from_fp32_weights")),
        "it does nothing in stage 0, which all-reduces every gradient after the backward pass",
        when=lambda s: s.stage == 0,
    ),
    Refusal(
        BUCKET_KEYS,
        "it does nothing in stage 1 with bf16 weights and fp32 accumulation: DeepSpeed's "
        "BF16_Optimizer all-reduces every gradient once, after the last micro-batch",
        'remove it, or set data_types.grad_accum_dtype to "bf16"',
        when=lambda s: s.bf16_optimizer,
    ),
    Refusal(
        _zero("reduce_scatter"),
        "it does nothing in stages 1 and 2: buckets are all-reduced whatever it says",
        when=lambda s: s.stage_1_or_2,
    ),
    Refusal(
        _zero("use_multi_rank_bucket_allreduce", "round_robin_gradients", "parameter_alignment"),
        "it does nothing in stage 3",
        when=lambda s: s.stage == 3,
    ),
    Refusal(
        _zero("ignore_unused_parameters"),
        "it does nothing but in stages 1 and 2 with the optimizer offloaded to the CPU",
        when=lambda s: not (s.stage_1_or_2 and "cpu" in s.devices),
    ),
    Refusal(
        ("prescale_gradients", "gradient_predivide_factor"),
        "it does nothing in stage 1 and stops DeepSpeed in stages 2 and 3: buckets are divided by "
        "the number of ranks before they are reduced",
        when=lambda s: s.buckets,
    ),
    Refusal(
        ("bf16.*",),
        "it does nothing unless the weights are bf16",
        "remove it or set train.precision=bf16",
        when=lambda s: s.precision != "bf16",
    ),
    Refusal(
        ("bf16.check_grad_overflow",),
        "it does nothing here: DeepSpeed asks in stage 2 and in stage 1 with bf16 accumulation; "
        "elsewhere it always skips a step whose gradients are not finite",
        when=lambda s: not s.stage_1_or_2,
    ),
    Refusal(
        ("bf16.immediate_grad_update",),
        "it does nothing but in stage 1 with fp32 accumulation",
        when=lambda s: not s.bf16_optimizer,
    ),
    Refusal(
        ("bf16.bf16_*",),
        "it does nothing here: master weights and optimizer state stay fp32 in stage 0 and in "
        "stage 1 with fp32 accumulation",
        when=lambda s: not s.buckets,
    ),
    Refusal(
        ("fp16.*",),
        "it does nothing unless the weights are fp16",
        "remove it or set train.precision=fp16",
        when=lambda s: s.precision != "fp16",
    ),
    Refusal(
        ("fp16.initial_*", "fp16.*hysteresis", "fp16.loss_scale_window", "fp16.min_loss_scale"),
        "it does nothing beside a fixed loss scale",
        "remove it, or remove fp16.loss_scale to have the scale adapt",
        when=lambda s: s.static_scale,
    ),
    Refusal(
        ("fp16.*hysteresis",),
        "it does nothing in stage 0, which halves the loss scale at once",
        when=lambda s: s.stage == 0,
    ),
    Refusal(
        ("aio",),
        "it does nothing unless something is offloaded to NVMe",
        when=lambda s: "nvme" not in s.devices,
    ),
)
REFUSALS = (*ELSEWHERE, *IDLE_EVERYWHERE, *IDLE_BY_SETTING)


class _Asked(dict[str, Any]):
    """A dictionary that remembers which keys it was asked for, and with which default."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.keys_asked: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.setdefault(key, default)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.keys_asked.setdefault(str(key), None)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    """The names that a pydantic model reads, without the deprecated, down to the last level."""
    names: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if not _replacement(field):
            inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if kind]
            nested = [kind for kind in inner if isinstance(kind, type) and _is_model(kind)]
            names[field.alias or name] = _fields(nested[0]) if nested else None
    return names


def _is_model(kind: type) -> bool:
    return issubclass(kind, BaseModel)


def _replacement(field: Any) -> str:
    extra = field.json_schema_extra or {}
    return str(extra["new_param"]) if extra.get("deprecated") else ""


@cache
def known_keys() -> dict[str, Any]:
    """Every key that the installed DeepSpeed reads: name → default, or → the names below it."""
    blocks = {name: _Asked() for name in PARSED} | {"optimizer": _Asked({"type": "adamw"})}
    asked = _Asked(
        {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, **blocks}
    )
    runtime_config.DeepSpeedConfig(asked)
    names: dict[str, Any] = {
        key: None if default == {} else default for key, default in asked.keys_asked.items()
    }
    names |= {name: dict(block.keys_asked) for name, block in blocks.items()}
    names |= {"sequence_parallel_size": None, "timers": {}}
    for path, model in MODELS.items():
        *parents, name = path.split(".")
        block = names[parents[0]] if parents else names
        block[name] = _fields(model)
    adamw = [name for name in inspect.signature(torch.optim.AdamW).parameters if name != "params"]
    names["optimizer"]["params"] = dict.fromkeys(
        [*adamw, "torch_adam", "adam_w_mode", "max_grad_norm"]
    )
    return {name: below for name, below in names.items() if name not in REMOVED}


@cache
def renamed_keys() -> dict[str, str]:
    """Names that DeepSpeed still takes, or used to take, and the one to write instead."""
    renamed = {"bfloat16": "bf16"}
    for path, model in MODELS.items():
        for name, field in model.model_fields.items():
            instead = _replacement(field) or field.alias
            if instead:
                alias = getattr(model.model_fields.get(instead), "alias", None)
                renamed[f"{path}.{name}"] = alias or instead
    return renamed


def walk(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted path of a nested dictionary with its value, parents before children."""
    for key, value in tree.items():
        yield prefix + key, value
        if isinstance(value, dict):
            yield from walk(value, f"{prefix}{key}.")


def complaint_about_name(path: str) -> str | None:
    """Why `path` is not a key to write down, with the nearest right one; None for a good one."""
    if path in REMOVED:
        return f"DeepSpeed {deepspeed.__version__} no longer has it; {REMOVED[path]}"
    if path in renamed_keys():
        return f'this is an old name; write "{renamed_keys()[path]}"'
    *parents, name = path.split(".")
    siblings = known_keys()
    for parent in parents:
        siblings = siblings[parent] or {}
    if name in siblings or not siblings:  # nothing is known of what stands in a refused block
        return None
    paths = [known for known, _ in walk(known_keys())]
    near = [known for known in paths if known.split(".")[-1] == name]
    near = near if len(near) == 1 else get_close_matches(name.lower(), siblings, 1, 0.6)
    fix = f'did you mean "{near[0]}"? If not, remove it' if near else "remove it"
    return f"DeepSpeed {deepspeed.__version__} has no such key; {fix}"
