"""Plant an error in a kernel or launcher, for a test that a check notices it."""

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

Check = Callable[[], None]


@dataclass(frozen=True)
class Plant:
    """One replacement in one function, and the check that has to notice it.

    It must not write out of bounds, which would crash the process sooner or later.
    """

    module: ModuleType
    function: str
    old: str
    new: str
    check: Check

    def into(self, patch: pytest.MonkeyPatch) -> None:
        """Put the wrong function wherever the right one is called from."""
        original = getattr(self.module, self.function)
        source = textwrap.dedent(inspect.getsource(getattr(original, "fn", original)))
        assert source.count(self.old) == 1, source
        wrong, file = source.replace(self.old, self.new), f"<planted in {self.function}>"
        # The interpreter reads a kernel's source again.
        lines = wrong.splitlines(keepends=True)
        patch.setitem(linecache.cache, file, (len(wrong), None, lines, file))
        made: dict[str, Any] = {}
        exec(compile(wrong, file, "exec"), vars(self.module), made)
        for name, holder in [*sys.modules.items()]:
            if name.startswith("nsa.ops.triton.") and vars(holder).get(self.function) is original:
                patch.setattr(holder, self.function, made[self.function])
