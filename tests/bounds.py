"""Bounds checks in Triton's interpreter: no unmasked access outside of the tensor it addresses.

    pointer of a launch's n-th tensor = its address + n * 2**48

The number survives pointer arithmetic, so each access is checked against the tensor from which its
address was computed: a row too far is an error also where another tensor of the launch follows.
Allowed are a tensor's elements, not its storage, and of a strided view not the gaps between rows.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch
from torch import Tensor

NUMBER_SHIFT = 48  # addresses of a process are shorter
MAX_GAP_MAP = 2**24  # elements; of a view that spans more, the gaps between rows are not checked
ACCESSES = {"load": (1, 2), "store": (2, 1)}  # the interpreter's: positions of mask and values


class OutOfBounds(AssertionError):
    """A lane whose mask is true accessed memory outside of its tensor."""


@dataclass(frozen=True)
class Extent:
    """The memory of one tensor of a launch."""

    name: str
    layout: str
    address: np.uint64
    start: np.uint64  # address + number * 2**48
    nbytes: int
    itemsize: int
    gaps: np.ndarray | None  # by element: True if not of the tensor; None if all are

    @classmethod
    def of(cls, x: Tensor, name: str, number: int) -> "Extent":
        dims = [(n, step) for n, step in zip(x.shape, x.stride(), strict=True) if step]
        span = 1 + sum((n - 1) * step for n, step in dims) if x.numel() else 0
        dense = span in (0, prod(n for n, _ in dims))
        gaps = None
        if not dense and span <= MAX_GAP_MAP:
            gaps = torch.ones(span, dtype=torch.bool)
            gaps.as_strided(x.shape, x.stride()).fill_(False)
        address, number = np.uint64(x.data_ptr()), np.uint64(number << NUMBER_SHIFT)
        layout = f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}"
        size = x.element_size()
        return cls(
            name, layout, address, address + number, span * size, size,
            None if gaps is None else gaps.numpy(),
        )  # fmt: skip

    def outside(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """Which accesses of `size` bytes leave the tensor; `offsets` are in bytes, from `start`.

        A negative offset is a large one, as offsets are unsigned.
        """
        outside = offsets >= max(0, self.nbytes - size + 1)
        if self.gaps is not None:
            outside |= self.gaps.take((offsets // self.itemsize).view(np.int64), mode="clip")
        return outside


NO_TENSOR = Extent("no tensor", "", np.uint64(0), np.uint64(0), 0, 1, None)


class Bounds:
    """The tensors of the running launch."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.begin("", {})

    def begin(self, kernel: str, names: dict[int, str]) -> None:
        """Forget the last launch; `names` are those of a kernel's arguments, by id."""
        self.kernel, self.names = kernel, names
        self.extents, self.error = [NO_TENSOR], None

    def tagged(self, x: Any) -> np.ndarray:
        """Return the pointer that a kernel gets for a tensor."""
        tensor = getattr(x, "base", x)  # of a reinterpreted tensor
        name = self.names.get(id(x), "an unnamed tensor")
        self.extents.append(Extent.of(tensor, name, len(self.extents)))
        return np.array([self.extents[-1].start])

    def addresses(
        self, access: str, pointers: np.ndarray, mask: np.ndarray, size: int
    ) -> np.ndarray:
        """Return the addresses of `pointers`; raise OutOfBounds for a lane outside its tensor."""
        extent = self._extent(pointers.item(0) >> NUMBER_SHIFT)  # as a rule of all lanes
        offsets = pointers - extent.start
        if not np.count_nonzero(extent.outside(offsets, size) & mask):
            offsets += extent.address
            return offsets
        addresses, mask = np.zeros_like(pointers), np.broadcast_to(mask, pointers.shape)
        for number in np.unique(pointers[mask] >> NUMBER_SHIFT):
            extent, lanes = self._extent(int(number)), mask & (pointers >> NUMBER_SHIFT == number)
            offsets = pointers - extent.start
            outside = lanes & extent.outside(offsets, size)
            if outside.any():
                self._fail(access, extent, offsets[outside].view(np.int64), int(mask.sum()))
            addresses[lanes] = (offsets + extent.address)[lanes]
        return addresses

    def _extent(self, number: int) -> Extent:
        return self.extents[number] if number < len(self.extents) else NO_TENSOR

    def _fail(self, access: str, extent: Extent, offsets: np.ndarray, unmasked: int) -> NoReturn:
        self.error = OutOfBounds(
            f"{self.kernel}, program {self.builder.grid_idx}: {access} at element "
            f"{offsets[0] // extent.itemsize} of {extent.name} ({extent.layout}), which spans "
            f"{extent.nbytes // extent.itemsize}; {len(offsets)} of {unmasked} unmasked lanes "
            "are outside"
        )
        raise self.error


@contextmanager
def checked_bounds() -> Iterator[None]:
    """Let kernels in the interpreter raise OutOfBounds."""
    from triton.runtime import interpreter

    executor, compiled = interpreter.GridExecutor, interpreter._interpreter
    run, convert = executor.__call__, interpreter._implicit_cvt
    copy_arguments = executor._init_args_hst
    bounds = Bounds(interpreter.interpreter_builder)

    def run_kernel(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            run(self, *args, **kwargs)
        except interpreter.InterpreterError:
            if bounds.error is None:
                raise
            raise bounds.error from None  # not wrapped once per called function
        finally:
            bounds.begin("", {})

    def name_arguments(self: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = copy_arguments(self, args, kwargs)
        names = {id(x): name for name, x in zip(self.arg_names, args, strict=False)}
        names |= {id(x): name for name, x in kwargs.items()}
        bounds.begin(self.fn.__name__, names)
        return args, kwargs

    def convert_tagged(x: Any) -> Any:
        converted = convert(x)
        if hasattr(x, "data_ptr"):
            converted.handle.data = bounds.tagged(x)
        return converted

    def checked(name: str) -> Any:
        function, (mask_at, values_at) = getattr(compiled, name), ACCESSES[name]

        def call(pointers: np.ndarray, *rest: Any) -> Any:
            args = (pointers, *rest)
            mask, size = np.asarray(args[mask_at]), args[values_at].itemsize
            return function(bounds.addresses(name, pointers, mask, size), *rest)

        return call

    with ExitStack() as stack:
        for owner, name, value in (
            (executor, "__call__", run_kernel),
            (executor, "_init_args_hst", name_arguments),
            (interpreter, "_implicit_cvt", convert_tagged),
            *((compiled, name, checked(name)) for name in ACCESSES),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
