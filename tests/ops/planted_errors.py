"""Planted errors: mutations of the code under test, to prove that a check notices them."""

from __future__ import annotations

import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest


@dataclass(frozen=True)
class Plant:
    """One text replacement in a function or `Class.method`, and the check that has to notice it.

    A planted kernel must not write out of bounds, which would crash the process sooner or later.
    """

    module: ModuleType
    function: str
    old: str
    new: str
    check: Callable[..., None]

    def into(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the function by its mutation in every module that holds it."""
        owner, _, name = self.function.rpartition(".")
        holder = getattr(self.module, owner) if owner else self.module
        original = getattr(holder, name)
        mutation = self._mutated(original, name, patch)
        patch.setattr(holder, name, mutation)
        for module_name, module in [*sys.modules.items()]:
            if module_name.startswith(("nsa.", "tests.")) and vars(module).get(name) is original:
                patch.setattr(module, name, mutation)

    def _mutated(self, original: Any, name: str, patch: pytest.MonkeyPatch) -> Any:
        """Compile the function with `old` replaced; its globals stay its module's."""
        source = textwrap.dedent(inspect.getsource(getattr(original, "fn", original)))
        assert source.count(self.old) == 1, (
            f"{self.old!r}: {source.count(self.old)} times in {name}"
        )
        source, file = source.replace(self.old, self.new), f"<planted in {name}>"
        # Triton's interpreter reads a kernel's source again.
        lines = source.splitlines(keepends=True)
        patch.setitem(linecache.cache, file, (len(source), None, lines, file))
        namespace: dict[str, Any] = {}
        exec(compile(source, file, "exec"), vars(self.module), namespace)
        return namespace[name]
