"""Planted errors: a wrong function in place of a right one, to prove that a check notices it."""

import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

Check = Callable[..., None]
Into = Callable[[pytest.MonkeyPatch], None]  # plants an error
Given = dict[str, Any]  # arguments by name


def wrong(
    module: ModuleType,
    name: str,
    change: Callable[[Given], Given] | None = None,
    *,
    result: Callable[[Any, Any], Any] | None = None,
    **arguments: Callable[[Any], Any],
) -> Into:
    """Call a function, or launch a kernel, with wrong arguments, or let it return something wrong.

    `change` returns changed arguments from all of them, `arguments` one each from its right value;
    `result` takes the right result and the arguments. Helpers of kernels are replaced in Triton's
    interpreter, which calls them as Python does. Nothing planted may write out of bounds, which
    would crash the process sooner or later.
    """

    def changed(given: Given) -> Given:
        parts = {key: new(given[key]) for key, new in arguments.items()}
        return given | parts | (change(given) if change else {})

    def launched(launch: Callable[..., None]) -> Callable[..., None]:
        def run(kernel: Any, grid: Any, config: Any, **given: Any) -> None:
            here = kernel.fn.__name__ == name
            launch(kernel, grid, config, **(changed(given) if here else given))

        return run

    def called(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(getattr(function, "fn", function))

        def run(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            given = changed(bound.arguments)
            y = function(**given)
            return result(y, given) if result else y

        return run

    def into(patch: pytest.MonkeyPatch) -> None:
        if name.endswith("_kernel"):
            _replace(module, "launch", launched(vars(module)["launch"]), patch)
        else:
            _replace(module, name, called(getattr(module, name)), patch)

    return into


def in_source(module: ModuleType, function: str, old: str, new: str) -> Into:
    """Replace text of a function or `Class.method`: for an error inside of a kernel's loop."""

    def into(patch: pytest.MonkeyPatch) -> None:
        owner, _, name = function.rpartition(".")
        holder = getattr(module, owner) if owner else module
        original = getattr(holder, name)
        source = textwrap.dedent(inspect.getsource(getattr(original, "fn", original)))
        assert source.count(old) == 1, f"{old!r}: {source.count(old)} times in {name}"
        mutation, file = source.replace(old, new), f"<planted in {name}>"
        # Triton's interpreter reads a kernel's source again.
        lines = mutation.splitlines(keepends=True)
        patch.setitem(linecache.cache, file, (len(mutation), None, lines, file))
        namespace: dict[str, Any] = {}
        exec(compile(mutation, file, "exec"), vars(module), namespace)
        _replace(holder, name, namespace[name], patch)

    return into


def _replace(holder: Any, name: str, new: Any, patch: pytest.MonkeyPatch) -> None:
    """Replace a function in every module that holds it."""
    original = getattr(holder, name)
    patch.setattr(holder, name, new)
    for module_name, module in [*sys.modules.items()]:
        if module_name.startswith(("nsa.", "tests.")) and vars(module).get(name) is original:
            patch.setattr(module, name, new)
