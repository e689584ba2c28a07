"""DeepSpeed's JSON: load it strictly, fill it from the recipe, check it before the run starts.

DeepSpeed ignores unknown keys and uses its defaults instead. Here they are errors, found by
recording the keys that its parser looks up. The recipe or the JSON sets a number, never both.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.runtime import config as runtime_config
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel, ValidationError

from nsa.engine.config import RunConfig, walk
from nsa.text import printable
from nsa.untrusted import matches, parse_json, read_text

REDUCE_BUCKET = 2**25  # elements: the gradients of 125M parameters in four or five collectives
OPTIMIZER = {"params": {"torch_adam": True, "fused": True}}
OWNED_FIELDS = {  # DeepSpeed key: the field of `train` that sets it
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "gradient_clipping": "clip",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
}
DEFAULTS = {
    "optimizer.type": "AdamW",
    "optimizer.params.betas": [0.9, 0.95],
    "optimizer.params.eps": 1e-8,
}
BLOCKS = ("optimizer", "optimizer.params", "zero_optimization", "bf16", "fp16", "timers")
PYDANTIC: dict[str, type[BaseModel]] = {  # DeepSpeed's classes, which refuse unknown keys
    "zero_optimization": DeepSpeedZeroConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    "comms_logger": CommsLoggerConfig,
}
ADAMW_KEYS = [name for name in inspect.signature(torch.optim.AdamW).parameters if name != "params"]
OTHER_TRAINING = (  # blocks that start another way of training
    *("autotuning", "compile", "data_efficiency", "expert_parallel", "hybrid_engine"),
    *("pipeline", "tensor_parallel", "weight_quantization", "zero_optimization.zenflow"),
)

WITHDRAWN = {
    "comet": "withdrawn in this version; remove it, and use TensorBoard or W&B",
    "csv_monitor": "withdrawn in this version; remove it: metrics.csv has the same numbers",
}
# Keys that would change the numbers or lose data: why, and what to do.
REFUSED = {
    "bfloat16": 'write "bf16"',
    "scheduler": "the recipe sets the learning rate; remove it and set train.learning_rate, "
    "train.min_learning_rate and train.warmup_steps",
    "torch_autocast": "the recipe sets the precision; remove it and set train.precision",
    "data_types.param_dtype": "the recipe sets the precision; remove it and set train.precision",
    "fp16.fp16_master_weights_and_grads": "loses the fp32 master weights; remove it",
    "bf16.check_grad_overflow": "a step with non-finite gradients must be skipped; remove it",
    "zero_optimization.compute_grad_norm": "then a non-finite step is not skipped; remove it",
    "zero_optimization.cpu_offload": 'write "offload_optimizer": {"device": "cpu"}',
    "checkpoint.load_universal": "remove it; use --resume --universal",
    "zero_optimization.elastic_checkpoint": "remove it; use --resume --universal",
    "tensorboard": "remove it and set monitor.tensorboard",
    **WITHDRAWN,
    **getattr(runtime_config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}),  # with DeepSpeed's advice
    **dict.fromkeys(
        OTHER_TRAINING,
        "it starts another way of training, which the recipe does not support; remove it",
    ),
}

Owned = dict[str, tuple[Any, str]]  # DeepSpeed key: the recipe's value, and what sets it
Problems = Iterator[tuple[str, str]]  # path of a key to change; why, and how


@dataclass(frozen=True)
class ZeroMode:
    """What determines DeepSpeed's optimizer class, and so which keys it reads."""

    stage: int
    precision: str  # "bf16", "fp16" or "fp32"
    accumulation: str  # dtype of accumulated gradients
    overlap: bool  # reduction during the backward pass
    offload: bool  # of optimizer or parameters, to the CPU or NVMe

    @property
    def has_buckets(self) -> bool:
        """Whether gradients are reduced in buckets of `reduce_bucket_size` elements.

        Stage 0 has none, and neither has BF16_Optimizer.
        """
        mode = (self.stage, self.precision, self.accumulation, self.offload)
        return self.stage > 0 and mode != (1, "bf16", "fp32", False)


def zero_mode(resolved: Mapping[str, Any]) -> ZeroMode:
    """Return the ZeroMode of a config whose stage and precision are filled in."""
    zero = resolved["zero_optimization"]
    precision = next((p for p in ("bf16", "fp16") if resolved[p]["enabled"]), "fp32")
    offloads = [block_of(zero, name) for name in ("offload_optimizer", "offload_param")]
    overlap = zero.get("overlap_comm")
    if overlap is None:
        overlap = zero["stage"] == 3  # DeepSpeed's default
    return ZeroMode(
        stage=zero["stage"],
        precision=precision,
        accumulation=block_of(resolved, "data_types").get("grad_accum_dtype") or precision,
        overlap=bool(overlap),
        offload=any(block.get("device", "none") != "none" for block in offloads),
    )


def block_of(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a block; an empty one if it is missing or no block."""
    block = tree.get(name)
    return block if isinstance(block, dict) else {}


def load_ds_config(path: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON file; refuse comments, NaN and duplicate keys."""
    try:
        raw = parse_json(
            read_text(Path(path)),
            object_pairs_hook=_refuse_duplicates,
            parse_constant=_refuse_constant,
        )
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        fix = "name a JSON file, such as ds_configs/zero1_pcie.json (--deepspeed_config)"
        raise ValueError(f"{path}: {reason}; {fix}") from error
    except json.JSONDecodeError as error:
        fix = "write plain JSON: no comments, no trailing commas, names in double quotes"
        raise ValueError(f"{path}: {error}; {fix}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: holds {_as_json(raw)}; write an object: {{…}}")
    return raw


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    block: dict[str, Any] = {}
    for key, value in pairs:
        if key in block:
            raise ValueError(
                f"{_as_json(key)} is written twice in one block, as {_as_json(block[key])} and as "
                f"{_as_json(value)}; keep one"
            )
        block[key] = value
    return block


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; write a finite number")


def resolve_ds_config(
    raw: dict[str, Any], config: RunConfig, *, world_size: int, source: str = "the DeepSpeed config"
) -> dict[str, Any]:
    """Check `raw` and return the dictionary for `deepspeed.initialize`.

    Raises a ValueError with a line for every key to change: key, value and fix. What depends on
    the other keys is checked once these are fixed.
    """
    owned = owned_values(config, world_size)
    problems = dict(_recipe_problems(raw, owned))
    resolved = deepcopy(raw)
    for path in problems:  # remove these keys, so that each is reported once
        block, name = _parent(resolved, path)
        block.pop(name, None)
    resolved.setdefault("optimizer", deepcopy(OPTIMIZER))
    for path, (value, _) in owned.items():
        block, name = _parent(resolved, path)
        block[name] = value
    for path, value in DEFAULTS.items():
        block, name = _parent(resolved, path)
        if block.get(name, "auto") == "auto":
            block[name] = value
    problems |= _parser_problems(resolved, source)
    if not problems:
        problems = dict(_mode_problems(resolved))
    values, lines = dict(walk(raw)), []
    for path, problem in problems.items():
        value = f"= {_as_json(values[path])}" if path in values else "is missing"
        lines.append(f"{printable(path)} {value}{problem}")
    if len(lines) == 1:
        raise ValueError(f"{source}: {lines[0]}")
    if lines:
        raise ValueError("\n  ".join([f"{source}: {len(lines)} keys to change:", *lines]))
    if zero_mode(resolved).has_buckets:
        resolved["zero_optimization"].setdefault("reduce_bucket_size", REDUCE_BUCKET)
    resolved.setdefault("timers", {}).setdefault("throughput", {"enabled": False})
    return resolved


def summary_line(resolved: dict[str, Any], world_size: int) -> str:
    """Return "ok: …", a one-line summary of a resolved config."""
    mode, zero = zero_mode(resolved), resolved["zero_optimization"]
    parts = [f"ZeRO-{mode.stage}", mode.precision, f"gradients accumulated in {mode.accumulation}"]
    if mode.has_buckets:
        overlap = "overlapped" if mode.overlap else "not overlapped"
        parts.append(f"buckets of {zero['reduce_bucket_size']:,.0f} elements, {overlap}")
    if mode.offload:
        parts.append("offloaded")
    batch, ranks = resolved["train_batch_size"], "rank" if world_size == 1 else "ranks"
    return f"ok: {', '.join(parts)}, {batch} sequences per step on {world_size} {ranks}"


def owned_values(config: RunConfig, world_size: int) -> Owned:
    """Return the keys that the recipe sets; in the JSON they are "auto", equal or absent."""
    train = config.train
    factors = (train.rows, train.accumulation, world_size)
    product = f"{' × '.join(map(str, factors))} = {prod(factors)}"
    names = "train.micro_batch × train.accumulation × ranks"
    owned: Owned = {"train_batch_size": (prod(factors), f"{names} = {product}")}
    for key, name in OWNED_FIELDS.items():
        value = getattr(train, name)
        if name == "micro_batch":
            value = train.rows  # a number, even for `auto`
        owned[key] = value, f"train.{name} = {getattr(train, name)}"
    for precision in ("bf16", "fp16"):
        enabled = train.precision == precision
        owned[f"{precision}.enabled"] = enabled, f"train.precision = {train.precision!r}"
    return owned


def leave_to_recipe(resolved: dict[str, Any]) -> dict[str, Any]:
    """Remove the recipe's values from a run's resolved JSON, so that a resume can change them."""
    rest = deepcopy(resolved)
    for path in (*owned_values(RunConfig(), world_size=1), *WITHDRAWN):
        block, name = _parent(rest, path)
        block.pop(name, None)
    return rest


def _recipe_problems(raw: dict[str, Any], owned: Owned) -> Problems:
    """Yield what contradicts the recipe, changes the numbers or loses data."""
    for path, value in walk(raw):
        if path.startswith(tuple(f"{refused}." for refused in REFUSED)):
            continue  # the block itself is reported
        if path in REFUSED:
            yield path, f": {REFUSED[path]}"
        elif path in BLOCKS and not isinstance(value, dict):
            yield path, ": this is a block; write an object: {…}"
        elif path in owned:
            expected, origin = owned[path]
            # In Python 1 == True, but one is a number and the other a switch.
            same = value == expected and isinstance(value, bool) == isinstance(expected, bool)
            if value != "auto" and not same:
                yield path, f', but {origin}; write "auto", or set the recipe\'s to match'
        elif value == "auto" and path not in DEFAULTS:
            yield path, ': only what the recipe sets may be "auto"; write a value or remove it'
    every = raw.get("steps_per_print")
    if isinstance(every, int | float) and every < 1:
        yield "steps_per_print", ": write 1 or more, or remove it"
    optimizer = block_of(raw, "optimizer")
    if str(optimizer.get("type", "adamw")).lower() not in ("adam", "adamw"):
        yield "optimizer.type", ': not supported; write "AdamW"'
    params = optimizer.get("params", {})
    if not isinstance(params, dict):
        return
    betas, eps = params.get("betas", "auto"), params.get("eps", "auto")
    two_numbers = matches(betas, [(int, float)]) and len(betas) == 2
    if betas != "auto" and not (two_numbers and min(betas) >= 0 and max(betas) < 1):
        yield "optimizer.params.betas", ": write two numbers, 0 or more and below 1"
    if eps != "auto" and not (matches(eps, (int, float)) and eps > 0):
        yield "optimizer.params.eps", ": write a number above 0"
    if optimizer and params.get("torch_adam") is not True:
        yield (
            "optimizer.params.torch_adam",
            ': DeepSpeed would compile its Adam at the first start; write "torch_adam": true',
        )


class _Recorder(dict[str, Any]):
    """A block that records which keys are looked up, and with which default."""

    def __init__(self, block: Mapping[str, Any]) -> None:
        nested = {k: _Recorder(v) if isinstance(v, dict) else v for k, v in block.items()}
        super().__init__(nested)
        self.looked_up: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        self.looked_up.setdefault(key, default)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.looked_up.setdefault(str(key), None)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # records `name in config.keys()` too


def _parser_problems(resolved: dict[str, Any], source: str) -> Problems:
    """Let DeepSpeed parse the resolved config; yield the keys that it refuses or does not read."""
    # Without train_batch_size, which DeepSpeed would compare with the current process group.
    config = _Recorder({k: v for k, v in deepcopy(resolved).items() if k != "train_batch_size"})
    try:
        DeepSpeedConfig(config)
    except ValidationError as error:
        paths = {kind.__name__: path for path, kind in PYDANTIC.items()}
        block = paths.get(error.title, "")  # the title is the name of the class
        fields = PYDANTIC[block].model_fields if block else {}
        for detail in error.errors():
            path = ".".join((block, *map(str, detail["loc"]))).strip(".")
            if detail["type"] == "extra_forbidden":
                yield path, _unknown(path, [field.alias or name for name, field in fields.items()])
            else:
                yield path, f": {detail['msg']}"
    except (ValueError, TypeError, AttributeError, AssertionError, DeepSpeedConfigError) as error:
        raise ValueError(f"{source}: DeepSpeed refuses it: {error}") from error
    else:
        yield from _unread_keys(config)


def _unread_keys(block: _Recorder, prefix: str = "") -> Problems:
    known = block.looked_up
    if prefix == "optimizer.params.":
        known = dict.fromkeys((*ADAMW_KEYS, "torch_adam"))
    for key, value in block.items():
        path = f"{prefix}{key}"
        if key not in known:
            yield path, _unknown(path, known)
        elif isinstance(known[key], bool) and not isinstance(value, bool):
            yield path, ": this is a switch; write true or false"
        elif isinstance(value, _Recorder) and value.looked_up and path not in PYDANTIC:
            yield from _unread_keys(value, f"{path}.")


def _unknown(path: str, known: Iterable[str]) -> str:
    names = [name for name in known if name not in REFUSED]
    near = get_close_matches(path.rpartition(".")[2].lower(), names, 1)
    fix = f'did you mean "{near[0]}"? If not, remove it' if near else "remove it"
    return f": DeepSpeed {deepspeed.__version__} has no such key; {fix}"


def _mode_problems(resolved: dict[str, Any]) -> Problems:
    """Yield settings that DeepSpeed would not follow with this stage and precision."""
    stage = block_of(resolved, "zero_optimization").get("stage")
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        yield "zero_optimization.stage", ": write 0, 1, 2 or 3"
        return
    mode = zero_mode(resolved)
    allowed = {mode.precision} if mode.stage == 0 else {mode.precision, "fp32"}
    if mode.accumulation not in allowed:
        yield (
            "data_types.grad_accum_dtype",
            f": stage {mode.stage} with train.precision = {mode.precision!r} accumulates in "
            f"{' or '.join(sorted(allowed))}; write that, or remove it",
        )


def _parent(tree: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """Return the block of a dotted path, created if missing, and the path's last name."""
    *parents, name = path.split(".")
    for parent in parents:
        block = block_of(tree, parent)
        tree[parent] = block
        tree = block
    return tree, name


def _as_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"
