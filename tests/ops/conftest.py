"""In every test of nsa.ops: uninitialised memory is NaN, and the interpreter is patched.

The patches make Triton's interpreter several times as fast and right in bfloat16, and run the last
program first.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch

from nsa.ops import blockwise
from tests.ops import tiles
from tests.ops.triton.parity import DEVICE

Patch = tuple[Any, str, Any]  # owner, attribute, new value


@pytest.fixture
def small_tiles() -> Iterator[None]:
    """Tiles so small that every case has several of each kind, in PyTorch and in kernels."""
    sizes = {"TILE_ROWS": 10, "HEADS": 2, "GATHERED_ROWS": 14, "EARLY_BLOCKS": 1, "EARLY_PAIRS": 0}
    with mock.patch.multiple(blockwise, **sizes), tiles.small_tiles():
        yield


@pytest.fixture(params=["default tiles", "small tiles"])
def any_tiles(request: pytest.FixtureRequest) -> None:
    if request.param == "small tiles":
        request.getfixturevalue("small_tiles")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill `torch.empty` with NaN (the largest number for integers); deterministic mode does it."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    """Patch the interpreter, if kernels are interpreted; results change only in bfloat16.

    A grid's last program runs first, as on a GPU no program may need what another one wrote.
    Triton patches its language at each call of a function, where once is enough, and checks each
    sum of two indices for overflow, which test_addresses.py covers. It computes names and sizes of
    a type again for each tensor. It stores bfloat16 as integers of the same bits, multiplies
    matrices of these integers, and truncates casts.
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
            *_patching_once(interpreter, stack),
            *_in_reverse(interpreter),
            *_with_known_types(interpreter),
            *_with_bfloat16(interpreter),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _patching_once(interpreter: Any, stack: ExitStack) -> list[Patch]:
    """Patch the language once for all kernels; `stack` restores it."""
    patch, scope_type, patched = interpreter._patch_lang, interpreter._LangPatchScope, set()
    semantic = interpreter.interpreter_semantic

    @cache
    def languages(function: Any) -> tuple[Any, ...]:
        modules = filter(inspect.ismodule, function.__globals__.values())
        return tuple(m for m in modules if m in (interpreter.tl, interpreter.tl.core))

    def patch_once(function: Any) -> Any:
        if languages(function) not in patched:
            patched.add(languages(function))
            stack.callback(patch(function).restore)
        return scope_type()  # the end of a kernel restores nothing

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)  # without the check for `_semantic`

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    return [(interpreter, "_patch_lang", patch_once), (interpreter, "_patch_attr", patch_attr)]


def _in_reverse(interpreter: Any) -> list[Patch]:
    """Run a grid's last program first."""
    builder = interpreter.interpreter_builder
    set_index = builder.set_grid_idx

    def set_reversed(*index: int) -> None:
        set_index(*(size - 1 - i for size, i in zip(builder.grid_dim, index, strict=True)))

    return [(builder, "set_grid_idx", set_reversed)]


def _with_known_types(interpreter: Any) -> list[Patch]:
    """Compute each type's name and sizes once, and an operation's types and its constants."""
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    blocks: dict[Any, dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}
    init_block, np_dtype = core.block_type.__init__, interpreter._get_np_dtype
    check_types, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    expand_dims, handle = semantic.expand_dims, interpreter.TensorHandle
    operands: dict[Any, Any] = {}  # by kinds of two operands: both with the result's type
    expanded: dict[Any, Any] = {}  # by kind of the operand, and axis: the result's type

    @cache
    def shape_of(*sizes: int) -> Any:
        return core.tuple(sizes)

    @cache
    def sizes_of(*sizes: int) -> tuple[Any, Any]:
        return core.constexpr(prod(sizes)), core.tuple([core.constexpr(x) for x in sizes])

    def init_known_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [x.value if isinstance(x, core.constexpr) else x for x in shape]
        key = element_ty.name, *sizes
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = {"shape": shape_of(*sizes), "numel": self.numel, "name": self.name}
        self.__dict__.update(blocks[key], element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes_of(*(type.shape.values if type.is_block() else ()))

    def known_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in numpy_types:
            numpy_types[name] = np_dtype(dtype)
        return numpy_types[name]

    def broadcast_unequal(self: Any, x: Any, y: Any) -> Any:
        return (x, y) if x.shape is y.shape else broadcast(self, x, y)

    def kind_of(x: Any) -> Any:
        if isinstance(x, core.tensor):
            return x.dtype.name, id(x.shape)  # `sizes_of` keeps the shape
        return type(x), repr(x)  # distinguishes 0.0 from -0.0

    def known_operands(self: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        """Return an operation's operands: of the result's type, but NumPy broadcasts the data."""
        key = kind_of(x), kind_of(y), args, *kwargs.items()
        if key not in operands:
            operands[key] = check_types(self, x, y, *args, **kwargs)
            for known in operands[key]:
                known.handle.data.flags.writeable = False  # serves many operations
        return [operand(self, *pair) for pair in zip((x, y), operands[key], strict=True)]

    def operand(self: Any, given: Any, known: Any) -> Any:
        if not isinstance(given, core.tensor):
            return known
        if given.dtype is not known.dtype:
            given = self.cast(given, known.dtype)
        return given if given.shape is known.shape else self.tensor(given.handle, known.type)

    def expand_known(self: Any, x: Any, axis: int) -> Any:
        key = x.dtype.name, id(x.shape), axis
        if key not in expanded:
            expanded[key] = expand_dims(self, x, axis).type
        at = (*[slice(None)] * axis, None)
        return self.tensor(handle(x.handle.data[at], x.dtype), expanded[key])

    return [
        (core.block_type, "__init__", init_known_block),
        (core.tensor, "__init__", init_tensor),
        (handle, "__post_init__", lambda self: None),  # checks the size of the data
        (semantic, "broadcast_impl_value", broadcast_unequal),
        (semantic, "binary_op_type_checking_impl", known_operands),
        (semantic, "expand_dims", expand_known),
        (interpreter, "_get_np_dtype", known_np_dtype),
    ]


def _with_bfloat16(interpreter: Any) -> list[Patch]:
    import triton.language as tl

    owner, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, cast = owner.create_dot, owner.cast_impl

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return handle((x.data.astype("uint32") << 16).view("float32"), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, total: Any, precision: Any, *rest: Any) -> Any:
        # The product is exact here; on a GPU one pass of TF32 loses half of float32's digits.
        assert a.dtype.scalar != tl.float32 or precision.name != "TF32", "one pass of TF32"
        return dot(self, widened(a), widened(b), total, precision, *rest)

    def cast_impl(self: Any, x: Any, target: Any) -> Any:
        x = widened(x)
        if target.scalar != tl.bfloat16:
            return cast(self, x, target)
        rounded = torch.from_numpy(x.data.astype("float32")).bfloat16()
        return handle(rounded.view(torch.int16).numpy().view("uint16"), tl.bfloat16)

    return [(owner, "create_dot", create_dot), (owner, "cast_impl", cast_impl)]
