"""Planted errors: one-line mutations of the code under test, to prove that a check fails."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

import nsa.ops
from nsa.model import attention, compressor
from nsa.ops import blockwise, checks, documents, reference, tiles
from tests.ops import cases

HOLDERS = (nsa.ops, blockwise, checks, documents, reference, tiles, attention, compressor, cases)


def mutated(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Return the function with `old` replaced in its source; its globals stay its module's."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} is in {function.__name__} {source.count(old)} times"
    module = inspect.getmodule(function)
    assert module is not None
    namespace: dict[str, Any] = {}
    exec(
        compile(source.replace(old, new), f"<mutated {function.__name__}>", "exec"),
        vars(module),
        namespace,
    )
    return namespace[function.__name__]


@dataclass(frozen=True)
class Plant:
    """One text replacement in one function."""

    module: ModuleType
    function: str
    old: str
    new: str

    def into(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the function by its mutation in every module that holds it."""
        owner, _, name = self.function.rpartition(".")
        if owner:
            original = getattr(getattr(self.module, owner), name)
            patch.setattr(getattr(self.module, owner), name, mutated(original, self.old, self.new))
            return
        original = getattr(self.module, name)
        mutation = mutated(original, self.old, self.new)
        for holder in HOLDERS:
            if vars(holder).get(name) is original:
                patch.setattr(holder, name, mutation)
