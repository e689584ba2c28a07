"""DeepSpeed's JSON: loaded strictly, completed from the recipe, checked before anything starts.

DeepSpeed itself reads JSON with comments, ignores keys that it doesn't know and lets its own
defaults stand beside the recipe. Here every number stands in one place, and a key that would do
nothing is an error that says why.
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
from nsa.engine.ds_keys import MODELS, REFUSALS, Setting, complaint_about_name, known_keys, walk

REDUCE_BUCKET = 2**25  # elements: the gradients of 125M parameters in four or five collectives
ADAM = ("adam", "adamw")  # DeepSpeed's names for them, in any case
DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


@dataclass(frozen=True)
class Tolerance:
    """What a resolved config lives with in the backward pass."""

    double_fire: bool  # a parameter whose gradient arrives more than once
    missing_on_some_ranks: bool  # a parameter that some ranks leave without a gradient


@dataclass(frozen=True)
class Owned:
    """A value that the recipe owns, and where the recipe says so."""

    value: Any
    says: str  # "train.clip = 1.0"
    settings: str  # "train.clip"


def load_ds_config(path: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON as JSON: no comments, no NaN, no key twice."""
    path = Path(path)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ValueError(
                    f'{path}: "{key}" is written twice in one block, as {_short(seen[key])} and '
                    f"as {_short(value)}; keep one"
                )
            seen[key] = value
        return seen

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{path}: {name} is not JSON; write a finite number")

    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text, object_pairs_hook=once, parse_constant=no_constant)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file{_nearest_file(path)}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); name a JSON file") from error
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1].strip() if text.strip() else ""
        raise ValueError(
            f"{path}, line {error.lineno}, column {error.colno}: {error.msg} at {line!r}; "
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
    run_dir: Path | None = None,
    source: str = "the DeepSpeed config",
) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize`: `raw`, checked and completed from `config`.

    Raises a ValueError that names the key, its value and the fix for whatever DeepSpeed would
    ignore, would refuse later, or would do otherwise than the recipe says.
    """
    _check_optimizer(raw, source)
    _check_names(raw, source)
    owned = owned_values(config, world_size)
    resolved = _fill(raw, owned, source)
    setting = _setting(resolved, source)
    for path, value in walk(raw):
        refusal = next((r for r in REFUSALS if r.applies(path, setting)), None)
        if refusal and path not in owned:
            raise ValueError(f"{_at(path, value, source)}: {refusal.why}; {refusal.fix}")
    if "activation_checkpointing" in raw:
        _check_activation_checkpointing(raw, config, source)
    if setting.buckets:
        resolved["zero_optimization"].setdefault("reduce_bucket_size", REDUCE_BUCKET)
    resolved.setdefault("timers", {}).setdefault("throughput", {"enabled": False})
    if config.monitor.tensorboard and run_dir is not None:
        folder = str(run_dir / "tensorboard")
        resolved["tensorboard"] = {"enabled": True, "output_path": folder, "job_name": ""}
    _check_values(resolved, source)
    return resolved


def owned_values(config: RunConfig, world_size: int) -> dict[str, Owned]:
    """The keys that the recipe owns: the JSON says "auto", the same value, or nothing."""
    train = config.train
    batch = train.micro_batch * train.accumulation * world_size
    factors = f"{train.micro_batch} × {train.accumulation} × {world_size}"

    def taken(name: str, value: Any) -> Owned:
        return Owned(value, f"train.{name} = {getattr(train, name)}", f"train.{name}")

    def switch(precision: str) -> Owned:
        on = train.precision == precision
        says = f"train.precision = {train.precision!r} makes it {_short(on)}"
        return Owned(on, says, "train.precision")

    return {
        "train_batch_size": Owned(
            batch,
            f"train.micro_batch × train.accumulation × ranks = {factors} = {batch}",
            "one of them",
        ),
        "train_micro_batch_size_per_gpu": taken("micro_batch", train.micro_batch),
        "gradient_accumulation_steps": taken("accumulation", train.accumulation),
        "gradient_clipping": taken("clip", float(train.clip)),
        "optimizer.params.lr": taken("learning_rate", train.learning_rate),
        "optimizer.params.betas": Owned(
            [train.beta1, train.beta2],
            f"train.beta1 = {train.beta1} and train.beta2 = {train.beta2}",
            "train.beta1 and train.beta2",
        ),
        "optimizer.params.eps": taken("adam_eps", train.adam_eps),
        "optimizer.params.weight_decay": taken("weight_decay", train.weight_decay),
        "bf16.enabled": switch("bf16"),
        "fp16.enabled": switch("fp16"),
    }


def leave_to_recipe(resolved: dict[str, Any]) -> dict[str, Any]:
    """A run's own JSON without what the recipe put into it, which a resumed run may overrule."""
    rest = deepcopy(resolved)
    for path in owned_values(RunConfig(), world_size=1):
        *parents, name = path.split(".")
        block = rest
        for parent in parents:
            block = block.get(parent, {})
        block.pop(name, None)
    return rest


def tolerance(resolved: dict[str, Any]) -> Tolerance:
    """What a resolved config tolerates, seen on two ranks with DeepSpeed 0.19.8.

    Reducing once, after the backward pass, forgives a gradient that arrives twice; a bucket that
    fills during it doesn't. Only stage 0 puts zeros in for a gradient that a rank lacks: elsewhere
    the ranks reduce different tensors, and BF16_Optimizer leaves the gradient out of that rank's
    norm, so that ranks clip by different factors and may disagree about skipping a step.
    """
    setting = _setting(resolved, "the resolved DeepSpeed config")
    once = setting.stage == 0 or setting.bf16_optimizer
    return Tolerance(
        double_fire=once or (setting.stage == 1 and not setting.overlap),
        missing_on_some_ranks=setting.stage == 0,
    )


def _check_optimizer(raw: dict[str, Any], source: str) -> None:
    """AdamW, and torch's own: DeepSpeed's is a C++ extension that it builds at start."""
    if "optimizer" not in raw:
        return
    block = _block(raw, "optimizer", source)
    kind, params = block.get("type"), _block({"params": {}} | block, "params", source)
    if str(kind).lower() not in ADAM:
        raise ValueError(
            f"{_at('optimizer.type', kind, source)}: the recipe's numbers are AdamW's; "
            'write "AdamW"'
        )
    if params.get("torch_adam") is not True:
        raise ValueError(
            f"{_at('optimizer.params.torch_adam', params.get('torch_adam'), source)}: DeepSpeed "
            "would build an Adam of its own, with nvcc or a C++ compiler, at the first start; "
            'write "torch_adam": true, and "fused": true for speed'
        )
    if "adam_w_mode" in params and str(kind).lower() == "adamw":
        raise ValueError(
            f"{_at('optimizer.params.adam_w_mode', params['adam_w_mode'], source)}: it does "
            f"nothing beside optimizer.type = {kind!r}; remove it"
        )


def _check_names(raw: dict[str, Any], source: str) -> None:
    """Refuse names that DeepSpeed doesn't read, and blocks and switches of the wrong kind."""
    for path, value in walk(raw):
        complaint = complaint_about_name(path)
        if complaint:
            raise ValueError(f"{_at(path, value, source)}: {complaint}")
        known: Any = known_keys()
        for name in path.split("."):
            known = (known or {}).get(name) if isinstance(known, dict) else None
        if isinstance(known, dict) and not isinstance(value, dict):
            raise ValueError(f"{_at(path, value, source)}: this is a block; write an object: {{…}}")
        if isinstance(known, bool) and not isinstance(value, bool) and value != "auto":
            raise ValueError(f"{_at(path, value, source)}: this is a switch; write true or false")


def _fill(raw: dict[str, Any], owned: dict[str, Owned], source: str) -> dict[str, Any]:
    """`raw` with the recipe's values put in; "auto" elsewhere and other numbers are refused."""
    for path, value in walk(raw):
        if path in owned:
            own = owned[path]
            same = value == own.value and isinstance(value, bool) == isinstance(own.value, bool)
            if value != "auto" and not same:
                raise ValueError(
                    f'{_at(path, value, source)}, but {own.says}; write "auto" in the JSON or set '
                    f"{own.settings} to match"
                )
        elif value == "auto":
            raise ValueError(
                f'{_at(path, value, source)}: only what the recipe owns may be "auto" '
                f"({', '.join(owned)}); write a value or remove it"
            )
    resolved = deepcopy(raw)
    resolved.setdefault(
        "optimizer", {"type": "AdamW", "params": {"torch_adam": True, "fused": True}}
    )
    for path, own in owned.items():
        *parents, name = path.split(".")
        block = resolved
        for parent in parents:
            block = block.setdefault(parent, {})
        block[name] = own.value
    return resolved


def _setting(resolved: dict[str, Any], source: str) -> Setting:
    """Which of DeepSpeed's optimizers `resolved` asks for."""
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
            f"train.precision = {precision!r} accumulates in {' or '.join(sorted(allowed))}; write "
            "that, or remove it"
        )
    offloads = [zero.get(name) for name in ("offload_optimizer", "offload_param")]
    overlap = zero.get("overlap_comm")
    return Setting(
        stage=stage,
        precision=precision,
        accumulation=accumulation,
        overlap=stage == 3 if overlap is None else bool(overlap),
        static_scale=bool(resolved["fp16"].get("loss_scale")),
        devices=frozenset(
            str(block.get("device")) for block in offloads if isinstance(block, dict)
        ),
    )


def _check_activation_checkpointing(raw: dict[str, Any], config: RunConfig, source: str) -> None:
    """The block is for deepspeed.checkpointing, which serves one of the model's five modes."""
    mode = config.model.activation_checkpointing
    if mode != "deepspeed":
        at = _at("activation_checkpointing", raw["activation_checkpointing"], source)
        raise ValueError(
            f"{at}: it does nothing with model.activation_checkpointing = {mode!r}; remove it or "
            "set model.activation_checkpointing=deepspeed"
        )


def _check_values(resolved: dict[str, Any], source: str) -> None:
    """Let DeepSpeed parse the result now, so that its complaints name the file and the key."""
    # Without train_batch_size, which DeepSpeed would hold against the ranks that are up already.
    alone = {key: value for key, value in resolved.items() if key != "train_batch_size"}
    try:
        DeepSpeedConfig(deepcopy(alone))
    except ValidationError as error:
        first = error.errors()[0]
        block = next((name for name, model in MODELS.items() if model.__name__ == error.title), "")
        path = ".".join((block, *map(str, first["loc"]))).strip(".")
        raise ValueError(f"{_at(path, first['input'], source)}: {first['msg']}") from error
    except (ValueError, AssertionError, DeepSpeedConfigError) as error:
        raise ValueError(f"{source}: DeepSpeed refuses it: {error}") from error


def _block(config: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    block = config.get(name)
    if not isinstance(block, dict):
        what = f"{source}: {name} is missing" if block is None else _at(name, block, source)
        raise ValueError(f'{what}; write a block: "{name}": {{…}}')
    return block


def _at(path: str, value: Any, source: str) -> str:
    return f"{path} = {_short(value)} in {source}"


def _short(value: Any) -> str:
    """A value as JSON writes it, or its first letters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _nearest_file(path: Path) -> str:
    files = sorted(file.name for file in path.parent.glob("*.json"))
    near = get_close_matches(path.name, files, 1)
    return f"; did you mean {path.parent / near[0]}?" if near else f"; {path.parent} holds {files}"
