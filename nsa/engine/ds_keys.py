"""Keys of DeepSpeed's JSON: which names exist, and which are refused or without effect, and why.

Names come from the installed DeepSpeed: from its pydantic models, and elsewhere from recording the
keys that its parser looks up. Where each has an effect was read from the source of 0.19.8.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, NamedTuple, get_args

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
from nsa.engine.zero_mode import ZeroMode

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
MUON = "muon_lr momentum ns_method"  # parameters that only Muon reads
REMOVED: dict[str, str] = getattr(runtime_config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {})


def key_error(path: str, value: Any) -> str | None:
    """Return the problem with a key's name or its value's type, and the fix; None if valid."""
    if path in REMOVED:
        return f"DeepSpeed {deepspeed.__version__} no longer has it; {REMOVED[path]}"
    if path in renamed_keys():
        number = " with a number" if value == "auto" else ""
        return f'this is an old name; write "{renamed_keys()[path]}"{number}'
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
    known |= {"sequence_parallel_size": None, "timers": {}}
    for path, model in MODELS.items():
        *parents, name = path.split(".")
        block = known[parents[0]] if parents else known
        block[name] = _fields(model)
    adamw = [name for name in inspect.signature(torch.optim.AdamW).parameters if name != "params"]
    extra = ["torch_adam", "adam_w_mode", "max_grad_norm", *MUON.split()]
    known["optimizer"]["params"] = dict.fromkeys(adamw + extra)
    return {name: nested for name, nested in known.items() if name not in REMOVED}


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


class Refusal(NamedTuple):
    """Keys to refuse, the reason (with a fix other than "remove it"), and the condition."""

    keys: str  # dotted patterns, separated by spaces
    reason: str
    applies_in: Callable[[ZeroMode], bool] = lambda mode: True


def refusal_of(path: str, mode: ZeroMode) -> str | None:
    """Return why a key is refused in this mode, and the fix; None if it has an effect."""
    for keys, reason, applies_in in REFUSALS:
        if applies_in(mode) and any(fnmatchcase(path, key) for key in keys.split()):
            return reason if "; remove it" in reason else f"{reason}; remove it"
    return None


def _in_block(block: str, names: str) -> str:
    return " ".join(f"{block}.{name}" for name in names.split())


_zero = partial(_in_block, "zero_optimization")
_params = partial(_in_block, "optimizer.params")
NOT_STARTED = (
    "autotuning compile data_efficiency dataloader_drop_last datastates_ckpt expert_parallel "
    "hybrid_engine pipeline tensor_parallel seq_parallel_communication_data_type "
    "managed_gradient_accumulation sequence_parallel_size weight_quantization "
    "use_data_before_expert_parallelism checkpoint.parallel_write checkpoint.writer "
    "fp16.fp16_master_weights_and_grads "
) + _zero("zenflow legacy_stage1")
NEVER_READ = (
    "disable_allgather vocabulary_size zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
    "optimizer.legacy_fusion optimizer.params.adam_w_mode "
) + _zero("allgather_* save_muon_momentum_buffer_in_memory")
BUCKETS = _zero(
    "reduce_bucket_size overlap_comm contiguous_gradients reduce_scatter parameter_alignment "
    "use_multi_rank_bucket_allreduce round_robin_gradients"
)
STAGE_3 = _zero(
    "stage3_* zero_* sub_group_size offload_param memory_efficient_linear leaf_module "
    "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings "
    "enable_sanity_checks"
)
ADAMW = "fused foreach amsgrad maximize capturable differentiable"
REFUSALS = (
    # Set by the recipe or another part of the run.
    Refusal(
        "scheduler",
        "the recipe sets the learning-rate schedule; remove it and set train.learning_rate, "
        "train.min_learning_rate and train.warmup_steps",
    ),
    Refusal("tensorboard", "the recipe sets it; remove it and set monitor.tensorboard"),
    Refusal(
        "torch_autocast data_types.param_dtype",
        "the recipe sets the precision; remove it and set train.precision",
    ),
    Refusal(
        "optimizer.params.max_grad_norm",
        "DeepSpeed only reads gradient_clipping; remove it, "
        'write "gradient_clipping": "auto" and set train.clip',
    ),
    Refusal(
        f"checkpoint.load_universal {_zero('elastic_checkpoint')}",
        "each load converts the checkpoint if needed; remove it; use --resume --universal",
    ),
    Refusal(_zero("compute_grad_norm"), "the run logs grad_norm, so it is always computed"),
    # Without effect in any mode.
    Refusal(NOT_STARTED, "it configures a part of DeepSpeed that this project does not start"),
    Refusal(NEVER_READ, "no effect in any configuration that is accepted here"),
    # Without effect in some modes.
    Refusal(
        "optimizer.type",
        "DeepSpeed clips Muon's gradients only in stage 1 with bf16 weights and fp32 accumulation; "
        "elsewhere it clips the update, which shrinks it more than a hundredfold; remove it, or "
        "use ds_configs/zero1_muon.json with train.precision=bf16",
        lambda mode: mode.muon and not mode.bf16_optimizer,
    ),
    Refusal(_params(MUON), "only Muon reads it", lambda mode: not mode.muon),
    Refusal(_params(ADAMW), "not read with Muon", lambda mode: mode.muon),
    Refusal(STAGE_3, "no effect below stage 3", lambda mode: mode.stage < 3),
    Refusal(
        f"{BUCKETS} {_zero('offload_optimizer load_from_fp32_weights')}",
        "no effect in stage 0, which all-reduces every gradient after the backward pass",
        lambda mode: mode.stage == 0,
    ),
    Refusal(
        BUCKETS,
        "no effect in stage 1 with bf16 weights and fp32 accumulation: DeepSpeed's BF16_Optimizer "
        "all-reduces every gradient once, after the last micro-batch; remove it, or set "
        'data_types.grad_accum_dtype to "bf16"',
        lambda mode: mode.bf16_optimizer,
    ),
    Refusal(
        _zero("reduce_scatter"),
        "no effect in stages 1 and 2: buckets are always all-reduced",
        lambda mode: mode.stage_1_or_2,
    ),
    Refusal(
        _zero("use_multi_rank_bucket_allreduce round_robin_gradients parameter_alignment"),
        "no effect in stage 3",
        lambda mode: mode.stage == 3,
    ),
    Refusal(
        _zero("ignore_unused_parameters"),
        "only read in stages 1 and 2 with the optimizer offloaded to the CPU",
        lambda mode: not (mode.stage_1_or_2 and "cpu" in mode.devices),
    ),
    Refusal(
        "prescale_gradients gradient_predivide_factor",
        "no effect in stage 1, and DeepSpeed refuses it in stages 2 and 3: buckets are divided by "
        "the number of ranks before they are reduced",
        lambda mode: mode.buckets,
    ),
    Refusal(
        "bf16.*",
        "only read with bf16 weights; remove it, or set train.precision=bf16",
        lambda mode: mode.precision != "bf16",
    ),
    Refusal(
        "bf16.check_grad_overflow",
        "only read in stage 2 and in stage 1 with bf16 accumulation; elsewhere DeepSpeed always "
        "skips a step with non-finite gradients",
        lambda mode: not mode.stage_1_or_2,
    ),
    Refusal(
        "bf16.immediate_grad_update",
        "only read in stage 1 with fp32 accumulation",
        lambda mode: not mode.bf16_optimizer,
    ),
    Refusal(
        "bf16.bf16_*",
        "no effect: master weights and optimizer state stay fp32 in stage 0 and in stage 1 with "
        "fp32 accumulation",
        lambda mode: not mode.buckets,
    ),
    Refusal(
        "fp16.*",
        "only read with fp16 weights; remove it, or set train.precision=fp16",
        lambda mode: mode.precision != "fp16",
    ),
    Refusal(
        "fp16.initial_* fp16.*hysteresis fp16.loss_scale_window fp16.min_loss_scale",
        "no effect with a fixed loss scale; remove it, or remove fp16.loss_scale for a dynamic "
        "scale",
        lambda mode: mode.static_scale,
    ),
    Refusal(
        "fp16.*hysteresis",
        "no effect in stage 0, which halves the loss scale at once",
        lambda mode: mode.stage == 0,
    ),
    Refusal(
        "aio",
        "only read with something offloaded to NVMe",
        lambda mode: "nvme" not in mode.devices,
    ),
)
