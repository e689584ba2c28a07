"""DeepSpeed's JSON: load it strictly, fill it from the recipe, check it before the run starts.

DeepSpeed ignores unknown keys and uses its defaults instead. Here unknown keys and keys without
effect are errors, and each number is set in one place: the recipe or the JSON.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError, DtypeEnum
from pydantic import ValidationError

from nsa.engine.config import RunConfig
from nsa.engine.ds_keys import MODELS, key_error, walk
from nsa.engine.ds_refusals import REFUSALS, ZeroMode

REDUCE_BUCKET = 2**25  # elements: the gradients of 125M parameters in four or five collectives
OPTIMIZER = {"type": "AdamW", "params": {"torch_adam": True, "fused": True}}
DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
OWNED_FIELDS = {  # DeepSpeed key: fields of `train` that set it
    "train_micro_batch_size_per_gpu": ("micro_batch",),
    "gradient_accumulation_steps": ("accumulation",),
    "gradient_clipping": ("clip",),
    "optimizer.params.lr": ("learning_rate",),
    "optimizer.params.betas": ("beta1", "beta2"),
    "optimizer.params.eps": ("adam_eps",),
    "optimizer.params.weight_decay": ("weight_decay",),
}


@dataclass(frozen=True)
class Tolerance:
    """Which irregular gradients of a backward pass a resolved config tolerates."""

    double_fire: bool  # a parameter whose gradient arrives more than once
    missing_on_some_ranks: bool  # a parameter without a gradient on some ranks


@dataclass(frozen=True)
class Owned:
    """Value of a DeepSpeed key that the recipe sets."""

    value: Any
    origin: str  # for errors: "train.clip = 1.0"
    settings: str  # for errors: "train.clip"


def load_ds_config(path: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON file; refuse comments, NaN and duplicate keys."""
    path = Path(path)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        block: dict[str, Any] = {}
        for key, value in pairs:
            if key in block:
                raise ValueError(
                    f'{path}: "{key}" is written twice in one block, as {_short(block[key])} and '
                    f"as {_short(value)}; keep one"
                )
            block[key] = value
        return block

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{path}: {name} is not JSON; write a finite number")

    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text, object_pairs_hook=unique, parse_constant=refuse_constant)
    except FileNotFoundError:
        near = get_close_matches(path.name, [file.name for file in path.parent.glob("*.json")], 1)
        fix = f"did you mean {path.parent / near[0]}?" if near else "name a JSON file"
        raise ValueError(f"{path}: no such file; {fix}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: cannot be read ({reason}); name a JSON file") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {error.lineno}, column {error.colno}: {error.msg}; "
            "write plain JSON: no comments, no trailing commas, names in double quotes"
        ) from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: holds {_short(raw)}; write an object: {{…}}")
    return raw


def resolve_ds_config(
    raw: dict[str, Any],
    config: RunConfig,
    *,
    world_size: int,
    source: str = "the DeepSpeed config",
) -> dict[str, Any]:
    """Check `raw` and return the dictionary for `deepspeed.initialize`.

    Raises a ValueError with key, value and fix for a key that DeepSpeed would ignore or refuse, or
    that contradicts the recipe.
    """
    _check_optimizer(raw, source)
    for path, value in walk(raw):
        error = key_error(path, value)
        if error:
            raise ValueError(f"{_at(path, value, source)}: {error}")
    owned = owned_values(config, world_size)
    resolved = _fill(raw, owned, source)
    mode = _zero_mode(resolved, source)
    for path, value in walk(raw):
        refusal = next((r for r in REFUSALS if r.applies(path, mode)), None)
        if refusal and path not in owned:
            raise ValueError(f"{_at(path, value, source)}: {refusal.why}; remove it{refusal.fix}")
    recompute, block = config.model.activation_checkpointing, raw.get("activation_checkpointing")
    if block is not None and recompute != "deepspeed":
        raise ValueError(
            f"{_at('activation_checkpointing', block, source)}: no effect with "
            f"model.activation_checkpointing = {recompute!r}; remove it, or set "
            "model.activation_checkpointing=deepspeed"
        )
    if mode.buckets:
        resolved["zero_optimization"].setdefault("reduce_bucket_size", REDUCE_BUCKET)
    resolved.setdefault("timers", {}).setdefault("throughput", {"enabled": False})
    _check_values(resolved, source)
    return resolved


def owned_values(config: RunConfig, world_size: int) -> dict[str, Owned]:
    """Return the keys that the recipe sets; in the JSON they are "auto", equal or absent."""
    train = config.train
    batch = train.micro_batch * train.accumulation * world_size
    factors = f"{train.micro_batch} × {train.accumulation} × {world_size}"
    origin = f"train.micro_batch × train.accumulation × ranks = {factors} = {batch}"
    owned = {"train_batch_size": Owned(batch, origin, "one of them")}
    for key, names in OWNED_FIELDS.items():
        values = [getattr(train, name) for name in names]
        owned[key] = Owned(
            values if len(values) > 1 else values[0],
            " and ".join(f"train.{n} = {v}" for n, v in zip(names, values, strict=True)),
            " and ".join(f"train.{name}" for name in names),
        )
    for precision in ("bf16", "fp16"):
        enabled = train.precision == precision
        origin = f"train.precision = {train.precision!r} sets it to {_short(enabled)}"
        owned[f"{precision}.enabled"] = Owned(enabled, origin, "train.precision")
    return owned


def leave_to_recipe(resolved: dict[str, Any]) -> dict[str, Any]:
    """Remove the recipe's values from a run's resolved JSON, so that a resume can change them."""
    rest = deepcopy(resolved)
    for path in owned_values(RunConfig(), world_size=1):
        block, name = _parent(rest, path)
        block.pop(name, None)
    return rest


def tolerance(resolved: dict[str, Any]) -> Tolerance:
    """Return which irregular gradients a resolved config tolerates (DeepSpeed 0.19.8, two ranks).

    A gradient may arrive twice if it is reduced after the backward pass, but not if its bucket is
    reduced during it. A gradient may be missing on a rank in stage 0 only, which fills in zeros.
    Elsewhere ranks reduce different tensors, and BF16_Optimizer computes different norms: ranks
    clip differently and may disagree about skipping a step.
    """
    mode = _zero_mode(resolved, "the resolved DeepSpeed config")
    reduced_once = mode.stage == 0 or mode.bf16_optimizer
    return Tolerance(
        double_fire=reduced_once or (mode.stage == 1 and not mode.overlap),
        missing_on_some_ranks=mode.stage == 0,
    )


def _check_optimizer(raw: dict[str, Any], source: str) -> None:
    """Require torch's AdamW, as DeepSpeed's Adam is a C++ extension that it builds at start."""
    if "optimizer" not in raw:
        return
    block = _block(raw, "optimizer", source)
    kind, params = block.get("type"), _block({"params": {}} | block, "params", source)
    torch_adam = params.get("torch_adam")
    if str(kind).lower() not in ("adam", "adamw"):
        raise ValueError(f'{_at("optimizer.type", kind, source)}: not supported; write "AdamW"')
    if torch_adam is not True:
        raise ValueError(
            f"{_at('optimizer.params.torch_adam', torch_adam, source)}: DeepSpeed would compile "
            'its Adam at the first start; write "torch_adam": true, and "fused": true for speed'
        )


def _fill(raw: dict[str, Any], owned: dict[str, Owned], source: str) -> dict[str, Any]:
    """Return `raw` with the recipe's values; refuse contradictions and "auto" elsewhere."""
    for path, value in walk(raw):
        if path not in owned:
            if value == "auto":
                raise ValueError(
                    f'{_at(path, value, source)}: only keys that the recipe sets may be "auto" '
                    f"({', '.join(owned)}); write a value or remove it"
                )
            continue
        expected = owned[path].value
        same = value == expected and isinstance(value, bool) == isinstance(expected, bool)
        if value != "auto" and not same:
            raise ValueError(
                f'{_at(path, value, source)}, but {owned[path].origin}; write "auto" in the JSON '
                f"or set {owned[path].settings} to match"
            )
    resolved = deepcopy(raw)
    resolved.setdefault("optimizer", deepcopy(OPTIMIZER))
    for path, setting in owned.items():
        block, name = _parent(resolved, path)
        block[name] = setting.value
    return resolved


def _zero_mode(resolved: dict[str, Any], source: str) -> ZeroMode:
    """Return the settings that determine DeepSpeed's optimizer class."""
    zero = _block(resolved, "zero_optimization", source)
    stage = zero.get("stage")
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(f"{_at('zero_optimization.stage', stage, source)}: write 0, 1, 2 or 3")
    precision = next((p for p in ("bf16", "fp16") if resolved[p]["enabled"]), "fp32")
    accumulation = resolved.get("data_types", {}).get("grad_accum_dtype") or precision
    try:
        accumulation = DTYPES[str(DtypeEnum(accumulation).value)]
    except (KeyError, ValueError):
        accumulation = str(accumulation)
    allowed = {precision} if stage == 0 else {precision, "fp32"}
    if accumulation not in allowed:
        raise ValueError(
            f"{_at('data_types.grad_accum_dtype', accumulation, source)}: stage {stage} with "
            f"train.precision = {precision!r} accumulates in {' or '.join(sorted(allowed))}; "
            "write that, or remove it"
        )
    offloads = [zero.get(name) for name in ("offload_optimizer", "offload_param")]
    overlap = zero.get("overlap_comm")
    return ZeroMode(
        stage=stage,
        precision=precision,
        accumulation=accumulation,
        overlap=stage == 3 if overlap is None else bool(overlap),
        static_scale=bool(resolved["fp16"].get("loss_scale")),
        devices=frozenset(
            str(block.get("device")) for block in offloads if isinstance(block, dict)
        ),
    )


def _check_values(resolved: dict[str, Any], source: str) -> None:
    """Let DeepSpeed parse the result; name file and key in its errors."""
    # Without train_batch_size, which DeepSpeed would compare with the current process group.
    parsed = {key: value for key, value in resolved.items() if key != "train_batch_size"}
    try:
        DeepSpeedConfig(deepcopy(parsed))
    except ValidationError as error:
        first = error.errors()[0]
        block = next((name for name, model in MODELS.items() if model.__name__ == error.title), "")
        path = ".".join((block, *map(str, first["loc"]))).strip(".")
        raise ValueError(f"{_at(path, first['input'], source)}: {first['msg']}") from error
    except (ValueError, AssertionError, DeepSpeedConfigError) as error:
        raise ValueError(f"{source}: DeepSpeed refuses it: {error}") from error


def _parent(tree: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """Return the block of a dotted path, created if missing, and the path's last name."""
    *parents, name = path.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    return tree, name


def _block(config: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    block = config.get(name)
    if not isinstance(block, dict):
        problem = f"{source}: {name} is missing" if block is None else _at(name, block, source)
        raise ValueError(f'{problem}; write a block: "{name}": {{…}}')
    return block


def _at(path: str, value: Any, source: str) -> str:
    return f"{path} = {_short(value)} in {source}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"
