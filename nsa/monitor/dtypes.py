"""`dtypes.txt`: dtypes of parameters, gradients and optimizer states."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nsa.atomic_io import atomic_write_text
from nsa.monitor.observer import warn
from nsa.text import align

_ACCUMULATED = ("grad_acc_dtype", "gradient_accumulation_dtype")  # DeepSpeed's names
_HEADER = ("module", "kind", "parameters", "gradients")


class DtypeReport:
    """Hooks on the parameters of `module` during its first step; `write` removes them.

    Gradients are recorded when a parameter receives them, because DeepSpeed frees them later. Only
    names of dtypes are kept: no result changes and no tensor lives longer.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._gradients: dict[str, set[str]] = defaultdict(set)
        self._hooks: list[Any] = []
        for name, part in module.named_modules():
            record = partial(_record, self._gradients[name])
            for parameter in part.parameters(recurse=False):
                if parameter.requires_grad:
                    self._hooks.append(parameter.register_hook(record))

    def write(self, path: Path, optimizer: Any) -> None:
        """Remove the hooks and write the table; `optimizer` is DeepSpeed's or PyTorch's."""
        for hook in self._hooks:
            hook.remove()
        try:
            atomic_write_text(path, self._modules() + "\n" + _optimizer_states(optimizer))
        except Exception as error:
            warn(f"{path} was not written, the run continues: {error!r}")

    def _modules(self) -> str:
        """Return a table with a row per module; equal rows of all layers are merged."""
        names_of: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for name, part in self._module.named_modules():
            parameters = list(part.parameters(recurse=False))
            if not parameters:
                continue
            row = (
                re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name),
                type(part).__name__,
                _join(_dtypes(parameters)),
                _join(self._gradients[name]),
            )
            names_of[row].append(name)
        patterns = [row[0] for row in names_of]
        rows: list[tuple[str, ...]] = [_HEADER]
        for (pattern, *cells), names in names_of.items():
            if len(names) > 1 and patterns.count(pattern) == 1:
                names = [f"{pattern} ({len(names)})"]
            rows += [(name, *cells) for name in names]
        return "\n".join(align(rows)) + "\n"


def _optimizer_states(optimizer: Any) -> str:
    """Return a table of the innermost optimizer's states and of DeepSpeed's accumulators."""
    dtypes: dict[str, set[str]] = defaultdict(set)
    wrappers = [type(optimizer).__name__]
    while hasattr(optimizer, "optimizer"):
        for name in _ACCUMULATED:
            if isinstance(dtype := getattr(optimizer, name, None), torch.dtype):
                dtypes["accumulated gradients"].add(_name(dtype))
        optimizer = optimizer.optimizer
        wrappers.append(type(optimizer).__name__)
    for updated, state in optimizer.state.items():
        dtypes["updated parameters"] |= _dtypes([updated])
        for name, value in state.items():
            dtypes[name] |= _dtypes([value])
    rows: list[tuple[str, ...]] = [("optimizer state", "dtype")]
    rows += [(name, _join(names)) for name, names in dtypes.items() if names]
    return f"optimizer: {' > '.join(wrappers)}\n" + "\n".join(align(rows)) + "\n"


def _record(seen: set[str], gradient: torch.Tensor) -> None:
    seen.add(_name(gradient.dtype))


def _dtypes(values: Iterable[Any]) -> set[str]:
    return {_name(value.dtype) for value in values if isinstance(value, torch.Tensor)}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _join(names: set[str]) -> str:
    return "+".join(sorted(names)) or "-"
