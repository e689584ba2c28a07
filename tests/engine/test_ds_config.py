"""DeepSpeed's JSON: what is refused and why, what is filled in, and that DeepSpeed accepts it."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig

from nsa.engine.config import RunConfig, walk
from nsa.engine.ds_config import (
    OTHER_TRAINING,
    REFUSED,
    WITHDRAWN,
    leave_to_recipe,
    load_ds_config,
    resolve_ds_config,
    summary_line,
    zero_mode,
)

FOLDER = Path(__file__).parents[2] / "ds_configs"
SHIPPED = sorted(path.stem for path in FOLDER.glob("*.json"))
NO_BUCKETS = ("zero0_debug", "zero1_pcie")
PRECISIONS = ("bf16", "fp16", "fp32")


def run_config(**train: Any) -> RunConfig:
    config = RunConfig()
    for name, value in train.items():
        setattr(config.train, name, value)
    return config


def json_with(name: str = "zero1_bf16acc", **keys: Any) -> dict[str, Any]:
    """A shipped config with changed keys."""
    raw = load_ds_config(FOLDER / f"{name}.json")
    for path, value in keys.items():
        *parents, last = path.split(".")
        block = raw
        for parent in parents:
            block = block.setdefault(parent, {})
        block[last] = value
    return raw


def resolve(raw: dict[str, Any], world_size: int = 2, **train: Any) -> dict[str, Any]:
    return resolve_ds_config(raw, run_config(**train), world_size=world_size, source="mine.json")


def error_message(raw: dict[str, Any], **train: Any) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - callers check the message
        resolve(raw, **train)
    return str(error.value)


# --- loading ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n  "fp16": {}, // off\n}', ["line 2", "no comments"]),
        ('{\n  "a": 1,\n}', ["trailing commas"]),
        ('{"a": 1, "a": 2}', ['"a" is written twice', "as 1 and as 2", "keep one"]),
        ('{"b": {"c": {"stage": 1, "stage": 1}}}', ['"stage" is written twice']),
        ('{"gradient_clipping": NaN}', ["NaN", "finite"]),
        ('{"gradient_clipping": -Infinity}', ["-Infinity", "finite"]),
        (f'["{"ä" * 99}"]', [f'holds ["{"ä" * 55}…; write an object']),
        ("", ["line 1"]),
    ],
)
def test_only_plain_json_is_accepted(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"mine\.json") as error:
        load_ds_config(path)
    for word in words:
        assert word in str(error.value)


def test_an_unreadable_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"mine\.json: .*can't decode"):
        load_ds_config(tmp_path / "mine.json")
    for path, reason in ((tmp_path, "is a directory"), (tmp_path / "a.json", "no such file")):
        with pytest.raises(ValueError, match=f": {reason}.*; name .*deepspeed_config"):
            load_ds_config(path)


# --- one owner per number -------------------------------------------------------------------

OWNED = {  # key: (the recipe's value, another value, what the message must name)
    "train_batch_size": (12, 8, "train.micro_batch × train.accumulation × ranks = 3 × 2 × 2 = 12"),
    "train_micro_batch_size_per_gpu": (3, 1, "train.micro_batch = 3"),
    "gradient_accumulation_steps": (2, 4, "train.accumulation = 2"),
    "gradient_clipping": (0.25, 1.0, "train.clip = 0.25"),
    "optimizer.params.lr": (3e-4, 1e-3, "train.learning_rate = 0.0003"),
    "optimizer.params.weight_decay": (0.2, 0.01, "train.weight_decay = 0.2"),
    "bf16.enabled": (True, False, "train.precision = 'bf16'"),
    "fp16.enabled": (False, True, "train.precision = 'bf16'"),
}
RECIPE = {
    "micro_batch": 3,
    "accumulation": 2,
    "clip": 0.25,
    "learning_rate": 3e-4,
    "weight_decay": 0.2,
}


def at(tree: dict[str, Any], path: str) -> Any:
    for name in path.split("."):
        tree = tree[name]
    return tree


@pytest.mark.parametrize("key", OWNED)
def test_the_recipe_fills_auto_and_missing_keys(key: str) -> None:
    value, _, _ = OWNED[key]
    assert at(resolve(json_with(**{key: "auto"}), **RECIPE), key) == value
    *parents, name = key.split(".")
    raw = json_with()
    del (at(raw, ".".join(parents)) if parents else raw)[name]
    assert at(resolve(raw, **RECIPE), key) == value
    assert at(resolve(json_with(**{key: value}), **RECIPE), key) == value


@pytest.mark.parametrize("key", OWNED)
def test_a_json_that_contradicts_the_recipe_is_refused_naming_both(key: str) -> None:
    _, other, origin = OWNED[key]
    message = error_message(json_with(**{key: other}), **RECIPE)
    assert message == (
        f"mine.json: {key} = {json.dumps(other)}, but {origin}; "
        'write "auto", or set the recipe\'s to match'
    )


def test_only_the_stage_is_required() -> None:
    resolved = resolve({"zero_optimization": {"stage": 2}}, clip=0.0)
    assert resolved["gradient_clipping"] == 0.0  # DeepSpeed's default: 1.0
    assert resolved["zero_optimization"]["reduce_bucket_size"] == 2**25  # DeepSpeed's default: 5e8
    # DeepSpeed's default synchronizes twice per micro-batch.
    assert resolved["timers"]["throughput"]["enabled"] is False
    assert resolved["optimizer"]["params"]["torch_adam"] is True
    stage_3 = resolve({"zero_optimization": {"stage": 3}})
    assert (zero_mode(resolved).overlap, zero_mode(stage_3).overlap) == (False, True)


@pytest.mark.parametrize("name", SHIPPED)
def test_resolving_is_idempotent_and_does_not_modify_its_input(name: str) -> None:
    raw = json_with(name)
    once = resolve(raw)
    assert resolve(once) == once
    assert raw == json_with(name)


# --- refused keys ----------------------------------------------------------------------------

NAMES = [  # key, value, what the message must say
    ("zero_optimisation", {}, 'did you mean "zero_optimization"?'),
    ("zero_optimization.reduce_bucket_sise", 1, '"reduce_bucket_size"?'),
    ("optimizer.params.max_grad_norm", 1.0, "has no such key"),
    ("zero_optimization", {"stage": 3, "max_live_paramters": 1}, '"stage3_max_live_parameters"'),
    ("gradient_clipping", {"a": 1}, 'write "auto"'),
    ("zero_optimization.reduce_bucket_size", "auto", "write a value or remove it"),
    ("progressive_layer_drop", {"enabled": True}, "has been removed"),
    ("curriculum_learnin", {}, "has no such key; remove it"),
]
KINDS = [
    ("zero_optimization", True, "write an object"),
    ("optimizer", "AdamW", "write an object"),
    ("bf16.enabled", 1, 'write "auto"'),
    ("prescale_gradients", 1, "write true or false"),
    ("wall_clock_breakdown", "false", "DeepSpeed refuses it"),
    ("steps_per_print", 0, "write 1 or more"),
    ("zero_optimization.stage", 4, "should be 0, 1, 2"),
    ("zero_optimization.stage", True, "write 0, 1, 2 or 3"),
    ("zero_optimization.reduce_bucket_size", -1, "greater than 0"),
    ("comms_logger.prof_ops", 3, "valid list"),
    ("communication_data_type", "int8", "['fp16', 'bf16', 'fp32']"),
    ("checkpoint.tag_validation", "maybe", "WARN"),
    *(
        ("optimizer.params.betas", betas, "two numbers, 0 or more and below 1")
        for betas in ([0.9], [0.9, 1.0], [-0.1, 0.9], [0.9, "auto"], 0.9)
    ),
    *(("optimizer.params.eps", eps, "a number above 0") for eps in (0, "1e-8")),
]
CHANGES = [  # what would change the numbers, or lose steps or checkpoints
    ("optimizer.type", "Lamb", 'write "AdamW"'),
    ("optimizer.params.torch_adam", False, 'write "torch_adam": true'),
    ("data_types.grad_accum_dtype", "fp16", "bf16 or fp32"),
    ("bfloat16", {}, 'write "bf16"'),
    ("scheduler", {"type": "WarmupLR", "params": {"a": "auto"}}, "train.warmup"),
    ("tensorboard", {"enabled": True}, "set monitor.tensorboard"),
    ("torch_autocast", {"enabled": True}, "set train.precision"),
    ("data_types.param_dtype", "bf16", "set train.precision"),
    ("fp16.fp16_master_weights_and_grads", True, "loses the fp32 master weights"),
    ("bf16.check_grad_overflow", False, "must be skipped"),
    ("zero_optimization.compute_grad_norm", False, "is not skipped"),
    ("zero_optimization.cpu_offload", True, 'write "offload_optimizer"'),
    ("checkpoint.load_universal", True, "use --resume --universal"),
    ("zero_optimization.elastic_checkpoint", True, "--resume --universal"),
    *((name, {"enabled": True}, "withdrawn") for name in WITHDRAWN),
    *((name, {}, "another way of training") for name in OTHER_TRAINING),
]


@pytest.mark.parametrize(("key", "value", "words"), NAMES + KINDS + CHANGES)
def test_a_wrong_key_is_refused_with_a_fix(key: str, value: Any, words: str) -> None:
    message = error_message(json_with("zero2_pcie", **{key: value}))
    assert words in message
    assert "\n" not in message, "one line, also where keys below it are missing"
    assert "mine.json" in message
    if "DeepSpeed refuses it" not in message:
        assert key in message


def test_stage_0_accumulates_in_the_dtype_of_training() -> None:
    raw = json_with("zero0_debug", **{"data_types.grad_accum_dtype": "fp32"})
    assert 'data_types.grad_accum_dtype = "fp32": ' in error_message(raw)


def test_a_resumed_run_drops_its_recipes_values_and_withdrawn_blocks_of_its_checkpoint() -> None:
    saved = {"csv_monitor": {"enabled": True}, "train_batch_size": 8, "bf16": {"enabled": True}}
    kept = {"zero_optimization": {"stage": 2}, "fp16": {"loss_scale_window": 500}}
    assert leave_to_recipe(saved | kept) == kept | {"bf16": {}, "optimizer": {"params": {}}}


def test_every_refused_key_is_tried_above() -> None:
    removed = set(_REMOVED_TOP_LEVEL_CONFIG_KEYS)  # by DeepSpeed
    assert set(REFUSED) - removed <= {key for key, _, _ in CHANGES}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero_optimization.allgather_bucket_size", 500_000_000),
        ("zero_optimization.stage3_max_live_parameters", 1),
        ("fp16.loss_scale", 128),
        ("steps_per_print", None),
        ("optimizer.type", "Adam"),
    ],
)
def test_a_key_without_effect_is_no_error(key: str, value: Any) -> None:
    assert at(resolve(json_with("zero1_pcie", **{key: value})), key) == value


@pytest.mark.parametrize(("device", "offloaded"), [("cpu", True), ("none", False)])
def test_offload_takes_an_optimizer_that_reduces_in_buckets(device: str, offloaded: bool) -> None:
    offload = {"zero_optimization.offload_optimizer": {"device": device}}
    resolved = resolve(json_with("zero1_pcie", **offload))
    assert ("reduce_bucket_size" in resolved["zero_optimization"]) == offloaded
    assert (", offloaded, " in summary_line(resolved, 2)) == offloaded
    of_weights = json_with("zero3", **{"zero_optimization.offload_param": {"device": device}})
    assert zero_mode(resolve(of_weights)).offload == offloaded


def test_betas_and_epsilon_of_the_json_win_over_the_defaults() -> None:
    params = resolve(json_with())["optimizer"]["params"]
    assert (params["betas"], params["eps"]) == ([0.9, 0.95], 1e-8)
    given = {"optimizer.params.betas": [0.0, 0.99], "optimizer.params.eps": 1e-6}
    params = resolve(json_with(**given))["optimizer"]["params"]
    assert (params["betas"], params["eps"]) == ([0.0, 0.99], 1e-6)
    params = resolve(json_with(**dict.fromkeys(given, "auto")))["optimizer"]["params"]
    assert (params["betas"], params["eps"]) == ([0.9, 0.95], 1e-8)
    alone = resolve({"zero_optimization": {"stage": 1}})["optimizer"]["params"]
    assert (alone["betas"], alone["eps"]) == ([0.9, 0.95], 1e-8)


def test_a_missing_stage_is_refused_once_all_keys_are_known() -> None:
    raw = json_with()
    del raw["zero_optimization"]
    fix = "zero_optimization.stage is missing: write 0, 1, 2 or 3"
    assert error_message(raw) == f"mine.json: {fix}"
    message = error_message(raw | {"zero_optimisation": {"stage": 2}})
    assert message.startswith('mine.json: zero_optimisation = {"stage": 2}: DeepSpeed ')
    assert message.endswith('did you mean "zero_optimization"? If not, remove it')


# --- configs of other projects ----------------------------------------------------------------

# Transformers: its documentation and tests/deepspeed; axolotl: deepspeed_configs; LLaMA-Factory:
# examples/deepspeed.
STOCK: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text())
    for file in sorted(Path(__file__).with_name("stock").glob("*.json"))
}
REFUSED_IN = {
    "transformers_zero1": ["scheduler", "optimizer.params.torch_adam"],
    "axolotl_zero2": [],
    "axolotl_zero3_bf16": [
        f"zero_optimization.{name}"
        for name in ("prefetch_bucket_size", "param_persistence_threshold", "reduce_bucket_size")
    ],
    "llama_factory_z3": [
        *("comms_config", "monitor_config", "zero_optimization.reduce_bucket_size"),
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
    ],
}


@pytest.mark.parametrize("name", STOCK)
def test_a_config_of_another_project_is_refused_by_key_and_accepted_once_fixed(name: str) -> None:
    raw, refused = deepcopy(STOCK[name]), REFUSED_IN[name]
    if refused:
        header, *lines = error_message(raw).splitlines()
        assert header == f"mine.json: {len(refused)} keys to change:"
        assert sorted(line.split()[0] for line in lines) == sorted(refused)
        assert all("remove it" in line or 'write "' in line for line in lines)
    for path in refused:
        *parents, name = path.split(".")
        block = at(raw, ".".join(parents)) if parents else raw
        block.pop(name, None)
        if name == "torch_adam":
            block[name] = True
    resolve(raw)


# --- supported keys --------------------------------------------------------------------------


def test_loss_scaling_keys_reach_deepspeed() -> None:
    keys = {
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 50,
        "hysteresis": 3,
        "consecutive_hysteresis": True,
        "min_loss_scale": 4,
    }
    raw = json_with("zero1_pcie", **{f"fp16.{name}": value for name, value in keys.items()})
    assert resolve(raw, precision="fp16")["fp16"] == {"enabled": True, **keys}


def test_activation_checkpointing_is_allowed_with_deepspeeds_checkpointing() -> None:
    config = run_config()
    config.model.activation_checkpointing = "deepspeed"
    raw = json_with(activation_checkpointing={"cpu_checkpointing": True})
    resolved = resolve_ds_config(raw, config, world_size=2)
    assert resolved["activation_checkpointing"] == {"cpu_checkpointing": True}


# --- the shipped configs ---------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", SHIPPED)
def test_deepspeed_parses_a_shipped_config_as_intended(name: str, precision: str) -> None:
    resolved = resolve(json_with(name), world_size=1, precision=precision, clip=0.5)
    assert "auto" not in [value for _, value in walk(resolved)]
    parsed = DeepSpeedConfig(deepcopy(resolved))
    assert parsed.gradient_clipping == 0.5
    assert parsed.bfloat16_config.enabled == (precision == "bf16")
    assert parsed.float16_config.enabled == (precision == "fp16")
    assert parsed.zero_optimization_stage == int(name[4])
    assert parsed.zero_config.overlap_comm == (name in ("zero2_overlap", "zero3"))
    assert parsed.zero_config.reduce_bucket_size <= 2**25 or name in NO_BUCKETS
    assert parsed.optimizer_params == resolved["optimizer"]["params"]
    assert parsed.grad_accum_dtype == ("fp32" if name == "zero1_pcie" else None)
    assert not parsed.timers_config.enabled
