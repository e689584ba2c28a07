"""Parity of every branch and of their gated sum with `reference`, forward and backward."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.ops import nsa_attention, nsa_attention_and_blocks
from nsa.ops.inputs import AttentionInputs, GatedInputs
from nsa.ops.triton import band
from nsa.ops.triton.band import band_backward, band_forward
from nsa.spec import NSASpec
from tests.ops.cases import (
    Calls,
    Case,
    Function,
    Inputs,
    branches,
    default,
    random_cases,
    selection,
    with_gradients,
)
from tests.ops.tiles import small_tiles
from tests.ops.triton.gpu_checks import runs_are_the_same_to_the_bit
from tests.ops.triton.parity import (
    BRANCHES,
    DENSE,
    DEVICE,
    GATHERED,
    RULE,
    Run,
    assert_exact_enough,
    assert_parity,
    by_head,
    computed,
    inputs,
    settings,
)

# A GPU compiles for every pattern and size, so it gets fewer.
RANDOM = random_cases(14 if DEVICE.type == "cpu" else 7, longest=24, seed=1)
SMALL = NSASpec(8, 4, 8, 3, 1, 1, 16)
ONE_HEAD = {"kv_heads": 1, "group": 1}
DESIGNED = [
    Case(SMALL, (19,), kv_heads=1, group=2, key_dim=192, value_dim=128),
    Case(SMALL, (33,), batch=2, group=3, key_dim=16, value_dim=32),
    Case(NSASpec(4, 2, 8, 2, 0, 1, 7), (0, 21, 1, 0, 2, 30, 1), group=2),
    Case(NSASpec(5, 5, 4, 1, 0, 1, 1), (1, 1), **ONE_HEAD),
    Case(SMALL, (1,), group=6),
    Case(SMALL, (7,), group=4),
    Case(SMALL, (9,), kv_heads=1, group=40),
    Case(NSASpec(4, 4, 2, 19, 1, 2, 90), (61,), **ONE_HEAD),
    Case(NSASpec(2, 1, 2, 2, 0, 1, 2), (*(i % 3 for i in range(70)), 9), **ONE_HEAD),
]
HEAD_SIZES = [
    Case(SMALL, (37,), **ONE_HEAD, key_dim=key, value_dim=value)
    for key, value in ((6, 24), (24, 6), (32, 96), (96, 16), (128, 256), (256, 64))
]
DEFAULT = default(5, RANDOM) + default(8, DESIGNED) + default(2, HEAD_SIZES)
branches_of_all = pytest.mark.parametrize("branch", BRANCHES)


@branches_of_all
@pytest.mark.parametrize("case", DEFAULT, ids=str)
def test_outputs_lse_and_gradients_are_those_of_the_definition(case: Case, branch: str) -> None:
    assert_parity(case, branch)


def test_more_documents_than_one_load_of_offsets_holds() -> None:
    assert_parity(DESIGNED[-1], "compressed")


@pytest.mark.parametrize("queries_per_split", [None, 7], ids=["one split", "splits"])
def test_compressed_keys_beyond_the_last_document_get_zero_gradients(
    queries_per_split: int | None,
) -> None:
    """With cu_seqlens on a device nothing counts them, so the launcher gets them here directly."""
    case, surplus = DESIGNED[2], 5
    x, cu = inputs(case), case.offsets_on(DEVICE)
    results = []
    for rows in (0, surplus):
        k, v = (F.pad(y, (0, 0, 0, 0, 0, rows), value=torch.nan) for y in (x.k_cmp, x.v_cmp))
        call = AttentionInputs(x.q, k, v, None, cu, "compressed", case.spec, case.scale)
        with settings(queries_per_split=queries_per_split):
            o, lse = band_forward(call)
            results.append([o, *band_backward(o.cos(), torch.ones_like(lse), call, o, lse)])
    for exact, padded in zip(*results, strict=True):
        assert torch.equal(padded[:, : exact.shape[1]], exact)
        assert not padded[:, exact.shape[1] :].any()  # NaN is true


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["64 bits", "a view"])
def test_another_scale_and_offsets_laid_out_otherwise(dtype: torch.dtype) -> None:
    case = Case(NSASpec(4, 2, 4, 2, 0, 1, 5), (3, 6), kv_heads=1)
    x, cu = inputs(case), torch.tensor(case.offsets, device=DEVICE, dtype=dtype)
    if dtype == torch.int32:
        cu = torch.stack([cu, 7 * cu], 1)[:, 0]
    assert_exact_enough(
        *(
            with_gradients(
                lambda *y, b=backend: nsa_attention(
                    *y, case.spec, scale=0.3, cu_seqlens=cu, backend=b
                ),
                x.to(dtype).tensors(),
            )
            for backend, dtype in RULE
        )
    )


@pytest.mark.parametrize("tiling", [GATHERED, DENSE], ids=["gathered", "dense"])
@pytest.mark.parametrize("lengths", default(1, [(1, 20, 0, 15), (40,)]), ids=str)
def test_any_block_index_is_valid(lengths: tuple[int, ...], tiling: dict[str, int]) -> None:
    """Rows without blocks, with one twice, or with blocks of the future, laid out by head.

    With parts of two queries, so that naming blocks again would make lists longer than there are
    queries.
    """
    case = Case(NSASpec(4, 2, 4, 3, 1, 1, 5), lengths, kv_heads=2, group=3)
    draw = torch.Generator().manual_seed(3)
    shape = (1, case.seq_len, case.kv_heads, 3)
    index = torch.randint(-1, 11, shape, generator=draw, dtype=torch.int32)
    index[:, 1::5] = 0
    index[:, 2::6] = index[:, 2::6, :, [0]]
    index[:, 3::6, :, 2] = index[:, 3::6, :, 0]
    index[:, 4::11] = 10
    index[:, ::7] = -1
    index = by_head(index.to(DEVICE))
    x = inputs(case)
    with settings(**tiling, chunk=2):
        actual, usual, exact = (
            with_gradients(*branches(x.to(dtype), case, index, backend)["selected"])
            for backend, dtype in RULE
        )
    assert_exact_enough(actual, usual, exact)
    o = actual[0]
    assert torch.equal(o[:, ::7], torch.zeros_like(o[:, ::7]))


# The three branches and their gates as one operation.
GATED = NSASpec(4, 2, 4, 3, 1, 1, 6)
GATED_CASES = [
    Case(GATED, (38,), batch=2, group=3, key_dim=6, value_dim=5),
    Case(GATED, (3, 21, 0, 1, 16), kv_heads=1, group=6),
    Case(GATED, (1,), group=2),
    Case(GATED, (3,), group=1),
    *random_cases(6, longest=20, seed=3),
]


@pytest.mark.parametrize("case", default(4, GATED_CASES), ids=str)
def test_the_gated_sum_and_all_its_gradients_are_those_of_the_definition(case: Case) -> None:
    assert_parity(case, "mixed")


@pytest.mark.parametrize("case", default(1, GATED_CASES), ids=str)
def test_compressed_keys_may_be_several_tiles_and_queries_several_splits(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of more programs than an axis of the grid may have."""
    monkeypatch.setattr(band, "MAX_AXIS", 4)
    with settings(queries_per_split=7), small_tiles():
        assert_parity(case, "mixed")


@pytest.mark.parametrize(
    "setting", default(3, [(0, 0.0), (1, 1.0), (2, 1e-6), (1, 0.0), (2, 0.0), (0, 1e-30)]), ids=str
)
def test_a_gate_may_be_closed_or_open(setting: tuple[int, float]) -> None:
    """A sigmoid is exactly 0 or 1 soon enough, once rounded."""
    case = replace(GATED_CASES[0], batch=1, kv_heads=1)
    x = inputs(case)
    branch, gate = setting
    x.gates[:, ::2, :, branch] = gate
    assert_exact_enough(*(computed(case, "mixed", backend, x.to(dtype)) for backend, dtype in RULE))


def test_the_sum_is_that_of_the_branches_called_one_by_one() -> None:
    """To the bit, but for the gates' product: the same kernels do both."""
    case = GATED_CASES[1]
    x, cu = inputs(case), GATED_CASES[1].offsets_on(DEVICE)
    index = selection(x, case, "triton")
    parts = [with_gradients(*branch)[0] for branch in branches(x, case, index, "triton").values()]
    expected = sum(gate[..., None] * o for gate, o in zip(x.gates.unbind(-1), parts, strict=True))
    given = GatedInputs(*x.tensors(), cu, GATED, x.q.shape[-1] ** -0.5)
    o, blocks = nsa_attention_and_blocks(given, "triton")
    assert torch.equal(blocks, index)
    torch.testing.assert_close(o, expected, rtol=1e-6, atol=1e-6)


def test_the_backward_pass_allocates_no_gradients_of_outputs_without_one() -> None:
    """Zeros the size of an output for each branch would be half a step's memory at 64k."""
    x = inputs(Case(GATED, (11,)))
    q, *rest = x.tensors()
    o = nsa_attention(q.requires_grad_(), *rest, GATED, backend="triton")
    with Calls() as recorded:
        o.backward(torch.ones_like(o))
    zeros = [x.numel() for op, _, x in recorded.calls if "zeros" in op.name()]
    assert max(zeros, default=0) < q[..., 0].numel()


def test_two_runs_give_the_same_bits() -> None:
    case = Case(GATED, (5, 9), kv_heads=1, group=6)
    runs_are_the_same_to_the_bit(case, torch.float32, times=2)


# Strides: neither inputs nor the gradients of outputs need be contiguous.
STRIDED = Case(NSASpec(4, 2, 5, 2, 0, 1, 7), (23,), batch=2, group=2, key_dim=6, value_dim=4)


def by_size(x: Tensor) -> Tensor:
    """[B, T, D, H] in memory: the last dimension is not contiguous."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def padded(x: Tensor) -> Tensor:
    """With padding after each dimension."""
    buffer = torch.full([size + 1 for size in x.shape], torch.nan, device=x.device)
    part = buffer[tuple(slice(size) for size in x.shape)]
    return part.copy_(x)


@cache
def contiguous(branch: str) -> list[Tensor]:
    return computed(STRIDED, branch, "triton", inputs(STRIDED))


@pytest.mark.parametrize("branch", default(1, ["mixed", *BRANCHES]))
@pytest.mark.parametrize("layout", [by_head, by_size, padded])
def test_inputs_laid_out_otherwise_give_the_same_bits(
    layout: Callable[[Tensor], Tensor], branch: str
) -> None:
    x = Inputs(*(layout(y) for y in inputs(STRIDED).tensors()))
    assert not any(y.is_contiguous() for y in x.tensors())
    torch.testing.assert_close(
        computed(STRIDED, branch, "triton", x), contiguous(branch), rtol=0, atol=0
    )


def _numbers(x: Tensor) -> Tensor:
    return torch.arange(x.numel(), device=x.device).to(x).sin().view(x.shape)


def one_for_all(function: Function, given: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of Σ o: a single number, expanded."""
    given = [x.detach().requires_grad_() for x in given]
    o = function(*given)
    o = o[0] if isinstance(o, tuple) else o
    return list(torch.autograd.grad(o, given, torch.ones_like(o[:1, :1, :1, :1]).expand_as(o)))


def laid_out_by_head(function: Function, given: Sequence[Tensor]) -> list[Tensor]:
    """Of o, and of lse where it is finite."""
    given = [x.detach().requires_grad_() for x in given]
    outputs = function(*given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [by_head(_numbers(x).where(x.isfinite(), 0)) for x in outputs]
    return list(torch.autograd.grad(outputs, given, gradients))


@pytest.mark.parametrize(
    ("run", "branch"),
    [
        (one_for_all, "mixed"),
        (laid_out_by_head, "compressed"),  # whose lse has a gradient too
        (laid_out_by_head, "selected"),
    ],
)
def test_the_outputs_gradient_may_be_expanded_or_transposed(run: Run, branch: str) -> None:
    assert_parity(STRIDED, branch, run=run)
