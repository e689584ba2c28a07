"""`dtypes.txt`: in which precision parameters, gradients, outputs and optimizer states live."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from nsa.atomic_io import atomic_write_text
from nsa.monitor.observer import warn

_ACCUMULATED = ("grad_acc_dtype", "gradient_accumulation_dtype")  # DeepSpeed's own names
_HEADS = ("module", "kind", "parameters", "gradients", "outputs")


class DtypeReport:
    """Listens to `module` through the first step: make it before, and let `write` end it.

    Gradients are seen as they arrive at a parameter, because DeepSpeed takes them away. A dtype's
    name is all that is kept, so that no number changes and no tensor lives longer.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._outputs: dict[str, set[str]] = defaultdict(set)
        self._gradients: dict[str, set[str]] = defaultdict(set)
        self._hooks: list[Any] = []
        for name, part in module.named_modules():
            self._hooks.append(part.register_forward_hook(self._output_hook(name)))
            for parameter in part.parameters(recurse=False):
                if parameter.requires_grad:
                    self._hooks.append(parameter.register_hook(self._gradient_hook(name)))

    def write(self, path: Path, optimizer: Any) -> None:
        """Stop listening and write the table; `optimizer` is DeepSpeed's or PyTorch's."""
        self.close()
        try:
            atomic_write_text(path, self._modules() + "\n" + _optimizer_states(optimizer))
        except Exception as error:
            warn(f"{path} was not written, the run goes on: {error!r}")

    def close(self) -> None:
        """Stop listening; the step after this costs what it always does."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _output_hook(self, name: str) -> Any:
        def hook(_module: torch.nn.Module, _inputs: Any, outputs: Any) -> None:
            self._outputs[name] |= _dtypes(tree_leaves(outputs))

        return hook

    def _gradient_hook(self, name: str) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            self._gradients[name] |= _dtypes([gradient])

        return hook

    def _modules(self) -> str:
        """A row for each module; those of all layers that are alike share one."""
        alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for name, part in self._module.named_modules():
            own = list(part.parameters(recurse=False))
            if not own and not self._outputs[name]:
                continue  # a mere list of others
            row = (
                re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name),
                type(part).__name__,
                _join(_dtypes(own)),
                _join(self._gradients[name]) if own else "",
                _join(self._outputs[name]),
            )
            alike[row].append(name)
        patterns = [row[0] for row in alike]
        rows: list[tuple[str, ...]] = [_HEADS]
        for (pattern, *cells), names in alike.items():
            shared = len(names) > 1 and patterns.count(pattern) == 1
            shown = [f"{pattern} ({len(names)})"] if shared else names
            rows += [(name or "(the model)", *cells) for name in shown]
        return _table(rows)


def _optimizer_states(optimizer: Any) -> str:
    """The states of the optimizer itself, under whatever DeepSpeed has wrapped around it."""
    found: dict[str, set[str]] = defaultdict(set)
    wrappers = [type(optimizer).__name__]
    while hasattr(optimizer, "optimizer"):
        for name in _ACCUMULATED:
            if isinstance(dtype := getattr(optimizer, name, None), torch.dtype):
                found["accumulated gradients"].add(_name(dtype))
        optimizer = optimizer.optimizer
        wrappers.append(type(optimizer).__name__)
    for updated, state in optimizer.state.items():
        found["parameters that it updates"] |= _dtypes([updated])
        for name, value in state.items():
            found[name] |= _dtypes([value])
    rows: list[tuple[str, ...]] = [("optimizer state", "dtype")]
    rows += [(name, _join(dtypes)) for name, dtypes in found.items() if dtypes]
    return f"optimizer: {' > '.join(wrappers)}\n" + _table(rows)


def _dtypes(values: Iterable[Any]) -> set[str]:
    return {_name(value.dtype) for value in values if isinstance(value, torch.Tensor)}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _join(dtypes: set[str]) -> str:
    return "+".join(sorted(dtypes)) or "-"


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines) + "\n"
