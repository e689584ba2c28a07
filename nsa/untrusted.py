"""Untrusted files: read them without blocking, parse them without recursion, print them safely.

A checkpoint, an export, a dataset or a run's folder may come from anyone (docs/design/security.md).
A pipe or a device in place of a file would block, deep nesting would end in a RecursionError, a
pickle could run code, and control characters would reach the terminal.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import pickle
import re
import reprlib
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import yaml

short_repr = reprlib.repr  # repr() for a message: long values are shortened
MAX_TEXT_BYTES = 2**28  # of a text file; this project's are far smaller
MAX_RUN_FILE_BYTES = 2**25  # of a run's table or JSON file; those of a long run are half as large
MAX_YAML_CHARS = 2**18  # of a YAML document: PyYAML is slow
INT_TAG, FLOAT_TAG = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
OTHER_BASE = re.compile("[-+]?(0[0-9_xXbB]|.*:)")  # octal, hexadecimal, binary, base 60
FORCE_DATA, FORCE_CODE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
MAX_DEPTH = 100  # levels of nesting; this project's files have fewer than ten


def open_regular(path: Path, limit: int = sys.maxsize) -> FileIO:
    """Open a regular file, unbuffered; raise OSError for a pipe or a device, which could block.

    Raise a ValueError if the file has more than `limit` bytes.
    """

    def open_without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # changes nothing for regular files

    file = open(path, "rb", 0, opener=open_without_waiting)  # noqa: SIM115 (returned)
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    if status.st_size > limit:
        file.close()
        raise ValueError(f"{path}: has more than {limit:,} bytes")
    return file


def read_text(path: Path, errors: str = "strict", limit: int = MAX_TEXT_BYTES) -> str:
    """Return the UTF-8 text of a regular file; raise OSError or ValueError if it has none."""
    with open_regular(path, limit) as file:
        try:
            return file.read().decode("utf-8", errors)
        except OSError as error:  # an error of read() names no file
            error.filename = str(path)
            raise


def text_or_empty(path: str | Path) -> str:
    """Return a file's text, with invalid bytes replaced; "" if it cannot be read or is huge."""
    try:
        return read_text(Path(path), "replace", MAX_RUN_FILE_BYTES)
    except (OSError, ValueError):
        return ""


def check_links(folder: Path) -> None:
    """Raise a ValueError if a link leads out of `folder`.

    A copy of the folder would hold the link's target, which may be a private file. Allowed are
    links to weights, and links from a hub cache's snapshots to its blobs.
    """
    real = os.path.realpath(folder)
    allowed = [real]
    if Path(real).parent.name == "snapshots":
        allowed.append(str(Path(real).parent.parent / "blobs"))
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        target = os.path.realpath(path)
        inside = any(target.startswith(f"{root}{os.sep}") for root in allowed)
        if not inside and path.suffix != ".safetensors":
            raise ValueError(
                f"{path}: is a link to a file outside of its folder; copy the file there"
            )


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Like json.loads, but raise a ValueError if the value is nested too deeply."""
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_depth(value)
    return value


def read_object(path: Path, kind: str = "a configuration", fix: str = "") -> dict[str, Any]:
    """Return a JSON file's object; raise a ValueError that names the file, its kind and the fix."""
    try:
        tree = parse_json(read_text(path))
        if not isinstance(tree, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise ValueError(f"{path}: not the JSON of {kind}: {error}{fix}") from None
    return tree


class _YAMLLoader(yaml.SafeLoader):
    """YAML that refuses aliases, duplicate keys, and numbers that are not decimal.

    Aliases could name exponentially many values; of duplicate keys PyYAML would keep the last;
    YAML 1.1 reads 010 as 8, and 1:30 as 90.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            problem = f"*{event.anchor} is an alias; write the value itself"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, count in keys.items():
            if count > 1:
                problem = f"{key!r} is written twice in one mapping; keep one"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> float:
        read = self.construct_yaml_int if node.tag == INT_TAG else self.construct_yaml_float
        if OTHER_BASE.match(node.value) is None:
            return read(node)
        # A long number would take long to convert.
        value = f"is {read(node)}" if len(node.value) < 20 else "is not decimal"
        fix = "write a decimal number, or quote text"
        problem = f"{short_repr(node.value)} {value} in YAML 1.1; {fix}"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_YAMLLoader.add_constructor(INT_TAG, _YAMLLoader.construct_number)
_YAMLLoader.add_constructor(FLOAT_TAG, _YAMLLoader.construct_number)


def parse_yaml(text: str) -> Any:
    """Return the value of one YAML document; raise a one-line ValueError if there is none."""
    if len(text) > MAX_YAML_CHARS:
        raise ValueError(f"not YAML of settings: it has more than {MAX_YAML_CHARS:,} characters")
    try:
        value = yaml.load(text, _YAMLLoader)
        check_depth(value)
    except RecursionError:
        raise ValueError("nested too deeply; write sections with keys") from None
    # For tags such as !!int PyYAML raises more than its own YAMLError.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
    return value


def check_depth(value: Any) -> None:
    """Raise a ValueError if dicts and lists are nested too deeply for recursive functions."""
    level = [value]  # all values at one depth
    for _ in range(MAX_DEPTH):
        containers = [x for x in level if isinstance(x, dict | list)]
        if not containers:
            return
        level = []
        for container in containers:
            level += container.values() if isinstance(container, dict) else container
    raise ValueError("nested too deeply")


def matches(value: Any, shape: Any) -> bool:
    """Return whether a JSON value has this shape; integers are 0 or more, floats finite.

    A shape is a type; a tuple of alternatives; [shape of every item]; {"key": shape} with the
    required keys; or {str: shape}, the shape of every value.
    """
    if isinstance(shape, tuple):
        return any(matches(value, alternative) for alternative in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(matches(item, shape[0]) for item in value)
    if isinstance(shape, dict) and str in shape:
        return isinstance(value, dict) and all(matches(x, shape[str]) for x in value.values())
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(
            key in value and matches(value[key], part) for key, part in shape.items()
        )
    if type(value) is not shape:
        return False
    if shape is int:
        return 0 <= value < 2**62
    return shape is not float or math.isfinite(value)


@contextlib.contextmanager
def data_only(checkpoint: Path, *, optimizer: bool = True) -> Iterator[None]:
    """Restrict every torch.load in the block; raise a ValueError if a file needs more.

    DeepSpeed calls torch.load(weights_only=False), which calls any function that a pickle names.
    PyTorch's restricted unpickler reads tensors and plain types, and with `optimizer` the classes
    in DeepSpeed's optimizer files, which only hold values. To import them takes seconds.
    """
    import torch

    classes: list[Any] = []
    if optimizer:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        classes = [fragment_address, LossScaler, DynamicLossScaler, ZeroStageEnum]
    before = {name: os.environ.pop(name, None) for name in (FORCE_DATA, FORCE_CODE)}
    os.environ[FORCE_DATA] = "1"  # torch.load reads it at each call
    try:
        with torch.serialization.safe_globals(classes):
            yield
    except (pickle.UnpicklingError, EOFError) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            raise ValueError(f"{checkpoint}: a file is damaged; use another checkpoint") from error
        raise ValueError(
            f"{checkpoint}: a file holds {named[1]}, which could run code, and was not loaded; "
            "use a checkpoint that this project wrote"
        ) from None
    finally:
        del os.environ[FORCE_DATA]
        os.environ.update({name: value for name, value in before.items() if value is not None})
