"""Config tree of a run; precedence: recipe < `--config` file < `--set path.to.key=value`."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from nsa.checkpoint.saver import CheckpointConfig
from nsa.constants import BRANCHES, SHORT_RUN
from nsa.data.config import DataConfig
from nsa.model.config import UNTRAINED_INDEX, ModelConfig
from nsa.monitor.config import MonitorConfig
from nsa.spec import NSASpec
from nsa.untrusted import parse_yaml, read_text, short_repr
from nsa.validation import above_zero, at_least, at_most, one_of
from nsa.withdrawn import check_setting, drop_withdrawn

AUTO = "auto"
MAPPINGS = "data.source", "model.rope_extension"  # their value is a mapping, not a section
MIXTURE = dict[str, float]
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    MIXTURE: "names with weights",
}
LARGEST = 2**62  # largest whole number; torch and numpy hold 64 bits


@dataclass
class TrainConfig:
    """Optimisation: the values for "auto" in DeepSpeed's JSON, and the policy for bad steps."""

    steps: int = 50_000  # optimizer steps of the run, and length of the learning-rate schedule
    micro_batch: int | str = 8  # sequences per rank in one forward pass; auto: as many as fit
    accumulation: int = 4  # micro-batches per step; with micro_batch=auto: sequences per rank
    start_from: str | None = None  # run or checkpoint with the initial weights; null: random
    teacher: str | None = None  # run or checkpoint whose predictions to learn too; null: none
    selector_steps: int = 0  # first steps, in which attention is dense and only the index learns
    selector_rate: float = 3e-3  # constant learning rate in selector_steps
    # first steps, in which attention is dense and all weights learn; auto: half of steps, but 0
    # without an index and in trial runs of fewer than 100 steps
    dense_steps: int | str = 0
    learning_rate: float = 6e-4  # peak of the cosine schedule
    min_learning_rate: float = 6e-5  # end of the cosine schedule
    value_rate: float = 1.0  # factor on the learning rate of the value projections
    warmup_steps: int = 2_000  # steps of linear warmup; scaled if only train.steps is set
    weight_decay: float = 0.01  # AdamW weight decay, on matrices only
    clip: float = 1.0  # max gradient norm; 0: no clipping
    precision: str = "bf16"  # "bf16", "fp16" with loss scaling, or "fp32" for debugging
    seed: int = 1337  # of the initial weights and the data order
    eval_every: int = 500  # steps between validations; 0: only at the end
    eval_samples: int = 64  # validation sequences per evaluation, over all ranks
    on_bad_step: str = "skip"  # non-finite loss or gradient: abort or skip

    def validate(self) -> None:
        at_least(1, "train", self, "steps", "accumulation", "eval_samples")
        for low, name in ((1, "micro_batch"), (0, "dense_steps")):
            value = getattr(self, name)
            if isinstance(value, int):
                at_least(low, "train", self, name)
            elif value != AUTO:
                raise ValueError(f"train.{name} = {value!r}: must be a whole number or {AUTO}")
        if self.micro_batch != AUTO:
            at_most(65_536, "train", self, "micro_batch")
        at_most(65_536, "train", self, "accumulation")
        at_least(0, "train", self, "warmup_steps", "eval_every", "clip")
        at_least(0, "train", self, "weight_decay", "min_learning_rate", "seed", "selector_steps")
        above_zero("train", self, "learning_rate", "selector_rate", "value_rate")
        one_of("train", self, on_bad_step=("abort", "skip"), precision=("bf16", "fp16", "fp32"))
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"train.min_learning_rate = {self.min_learning_rate}: is above "
                f"train.learning_rate = {self.learning_rate}; lower it"
            )

    @property
    def rows(self) -> int:
        """`micro_batch` as a number: 1 until nsa/engine/micro_batch.py replaces `auto`."""
        return self.micro_batch if isinstance(self.micro_batch, int) else 1

    @property
    def switch_step(self) -> int:
        """`dense_steps` as a number: 0 until `RunConfig.resolved` replaces `auto`."""
        return self.dense_steps if isinstance(self.dense_steps, int) else 0


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the rate of step `step`, counted from 0: selector_rate, linear warmup, then cosine."""
    if step < train.selector_steps:
        return train.selector_rate
    step, steps = step - train.selector_steps, train.steps - train.selector_steps
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, steps - train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return train.min_learning_rate + (train.learning_rate - train.min_learning_rate) * cosine


@dataclass
class RunConfig:
    """All settings of a run except DeepSpeed's JSON."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def validate(self) -> None:
        for section in (self.model, self.data, self.train, self.monitor, self.checkpoint):
            section.validate()
        attention = self.model.attention
        if attention.has_index and not attention.selector_loss:
            raise ValueError(f"model.attention.{UNTRAINED_INDEX}")
        train = self.train
        if train.selector_steps >= train.steps:
            raise ValueError(
                f"train.selector_steps = {train.selector_steps}: not below train.steps = "
                f"{train.steps}, so only the selector is trained; lower it"
            )
        if not train.switch_step:
            return
        if train.start_from is not None:
            raise ValueError(
                f"train.dense_steps = {train.dense_steps}: needs new weights; set "
                "train.start_from=null, or dense_steps to 0"
            )
        if train.selector_steps:
            raise ValueError(
                f"train.selector_steps = {train.selector_steps}: not with train.dense_steps, in "
                "which the selector loss already trains the index; set one of them to 0"
            )
        if train.switch_step >= train.steps:
            raise ValueError(
                f"train.dense_steps = {train.dense_steps}: not below train.steps = {train.steps}, "
                "so attention never becomes sparse; lower it, or set auto"
            )

    def check_phases(self) -> None:
        """Raise a ValueError for dense or selector steps without an index.

        Not in `validate`: configs that earlier versions saved have them, and must load.
        """
        for name in ("dense_steps", "selector_steps"):
            value = getattr(self.train, name)
            if value and not self.model.attention.has_index:
                raise ValueError(
                    f"train.{name} = {value}: needs an index; three branches no longer have such "
                    f"steps; set model.attention.branches=sel, or {name} to 0"
                )

    def samples_per_step(self, ranks: int) -> int:
        return self.train.rows * self.train.accumulation * ranks

    def tokens_per_step(self, ranks: int) -> int:
        return self.samples_per_step(ranks) * self.data.seq_len

    def resolved(self) -> RunConfig:
        """Return the config with train.dense_steps=auto as a number: 0 if the run can have none."""
        train = self.train
        if train.dense_steps != AUTO:
            return self
        new_weights = train.start_from is None and not train.selector_steps
        possible = self.model.attention.has_index and new_weights and train.steps >= SHORT_RUN
        dense_steps = train.steps // 2 if possible else 0
        return replace(self, train=replace(train, dense_steps=dense_steps))

    def selects_all_note(self) -> str | None:
        """Return a warning if sequences are so short that every block is selected."""
        attention, seq_len = self.model.attention, self.data.seq_len
        if attention.kind != "nsa" or "sel" not in attention.branch_names:
            return None
        blocks, top = attention.spec.select_blocks_len(seq_len), attention.spec.select_top
        if blocks > top:
            return None
        return (
            f"data.seq_len = {seq_len}: has {blocks} selection blocks and "
            f"model.attention.spec.select_top = {top}, so every query selects all of its blocks; "
            f"set data.seq_len above {top * attention.spec.select_len}, or lower select_top"
        )


def resolve_config(
    recipe: RunConfig, file: Path | None = None, assignments: list[str] | None = None
) -> RunConfig:
    """Return the recipe's config, overridden by a YAML file, then by `path.to.key=value`s."""
    tree = asdict(recipe)
    if file is not None:
        _override(tree, [(_read_yaml(file), str(file))])
    changes = []
    for assignment in assignments or []:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set {assignment}: write it as path.to.key=value")
        # YAML would read a pattern such as *.py as an alias; no value may have aliases.
        value: Any = text if text[:1] == "*" else _parse(text, f"--set {assignment}")
        for key in reversed(path.strip().split(".")):
            value = {key: value}
        changes.append((value, f"--set {assignment}"))
    given = _override(tree, changes)
    config = _validated(tree)
    attention = config.model.attention
    if "model.attention.spec.window" in given and attention.has_index:
        raise ValueError(
            f"model.attention.spec.window = {attention.spec.window}: branches=sel has no window; "
            "remove it and set local_blocks, the last blocks that are always selected"
        )
    return config


def read_saved_config(file: Path) -> tuple[RunConfig, list[str]]:
    """Read the config.yaml that this or an earlier version wrote; also return dropped settings.

    A withdrawn setting of the model is an error, except for the initial weights, which no longer
    matter. Other withdrawn settings are dropped, with a line each. Missing ones get their default.
    """
    tree, dropped = drop_withdrawn(_read_yaml(file))
    for line in dropped:
        if line.startswith("model.") and not line.startswith("model.init_std"):
            raise ValueError(f"{file}: {line}; use the version that trained it")
    config = asdict(RunConfig())
    _override(config, [(tree, str(file))])
    return _validated(config), dropped


def _validated(tree: dict[str, Any]) -> RunConfig:
    config: RunConfig = _build(RunConfig, tree, "").resolved()
    config.validate()
    return config


def _override(tree: dict[str, Any], changes: list[tuple[dict[str, Any], str]]) -> set[str]:
    """Override settings of `tree` in place, adapt others to them, and return the overridden names.

    An overridden setting is not adapted. A step keeps its tokens when micro_batch changes to or
    from `auto`, and the warmup keeps its fraction of the steps.
    """
    train, given = tree["train"], set[str]()
    old = dict(train)
    for change, source in changes:
        _merge(tree, change, source, given)
    if "train.accumulation" not in given:
        train["accumulation"] = _accumulation(old["micro_batch"], train)
    if "train.warmup_steps" not in given:
        train["warmup_steps"] = scaled_warmup(old["warmup_steps"], old["steps"], train["steps"])
    if given & {"model.attention.kind", "model.attention.branches"}:
        _adapt_to_attention(tree, given)
    return given


def _adapt_to_attention(tree: dict[str, Any], given: set[str]) -> None:
    """Reset the settings that the overridden kind or branches of attention do not have."""
    attention = tree["model"]["attention"]
    sparse = attention["kind"] == "nsa"
    has_index = attention["branches"] == "sel"
    if "train.value_rate" not in given and sparse and not has_index:
        tree["train"]["value_rate"] = 1.0  # other rates were measured with branches=sel only
    compresses = has_index or "cmp" in str(attention["branches"])
    if "model.attention.compressor" not in given and not compresses:
        attention["compressor"] = "mean"
    can_have_loss = sparse and (has_index or attention["branches"] == "+".join(BRANCHES))
    if "model.attention.selector_loss" not in given:
        if not can_have_loss:
            attention["selector_loss"] = 0.0
        elif has_index and not attention["selector_loss"]:
            attention["selector_loss"] = 1.0  # nothing else trains the index
    if "model.attention.spec.window" not in given and sparse and has_index:
        attention["spec"]["window"] = NSASpec.window


def scaled_warmup(warmup: int, before: int, steps: Any) -> int:
    """Return `warmup` scaled from a run of `before` steps to one of `steps`."""
    if type(steps) is not int or not warmup or min(before, steps) < 1:
        return warmup
    return max(1, round(warmup * steps / before))


def _accumulation(before: Any, train: dict[str, Any]) -> Any:
    """Return the accumulation that keeps a step's tokens; micro_batch was `before`.

    With micro_batch=auto accumulation counts sequences, else micro-batches. The types are checked
    later: return it unchanged if a value has a wrong type.
    """
    after, accumulation = train["micro_batch"], train["accumulation"]
    if type(accumulation) is not int:
        return accumulation
    if type(before) is int and after == AUTO:
        return before * accumulation
    if before == AUTO and type(after) is int and after > 0:
        if accumulation % after:
            raise ValueError(
                f"train.micro_batch = {after}: does not divide the recipe's {accumulation} "
                "sequences per rank and step; set a divisor, or train.accumulation too"
            )
        return accumulation // after
    return accumulation


def to_yaml(config: RunConfig) -> str:
    """Return the config as YAML that `resolve_config` reads back to an equal config."""
    return yaml.safe_dump(asdict(config), sort_keys=False)


def walk(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and value of every entry, parents before children."""
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from walk(value, f"{prefix}{key}.")


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        text = read_text(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--config {file}: cannot be read ({reason}); give a YAML file") from None
    tree = _parse(text, f"--config {file}")
    if tree is not None and not isinstance(tree, dict):
        raise ValueError(f"--config {file}: holds {short_repr(tree)}; write sections with keys")
    return tree or {}


def _parse(text: str, source: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"{source[:200]}: {error}") from None


def _merge(
    tree: dict[str, Any], changes: Any, source: str, given: set[str], path: str = ""
) -> None:
    """Override values of `tree`, add their names to `given`, and refuse unknown keys."""
    if not isinstance(changes, dict):
        raise ValueError(f"{source}: {path} is a section; set one of {', '.join(tree)} in it")
    for key, value in changes.items():
        name = f"{path}.{key}" if path else str(key)
        if name == "attention":  # short for model.attention
            _merge(tree["model"]["attention"], value, source, given, "model.attention")
            continue
        check_setting(name, value, source)
        if key not in tree:
            raise ValueError(f"{source}: there is no setting {name!r}; {_hint(tree, key, path)}")
        if isinstance(tree[key], dict) and name not in MAPPINGS:
            _merge(tree[key], value, source, given, name)
        else:
            tree[key] = value
            given.add(name)


def _hint(tree: dict[str, Any], key: Any, path: str) -> str:
    """Return what to write instead of an unknown key of section `path`."""

    def plain(name: str) -> str:
        return name.rpartition(".")[2].replace("_", "").lower()

    settings = [name for name, _ in walk(asdict(RunConfig()))]
    close = get_close_matches(plain(str(key)), map(plain, settings), n=1)
    if near := [name for name in settings if plain(name) in close]:
        return f"did you mean {' or '.join(near)}?"
    known = [f"{path}.{name}" for name in tree] if path else [*tree, "attention"]
    return f"choose one of {', '.join(known)}"


def _build(cls: type, tree: dict[str, Any], path: str) -> Any:
    """Return the dataclass `cls` of section `path`, with the values of `tree`."""
    kinds = typing.get_type_hints(cls)
    values = {}
    for setting in fields(cls):
        name = f"{path}.{setting.name}".strip(".")
        kind = kinds[setting.name]
        build = _build if is_dataclass(kind) else _cast
        values[setting.name] = build(kind, tree[setting.name], name)
    try:
        return cls(**values)
    except ValueError as error:  # NSASpec checks its values when it is built
        raise ValueError(str(error).replace(f"{cls.__name__}.", f"{path}.")) from None


def _cast(kind: Any, value: Any, name: str) -> Any:
    """Return `value` as the field's type; the only conversion is to float."""
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if MIXTURE in allowed and isinstance(value, dict):
        if None in value.values():  # YAML reads {a:1} as the key "a:1" with no value
            raise ValueError(f"{name} = {short_repr(value)}: write a space after each colon")
        return {str(key): _cast(float, weight, f"{name}: {key}") for key, weight in value.items()}
    number = None if isinstance(value, bool) else _number(value)
    if float in allowed and number is not None:
        if not math.isfinite(number):
            raise ValueError(f"{name} = {number}: must be a finite number")
        return number
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{name} = {short_repr(value)}: is too large; make it at most {LARGEST}")
    if type(value) in allowed:
        return value
    fix = ""
    if int in allowed and number is not None and number.is_integer():
        fix = f"; write {number:.0f}"
    kinds = " or ".join(KINDS[kind] for kind in allowed)
    raise ValueError(f"{name} = {short_repr(value)}: must be {kinds}{fix}")


def _number(value: Any) -> float | None:
    """Return `value` as a float, inf if it is too large for one; None if it is no number."""
    try:
        return float(value)  # YAML reads 2e-4, without a point, as text
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None
