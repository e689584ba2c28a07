"""Patches of Triton's interpreter: twice as fast, and correct in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.ops.triton.parity import DEVICE


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    """Patch the interpreter, if kernels are interpreted; results change only in bfloat16.

    Triton patches its language at each call of a function, where once per kernel is enough, and
    checks each sum of two indices for overflow, which test_addresses.py covers. It stores bfloat16
    as integers of the same bits, multiplies matrices of these integers, and truncates casts.
    """
    if DEVICE.type == "cuda":
        yield
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    options = replace(builder.options, sanitize_overflow=False)
    with ExitStack() as stack:
        for owner, name, value in (
            (builder, "options", options),
            *_patching_once(interpreter),
            *_with_bfloat16(interpreter),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _patching_once(interpreter: Any) -> list[tuple[Any, str, Any]]:
    patch, run, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(function: Any) -> Any:
        if function not in patched:
            patched.add(function)
            return patch(function)

    def run_kernel(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        run(self, *args, **kwargs)

    return [
        (interpreter, "_patch_lang", patch_once),
        (interpreter.GridExecutor, "__call__", run_kernel),
    ]


def _with_bfloat16(interpreter: Any) -> list[tuple[Any, str, Any]]:
    import triton.language as tl

    owner, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, cast = owner.create_dot, owner.cast_impl

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return handle((x.data.astype("uint32") << 16).view("float32"), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, x: Any, target: Any) -> Any:
        x = widened(x)
        if target.scalar != tl.bfloat16:
            return cast(self, x, target)
        rounded = torch.from_numpy(x.data.astype("float32")).bfloat16()
        return handle(rounded.view(torch.int16).numpy().view("uint16"), tl.bfloat16)

    return [(owner, "create_dot", create_dot), (owner, "cast_impl", cast_impl)]
