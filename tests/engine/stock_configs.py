"""DeepSpeed configs that users bring along, in `stock/`: as other projects ship them.

Transformers: its documentation of DeepSpeed and tests/deepspeed; axolotl: deepspeed_configs;
LLaMA-Factory: examples/deepspeed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from nsa.engine.config import RunConfig
from nsa.engine.ds_config import resolve_ds_config

Config = dict[str, Any]
STOCK: dict[str, Config] = {
    file.stem: json.loads(file.read_text())
    for file in sorted(Path(__file__).with_name("stock").glob("*.json"))
}
REFUSED_IN = {
    "transformers_zero1": ["scheduler", "optimizer.params.torch_adam"],
    "axolotl_zero2": [],
    "axolotl_zero3_bf16": [
        f"zero_optimization.{name}"
        for name in (
            *("prefetch_bucket_size", "param_persistence_threshold", "reduce_bucket_size"),
        )
    ],
    "llama_factory_z3": [
        *("comms_config", "monitor_config", "zero_optimization.reduce_bucket_size"),
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
    ],
}


def refused_keys(config: Config) -> list[str]:
    """Return the keys that `resolve_ds_config` refuses, one a line."""
    try:
        resolve_ds_config(config, RunConfig(), world_size=1)
    except ValueError as error:
        return re.findall(r"^.*?([\w.]+)(?: = | is missing)", str(error), re.M)
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
