"""From recipe, file and command line to one checked configuration, and back to YAML."""

from __future__ import annotations

import types
import typing
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from nsa.engine.config import RunConfig

# `attention` belongs to the model; people may name it without saying so.
SHORT_NAMES = {"attention": "model.attention"}
MIXTURES = ("data.source",)  # settings that may be a mixture, and are overruled whole
MIXTURE = dict[str, float]  # a value whose keys are the user's
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    MIXTURE: "names with weights",
}


def resolve_config(
    recipe: RunConfig, file: Path | None = None, assignments: list[str] | None = None
) -> RunConfig:
    """The recipe's values, overruled by a YAML file, overruled by `path.to.key=value`s; checked."""
    tree = asdict(recipe)
    if file is not None:
        _merge(tree, _spell_out(_read_yaml(file)), str(file))
    for assignment in assignments or []:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set {assignment}: write it as path.to.key=value")
        nested: Any = _parsed(text, f"--set {assignment}")
        for key in reversed(path.strip().split(".")):
            nested = {key: nested}
        _merge(tree, _spell_out(nested), f"--set {assignment}")
    config = _build(RunConfig, tree, "")
    config.validate()
    return config


def to_yaml(config: RunConfig) -> str:
    """The whole tree as YAML; `resolve_config` reads it back to an equal configuration."""
    return yaml.safe_dump(asdict(config), sort_keys=False)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        tree = _parsed(file.read_text(), f"--config {file}")
    except FileNotFoundError:
        raise ValueError(f"--config {file}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        inside = file / "config.yaml"
        fix = f"give {inside}" if inside.is_file() else "give a YAML file"
        raise ValueError(f"--config {file}: cannot be read as text ({error}); {fix}") from None
    if tree is not None and not isinstance(tree, dict):
        raise ValueError(f"--config {file}: expected sections with keys, found {tree!r}")
    return tree or {}


def _parsed(text: str, source: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        line = " ".join(str(error).split())  # PyYAML's own has several lines
        raise ValueError(f"{source}: not YAML: {line}") from None


def _spell_out(tree: dict[str, Any]) -> dict[str, Any]:
    """Replace the short names of sections by their places in the tree."""
    result = dict(tree)
    for short, path in SHORT_NAMES.items():
        if short in result:
            section, key = path.split(".")
            inner = {**(result.get(section) or {}), key: result.pop(short)}
            result[section] = inner
    return result


def _merge(tree: dict[str, Any], changes: Any, source: str, path: str = "") -> None:
    """Lay `changes` over `tree`, refusing keys that it does not have."""
    if not isinstance(changes, dict):
        raise ValueError(f"{source}: {path} is a section; set one of {', '.join(tree)} in it")
    for key, value in changes.items():
        name = f"{path}.{key}" if path else str(key)
        if key not in tree:
            names = {other: f"{path}.{other}" if path else other for other in tree}
            near = get_close_matches(str(key), list(tree), n=1)
            hint = f"choose one of {', '.join(names.values())}"
            elsewhere = _places(tree, key, f"{path}." if path else "")
            if elsewhere or near:
                hint = f"did you mean {' or '.join(elsewhere) or names[near[0]]}?"
            raise ValueError(f"{source}: there is no setting {name!r}; {hint}")
        if isinstance(tree[key], dict) and name not in MIXTURES:
            _merge(tree[key], value, source, name)
        else:
            tree[key] = value


def _places(tree: dict[str, Any], key: Any, prefix: str) -> list[str]:
    """Where in sections of `tree` a setting has this very name."""
    found = []
    for name, inner in tree.items():
        if isinstance(inner, dict) and f"{prefix}{name}" not in MIXTURES:
            found += [f"{prefix}{name}.{key}"] if key in inner else []
            found += _places(inner, key, f"{prefix}{name}.")
    return found


def _build(cls: type, tree: dict[str, Any], path: str) -> Any:
    hints = typing.get_type_hints(cls)
    values = {}
    for field in fields(cls):
        name = f"{path}.{field.name}" if path else field.name
        hint, value = hints[field.name], tree[field.name]
        values[field.name] = (
            _build(hint, value, name)
            if isinstance(hint, type) and is_dataclass(hint)
            else _cast(value, hint, name)
        )
    return cls(**values)


def _cast(value: Any, hint: Any, name: str) -> Any:
    """`value` as the field's type, refusing what would lose meaning."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in allowed:
        return None
    if MIXTURE in allowed and isinstance(value, dict):
        if None in value.values():
            raise ValueError(f"{name} = {value!r}: YAML wants a blank behind each colon")
        return {str(key): _cast(weight, float, f"{name}: {key}") for key, weight in value.items()}
    if float in allowed and not isinstance(value, bool):
        try:
            return float(value)  # YAML takes 2e-4, without a point, for text
        except (TypeError, ValueError):
            pass
    elif any(type(value) is kind for kind in allowed):
        return value
    kinds = " or ".join(KINDS[kind] for kind in allowed)
    raise ValueError(f"{name} = {value!r}: must be {kinds}")
