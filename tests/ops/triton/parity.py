"""Parity of the Triton backend with `reference`: inputs, and how large an error may be.

Kernels run on a GPU if there is one, else in Triton's interpreter, on float32 inputs.

Compared with float64 on the same inputs, a kernel's error may be TIMES that of `reference`, or of
PyTorch's own attention, in the same dtype, plus FLOOR. Four times in float32, because it rounds
where `reference` does not: scores are scaled into base 2, a running softmax is rescaled at every
tile, and probabilities are recomputed from lse. In half precision PyTorch rounds probabilities too.
FLOOR, a few roundings of numbers about 1, is for results that `reference` happens to compute
exactly, such as a softmax over one key.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest import mock

import torch
from torch import Tensor

from nsa.ops import nsa_attention
from nsa.ops.triton import band, selected
from tests.ops.cases import Case, Function, Inputs, branches, selection, with_gradients

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TIMES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
FLOOR = 16 * torch.finfo(torch.float32).eps
BRANCHES = ("compressed", "selected", "window")
KERNELS = (
    *(f"{branch}_{kernel}" for branch in BRANCHES for kernel in ("forward", "queries", "keys")),
    *(f"gathered_{kernel}" for kernel in ("forward", "queries")),
    "select",
    "selector",
)

# Backend and dtype of `assert_exact_enough`'s arguments: actual, usual, exact.
RULE = (("triton", torch.float32), ("reference", torch.float32), ("reference", torch.float64))

Run = Callable[[Function, Sequence[Tensor]], list[Tensor]]


def inputs(case: Case, dtype: torch.dtype = torch.float32) -> Inputs:
    return Inputs.of(case, dtype).to(DEVICE)


def by_head(x: Tensor) -> Tensor:
    """[B, H, T, D] in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


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
    """The results of `run` on a branch, or on "mixed", the gated sum of all three."""
    if branch == "mixed":
        options = {"cu_seqlens": case.offsets_on(DEVICE), "backend": backend}
        return run(lambda *y: nsa_attention(*y, case.spec, **options), x.tensors())
    return run(*branches(x, case, reference_blocks(case), backend)[branch])


def assert_parity(
    case: Case, branch: str, x: Inputs | None = None, run: Run = with_gradients
) -> None:
    """Require that outputs, lse and gradients equal the definition's; x may have any strides."""
    actual = computed(case, branch, "triton", inputs(case) if x is None else x, run)
    usual, exact = (defined(case, branch, dtype, run) for dtype in (torch.float32, torch.float64))
    assert_exact_enough(actual, usual, exact)


def assert_exact_enough(
    actual: Sequence[Tensor], usual: Sequence[Tensor], exact: Sequence[Tensor], what: str = ""
) -> None:
    for i, (a, u, e) in enumerate(zip(actual, usual, exact, strict=True)):
        assert (a.shape, a.dtype) == (e.shape, u.dtype), f"{what}, result {i}"
        lost, allowed = error(a, e), TIMES[a.dtype] * error(u, e) + FLOOR
        assert lost <= allowed, f"{what}, result {i}: lost {lost:.2e}, allowed {allowed:.2e}"


def error(actual: Tensor, exact: Tensor) -> float:
    """The largest difference; NaN if there is a NaN, inf if only one value is infinite."""
    difference = torch.where(actual == exact, 0.0, (actual.double() - exact).abs())
    return float(difference.max()) if difference.numel() else 0.0


SETTINGS = {
    "dense_blocks": (selected, "DENSE_BLOCKS"),
    "chunk": (selected, "CHUNK"),
    "short": (selected, "SHORT"),
    "queries_per_split": (band, "QUERIES_PER_SPLIT"),
}


@contextmanager
def settings(**values: int | None) -> Iterator[None]:
    """Force a tiling of the selected branch, or key gradients that are summed in parts."""
    with ExitStack() as stack:
        for name, value in values.items():
            if value is not None:
                stack.enter_context(mock.patch.object(*SETTINGS[name], value))
        yield


GATHERED, DENSE = {"dense_blocks": 0}, {"dense_blocks": 1_000_000}
