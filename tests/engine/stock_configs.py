"""DeepSpeed configs that users bring along: keys and values as other projects ship them.

Transformers: its documentation of DeepSpeed and tests/deepspeed; axolotl: deepspeed_configs;
LLaMA-Factory: examples/deepspeed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from nsa.engine.config import RunConfig
from nsa.engine.ds_config import resolve_ds_config

Config = dict[str, Any]

BATCH = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
)
CLIP = {"gradient_clipping": "auto"}
SCALE = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000}
SCALE |= {"initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
BF16 = {"bf16": {"enabled": "auto"}}
ADAMW = {
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    }
}
ON_CPU = {"device": "cpu", "pin_memory": True}


def schedule(kind: str, *names: str) -> Config:
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", *names)
    return {"scheduler": {"type": kind, "params": dict.fromkeys(names, "auto")}}


TRANSFORMERS = {
    **{"fp16": SCALE, "steps_per_print": 2000, "wall_clock_breakdown": False},
    **BATCH,
    **CLIP,
    **BF16,
    **ADAMW,
}
AXOLOTL = {
    "fp16": SCALE | {"auto_cast": False, "initial_scale_power": 32},
    "wall_clock_breakdown": False,
    **BATCH,
    **BF16,
}
FACTORY = {
    **{"fp16": SCALE, "zero_allow_untested_optimizer": True, "comms_config": {"verbose": False}},
    "monitor_config": {
        **{"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {"enabled": False}}
    },
    **BATCH,
    **CLIP,
    **BF16,
}
STAGE_3 = {
    **{"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9},
    **{"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "stage3_param_persistence_threshold": "auto",
    **{"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9},
    "stage3_gather_16bit_weights_on_model_save": True,
}
BUCKETS = {
    **{"allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False},
    **{"reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True},
    "round_robin_gradients": True,
}


def zero(*blocks: Config, **keys: Any) -> Config:
    return {
        "zero_optimization": {
            key: value for block in (*blocks, keys) for key, value in block.items()
        }
    }


def refused_keys(config: Config) -> list[str]:
    """Return the keys that `resolve_ds_config` refuses, one a line."""
    try:
        resolve_ds_config(config, RunConfig(), world_size=1)
    except ValueError as error:
        return re.findall(r"^ *([\w.]+)(?: = | is missing)", str(error), re.M)
    return []


def fixed(config: Config, refused: Sequence[str]) -> Config:
    """Do what the lines of a refusal say: remove the keys, and use torch's AdamW."""
    result = deepcopy(config)
    for path in refused:
        *parents, name = path.split(".")
        block = result
        for parent in parents:
            block = block[parent]
        block.pop(name, None)
        if name == "torch_adam":
            block[name] = True
    return result


STOCK: dict[str, Config] = {
    "transformers_zero1": TRANSFORMERS | schedule("WarmupLR") | zero(stage=1),
    "transformers_zero2": TRANSFORMERS
    | schedule("WarmupLR")
    | zero(BUCKETS, stage=2, offload_optimizer=ON_CPU, overlap_comm=True),
    "transformers_zero3": TRANSFORMERS
    | schedule("WarmupDecayLR", "total_num_steps")
    | zero(STAGE_3, offload_optimizer=ON_CPU, offload_param=ON_CPU),
    "axolotl_zero1": AXOLOTL | ADAMW | zero(stage=1, overlap_comm=True),
    "axolotl_zero2": AXOLOTL
    | CLIP
    | zero(
        stage=2,
        offload_optimizer={"device": "cpu"},
        contiguous_gradients=True,
        overlap_comm=True,
    ),
    "axolotl_zero3": AXOLOTL
    | CLIP
    | zero(STAGE_3, sub_group_size=0, stage3_max_live_parameters=0, stage3_max_reuse_distance=0),
    "axolotl_zero3_bf16": {"bf16": {"enabled": True}, "wall_clock_breakdown": False}
    | BATCH
    | CLIP
    | zero(
        {key: STAGE_3[key] for key in ("stage", "overlap_comm", "contiguous_gradients")},
        sub_group_size=0,
        reduce_bucket_size="auto",
        prefetch_bucket_size="auto",
        param_persistence_threshold="auto",
        max_live_parameters=0,
        max_reuse_distance=0,
        gather_16bit_weights_on_model_save=True,
    ),
    "llama_factory_z0": FACTORY | zero(BUCKETS, stage=0),
    "llama_factory_z2": FACTORY | zero(BUCKETS, stage=2),
    "llama_factory_z3": FACTORY | zero(STAGE_3, overlap_comm=False),
}
