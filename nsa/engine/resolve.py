"""Resolve a run's config: recipe < `--config` file < `--set path.to.key=value`; write YAML."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from nsa.constants import BRANCHES
from nsa.engine.config import AUTO, RunConfig
from nsa.spec import NSASpec
from nsa.untrusted import parse_yaml, read_text, short_repr
from nsa.withdrawn import check_setting, drop_withdrawn

MAPPINGS = "data.source", "model.rope_extension"  # a mapping is their value: overrides replace it
MIXTURE = dict[str, float]
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    MIXTURE: "names with weights",
}
LARGEST = 2**62  # of a whole number; torch and numpy hold 64 bits


def resolve_config(
    recipe: RunConfig, file: Path | None = None, assignments: list[str] | None = None
) -> RunConfig:
    """Return the recipe's config, overridden by a YAML file, then by `path.to.key=value`s."""
    tree, changes = asdict(recipe), list[tuple[dict[str, Any], str]]()
    if file is not None:
        _override(tree, [(_read_yaml(file), str(file))])
    for assignment in assignments or []:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set {assignment}: write it as path.to.key=value")
        # A pattern such as *.py is no alias: aliases are refused everywhere.
        value: Any = text if text[:1] == "*" else _parse(text, f"--set {assignment}")
        for key in reversed(path.strip().split(".")):
            value = {key: value}
        changes.append((value, f"--set {assignment}"))
    given, config = _override(tree, changes), _validated(tree)
    window = "model.attention.spec.window"
    if window in given and config.model.attention.has_index:
        raise ValueError(
            f"{window} = {config.model.attention.spec.window}: branches=sel has no window; remove "
            "it and set local_blocks, the last blocks that are always selected"
        )
    return config


def read_saved_config(file: Path) -> tuple[RunConfig, list[str]]:
    """Read the config.yaml of a run, a checkpoint or an export, of earlier versions too.

    Returns it with a line per value that is withdrawn. What an older version did not save has its
    default. Raises ValueError if the model itself has something that is withdrawn; how its weights
    began no longer matters.
    """
    tree, lost = drop_withdrawn(_read_yaml(file))
    for line in lost:
        if line.startswith("model.") and not line.startswith("model.init_std"):
            raise ValueError(f"{file}: {line}; use the version that trained it")
    config = asdict(RunConfig())
    _override(config, [(tree, str(file))])
    return _validated(config), lost


def _validated(tree: dict[str, Any]) -> RunConfig:
    config: RunConfig = _build(RunConfig, tree, "").resolved()
    config.validate()
    return config


def _override(tree: dict[str, Any], changes: list[tuple[dict[str, Any], str]]) -> set[str]:
    """Override values of `tree` in place, and adapt what was not given to what was.

    Returns the names of what was given. A step keeps its tokens when micro_batch changes to or from
    `auto`, and the warmup its fraction of the steps. Attention that was changed to a kind or to
    branches that cannot use the tree's φ, selector loss or window does without.
    """
    train, attention, given = tree["train"], tree["model"]["attention"], set[str]()
    before, schedule = train["micro_batch"], (train["warmup_steps"], train["steps"])
    for change, source in changes:
        _merge(tree, change, source, given)
    if "train.accumulation" not in given:
        train["accumulation"] = _accumulation(before, train["micro_batch"], train["accumulation"])
    if "train.warmup_steps" not in given:
        train["warmup_steps"] = scaled_warmup(*schedule, train["steps"])
    if not given & {"model.attention.kind", "model.attention.branches"}:
        return given
    sparse = attention["kind"] == "nsa"
    has_index, three = (attention["branches"] == x for x in ("sel", "+".join(BRANCHES)))
    pools = has_index or "cmp" in str(attention["branches"])
    if "model.attention.compressor" not in given and not pools:
        attention["compressor"] = "mean"
    if "model.attention.selector_loss" not in given:
        if not (sparse and (has_index or three)):
            attention["selector_loss"] = 0.0
        elif has_index:  # nothing else trains the index
            attention["selector_loss"] = attention["selector_loss"] or 1.0
    if "model.attention.spec.window" not in given and sparse and has_index:
        attention["spec"]["window"] = NSASpec.window
    return given


def scaled_warmup(warmup: int, before: int, steps: Any) -> int:
    """Return the warmup that is as large a part of `steps` as `warmup` of the steps `before`."""
    if type(steps) is not int or not warmup or min(before, steps) < 1:
        return warmup
    return max(1, round(warmup * steps / before))


def _accumulation(before: Any, after: Any, accumulation: Any) -> Any:
    """Return the accumulation that keeps a step's tokens; of values of other types, unchanged."""
    if type(accumulation) is not int:
        return accumulation
    if after == AUTO and isinstance(before, int):
        return before * accumulation
    if before != AUTO or type(after) is not int or after < 1:
        return accumulation
    micro_batches, rest = divmod(accumulation, after)
    if rest or not micro_batches:
        raise ValueError(
            f"train.micro_batch = {after}: does not divide the recipe's {accumulation} sequences "
            "per rank and step; set a divisor, or train.accumulation too"
        )
    return micro_batches


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
    """Override values of `tree`, add their names to `given`; refuse unknown keys."""
    if not isinstance(changes, dict):
        raise ValueError(f"{source}: {path} is a section; set one of {', '.join(tree)} in it")
    for key, value in changes.items():
        name = f"{path}.{key}" if path else str(key)
        if name == "attention":
            _merge(tree["model"]["attention"], value, source, given, "model.attention")
            continue
        check_setting(name, value, source)
        if key not in tree:
            raise ValueError(f"{source}: there is no setting {name!r}; {_hint(tree, key, path)}")
        elif isinstance(tree[key], dict) and name not in MAPPINGS:
            _merge(tree[key], value, source, given, name)
        else:
            tree[key] = value
            given.add(name)


def _hint(tree: dict[str, Any], key: Any, path: str) -> str:
    """Return what to write instead of an unknown key of section `path`."""

    def plain(name: str) -> str:
        return name.rpartition(".")[2].replace("_", "").lower()

    settings = [name for name, _ in walk(asdict(RunConfig()))]
    close = get_close_matches(plain(str(key)), {plain(name): None for name in settings}, n=1)
    near = [name for name in settings if plain(name) in close]
    if near:
        return f"did you mean {' or '.join(near)}?"
    names = [*tree, "attention"] if not path else tree
    return f"choose one of {', '.join(f'{path}.{known}'.strip('.') for known in names)}"


def _build(cls: type, tree: dict[str, Any], path: str) -> Any:
    types_of = typing.get_type_hints(cls)
    values = {}
    for field in fields(cls):
        name = f"{path}.{field.name}".strip(".")
        build = _build if is_dataclass(types_of[field.name]) else _cast
        values[field.name] = build(types_of[field.name], tree[field.name], name)
    return cls(**values)


def _cast(kind: Any, value: Any, name: str) -> Any:
    """Return `value` as the field's type; the only conversion is to float."""
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if MIXTURE in allowed and isinstance(value, dict):
        if None in value.values():
            raise ValueError(f"{name} = {short_repr(value)}: write a space after each colon")
        return {str(key): _cast(float, weight, f"{name}: {key}") for key, weight in value.items()}
    if float in allowed and not isinstance(value, bool):
        number = _number(value)
        if number is not None and not math.isfinite(number):
            raise ValueError(f"{name} = {number}: must be a finite number")
        if number is not None:
            return number
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{name} = {short_repr(value)}: is too large; make it at most {LARGEST}")
    if type(value) in allowed:
        return value
    number = _number(value) if int in allowed and not isinstance(value, bool) else None
    fix = f"; write {number:.0f}" if number is not None and number.is_integer() else ""
    kinds = " or ".join(KINDS[kind] for kind in allowed)
    raise ValueError(f"{name} = {short_repr(value)}: must be {kinds}{fix}")


def _number(value: Any) -> float | None:
    """Return `value` as a float, infinite if none is that large; None if it is no number."""
    try:
        return float(value)  # YAML reads 2e-4, without a point, as text
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None
