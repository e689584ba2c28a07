"""Parity of the Triton backend with the definition: where it runs, and by which rule.

On a machine with a GPU the kernels run there, else in Triton's interpreter, in float32: its matrix
products of bfloat16 are garbage.

The rule. Against float64 on the same inputs, a kernel in float32 may lose TIMES what `reference`
itself loses in float32. Four, because it rounds where `reference` does not: scores are scaled into
base 2, a running softmax rescales what it has at every tile, and probabilities are made a second
time from lse. FLOOR is for what `reference` happens to compute exactly, such as a softmax over one
key: some roundings of numbers about 1, which is what all inputs are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest import mock

import torch
from torch import Tensor

from nsa.ops import nsa_attention
from nsa.ops.triton import band_op, configs, selected_op
from tests.ops.cases import Case, Function, Inputs, branches, selection, with_gradients

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TIMES = 4
FLOOR = 16 * torch.finfo(torch.float32).eps
BRANCHES = ("compressed", "selected", "window")
KERNELS = (
    *(f"{branch}_{kernel}" for branch in BRANCHES for kernel in ("forward", "queries", "keys")),
    *(f"gathered_{kernel}" for kernel in ("forward", "queries")),
    "select",
)

# What the rule compares: the kernels, what is allowed a multiple of, and what is true.
RULE = (("triton", torch.float32), ("reference", torch.float32), ("reference", torch.float64))

Run = Callable[[Function, Sequence[Tensor]], list[Tensor]]


def inputs(case: Case, dtype: torch.dtype = torch.float32) -> Inputs:
    return Inputs.of(case, dtype).to(DEVICE)


@cache
def reference_blocks(case: Case) -> Tensor:
    """The blocks that the definition selects in float64, where the kernels run."""
    return selection(Inputs.of(case), case, "reference").to(DEVICE)


@cache
def defined(case: Case, branch: str, dtype: torch.dtype, run: Run = with_gradients) -> list[Tensor]:
    """A branch's outputs and gradients from `reference` computing in `dtype`."""
    return computed(case, branch, "reference", inputs(case).to(dtype), run)


def computed(
    case: Case, branch: str, backend: str, x: Inputs, run: Run = with_gradients
) -> list[Tensor]:
    """The results of `run` on a branch, or on `mixed`, all three with their gates."""
    if branch == "mixed":
        options = {"cu_seqlens": case.offsets_on(DEVICE), "backend": backend}
        return run(lambda *y: nsa_attention(*y, case.spec, **options), x.tensors())
    return run(*branches(x, case, reference_blocks(case), backend)[branch])


def assert_parity(
    case: Case, branch: str, x: Inputs | None = None, run: Run = with_gradients
) -> None:
    """Outputs, lse and gradients of a branch are those of the definition; x is laid out anyhow."""
    actual = computed(case, branch, "triton", inputs(case) if x is None else x, run)
    usual, exact = (defined(case, branch, dtype, run) for dtype in (torch.float32, torch.float64))
    assert_exact_enough(actual, usual, exact)


def assert_exact_enough(
    actual: Sequence[Tensor], usual: Sequence[Tensor], exact: Sequence[Tensor]
) -> None:
    for i, (a, u, e) in enumerate(zip(actual, usual, exact, strict=True)):
        assert a.shape == e.shape, f"result {i}"
        lost, allowed = error(a, e), TIMES * error(u, e) + FLOOR
        assert lost <= allowed, f"result {i}: lost {lost:.2e}, allowed {allowed:.2e}"


def error(actual: Tensor, exact: Tensor) -> float:
    """The largest difference; NaN where there is one, infinite where an infinity is not matched."""
    difference = torch.where(actual == exact, 0.0, (actual.double() - exact).abs())
    return float(difference.max()) if difference.numel() else 0.0


@contextmanager
def settings(
    dense_blocks: int | None = None,
    chunk: int | None = None,
    queries_per_split: int | None = None,
    one_tile_head: int | None = None,
) -> Iterator[None]:
    """Force a tiling of the selected branch, or sums of key gradients that are split in parts."""
    with ExitStack() as stack:
        for module, name, value in (
            (selected_op, "DENSE_BLOCKS", dense_blocks),
            (selected_op, "CHUNK", chunk),
            (band_op, "QUERIES_PER_SPLIT", queries_per_split),
            (configs, "ONE_TILE_HEAD", one_tile_head),
        ):
            if value is not None:
                stack.enter_context(mock.patch.object(module, name, value))
        yield


GATHERED, DENSE = {"dense_blocks": 0}, {"dense_blocks": 1_000_000}
