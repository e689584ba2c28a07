"""Fused operations in PyTorch and in kernels: equal their definitions, forward and backward."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.ops import (
    PackedLayout,
    add_rms_norm,
    fallback_counts,
    reset_fallback_counts,
    rotary_pool,
    selector,
    selector_loss,
    triton,
)
from nsa.ops import swiglu as ops_swiglu
from nsa.spec import NSASpec
from tests.compile.launches import launch_both_passes
from tests.kernel_launches import Launch, recording
from tests.operations import Recorder
from tests.ops import fused
from tests.ops.cases import Case, Inputs, check_calls, with_gradients
from tests.ops.fused import (
    DOCUMENTS,
    EPS,
    LAYOUTS,
    PATTERNS,
    RANDOM,
    Documents,
    Operation,
    norm,
    pool,
    rotary,
    sampled,
    swiglu,
)
from tests.ops.triton.parity import DEVICE

ALL, PACKED = LAYOUTS["all branches"], PATTERNS["packed"]
FEW = replace(PACKED, lengths=(5, 0, 40, 1, 9))
# One of each operation, of several tiles or programs.
EACH = [
    swiglu((7, 1336), 667),
    norm((70, 24)),
    rotary(ALL, DOCUMENTS[1]),
    pool(Documents((66,), l=8, d=4, batch=2), 2, 6, True),
    fused.selector(FEW),
]
each = pytest.mark.parametrize("operation", EACH, ids=lambda x: x.name)
# Less than one tile, several, one row or column, odd widths, padding.
BY_TOKEN = [
    *(swiglu(*size) for size in (((7, 1336), 667), ((2, 5, 48), 24), ((1, 2), 1), ((9, 20), 7))),
    *(norm(shape) for shape in ((1, 5), (3, 1), (2, 35, 24), (5, 700), (2, 2500), (7,))),
    norm((3, 6), "normed"),
    *(norm((70, 24), outputs, residual=False) for outputs in ("both", "normed")),
]
# Several tiles of tokens with a partial last one, blocks longer than a step, and real head sizes.
LARGE = [
    rotary(PackedLayout(3, 1, 64, 32, 1, 3, mean=True), Documents((45,), l=33, d=16)),
    rotary(PackedLayout(2, 2, 16, 24, 2, 2, pre_rope=True), Documents((40, 0, 3), l=8, d=4)),
    rotary(PackedLayout(3, 3, 16, 5, 2, 2, pre_rope=True), Documents((5, 13), l=8, d=4)),
    rotary(ALL, Documents((31, 1, 0, 33), l=7, d=2)),
]
ROTARY = [rotary(layout, DOCUMENTS[1]) for layout in LAYOUTS.values()] + LARGE
ROTARY += [rotary(LAYOUTS[x], DOCUMENTS[i]) for x in ("prefill", "mlp", "index") for i in (0, 2)]
# Several steps of a program, several programs, halves that are padded.
POOLS = [
    (Documents((45,), l=33, d=16), 1, 32),
    (Documents((135,), l=8, d=4, batch=2), 1, 4),
    (Documents((40, 0, 3), l=8, d=4), 3, 24),
    *((documents, 2, 6) for documents in DOCUMENTS),
]
SELECTOR = [
    fused.selector(PATTERNS["recipe's blocks"], queries=range(2, 330, 9)),
    *(fused.selector(case) for case in [*PATTERNS.values()][1:]),
    *(fused.selector(PATTERNS[name], 1) for name in ("packed", "a key per token")),
    fused.selector(PATTERNS["odd sizes"], 3),
    fused.selector(replace(PACKED, group=1)),
    fused.selector(replace(FEW, kv_heads=1, group=40)),
    *(fused.selector(PACKED, queries=tokens) for tokens in ([0], [40, 41, 42, 83])),
    fused.selector(replace(FEW, kv_heads=1), queries=range(55)),
    *(fused.selector(case) for case in RANDOM[:2]),
]
OPERATIONS = [
    *BY_TOKEN,
    *ROTARY,
    *(pool(*size, rotates) for size in POOLS for rotates in (True, False)),
    *SELECTOR,
]
operations = pytest.mark.parametrize("operation", OPERATIONS, ids=str)


@operations
def test_results_and_gradients_are_those_of_the_definition(operation: Operation) -> None:
    """Uninitialised memory is NaN here, so every element must be written, padding's too."""
    actual, expected = (
        operation.results(name, torch.float64) for name in ("blockwise", "definition")
    )
    for a, b in zip(actual, expected, strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@operations
def test_results_and_gradients_of_kernels_are_those_of_pytorch(operation: Operation) -> None:
    operation.assert_parity()


@each
@pytest.mark.parametrize("backend", ["blockwise", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_in_two_bytes_are_rounded_once(
    operation: Operation, backend: str, dtype: torch.dtype
) -> None:
    """Gradients a few times: that of the outputs is rounded too, and some are of products."""
    actual = operation.results(backend, dtype)
    exact = operation.results("definition", torch.float64, lambda x: x.to(dtype).double())
    of_loss = operation.name == "selector_loss"  # float32, and only one of its inputs is learned
    outputs = 2 if of_loss else len(exact) - len(operation.inputs())
    for number, (a, b) in enumerate(zip(actual, exact, strict=True)):
        summed = of_loss and number < outputs
        assert a.dtype == (torch.float32 if summed else dtype)
        allowed = (100 if summed else 1 if number < outputs else 4) * torch.finfo(a.dtype).eps
        assert (a.double() - b).abs().max() <= allowed * b.abs().max(), number


def by_column(x: Tensor) -> Tensor:
    """The same numbers, with the first two dimensions swapped in memory, or with gaps."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else fused.with_gaps(x)


@each
@pytest.mark.parametrize("backend", ["blockwise", "triton"])
def test_the_same_bits_come_out_again_and_for_any_layout(
    operation: Operation, backend: str
) -> None:
    first, again, other_layout = (
        operation.results(backend, torch.float32, change) for change in (None, None, by_column)
    )
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    tolerance = 0 if backend == "triton" else 1e-5  # PyTorch sums otherwise
    torch.testing.assert_close(other_layout, first, rtol=tolerance, atol=tolerance)


OF_TOKENS = [
    swiglu((3, 8), 3),
    norm((2, 3, 6)),
    norm((2, 3, 6), "normed"),
    norm((2, 3, 6), residual=False),
]
OF_BLOCKS = [
    *(rotary(LAYOUTS[name], DOCUMENTS[1]) for name in ("all branches", "mlp", "dense")),
    pool(DOCUMENTS[1], 2, 6, True),
    fused.selector(replace(PACKED, lengths=(5, 0, 26, 1, 9))),
    fused.selector(replace(PATTERNS["batch"], lengths=(41,)), 1),
]


@pytest.mark.parametrize(
    ("operation", "backend"),
    [(x, "triton") for x in OF_TOKENS + OF_BLOCKS] + [(x, "blockwise") for x in OF_BLOCKS],
    ids=str,
)
def test_the_ops_match_their_declarations(operation: Operation, backend: str) -> None:
    """Also where a vector of parameters has another dtype than the tokens."""

    def narrow(x: Tensor) -> Tensor:
        return x.bfloat16() if x.dim() == 1 else x

    check_calls(lambda: operation.results(backend, torch.float32, narrow))


@pytest.mark.parametrize(
    "operation", [*EACH, fused.selector(PACKED, 1), rotary(ALL, DOCUMENTS[2])], ids=str
)
def test_launches_are_few_and_wait_for_no_value(operation: Operation) -> None:
    assert [x.kernel.fn.__name__ for x in recorded(operation)] == [*operation.kernels]


@pytest.mark.parametrize(
    "operation", [norm((70, 24)), pool(Documents((150,)), 2, 6, True)], ids=str
)
def test_partial_sums_of_half_precision_are_in_float32(operation: Operation) -> None:
    launches = recorded(operation, torch.bfloat16)
    parts = [x.arguments["parts"] for x in launches if "parts" in x.arguments]
    assert parts
    assert all(x.dtype == torch.float32 and x.shape[0] > 1 for x in parts)


def recorded(operation: Operation, dtype: torch.dtype = torch.float32) -> list[Launch]:
    """Launches of both passes on `meta` tensors."""
    given = [x.to("meta", dtype).requires_grad_() for x in operation.inputs()]
    with recording() as launches:
        launch_both_passes(lambda: operation.run("triton", *given))
    return launches


X, WEIGHT = torch.zeros(2, 5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
NARROW, SIX = torch.zeros(2, 8, dtype=torch.float64), torch.zeros(2, 9)
COS, SIN = DOCUMENTS[0].angles(6)
TABLES = DOCUMENTS[0].tables()
(PROJECTION,) = rotary(ALL, DOCUMENTS[0]).inputs()
FOUR = ALL._replace(kv_sets=4)
BOTH = ALL._replace(pre_rope=True)
LOSS = Inputs.of(PACKED)


def loss_of(
    queries: Tensor,
    k_cmp: Tensor = LOSS.k_cmp,
    k_sel: Tensor = LOSS.k_sel,
    **options: Any,
) -> Any:
    options = {"cu_seqlens": PACKED.cu_seqlens} | options
    return selector_loss(LOSS.q, k_cmp, k_sel, queries, PACKED.spec, **options)


def project(
    x: Tensor = PROJECTION,
    layout: PackedLayout = ALL,
    cos: Tensor = COS,
    sin: Tensor = SIN,
    tables: tuple[Tensor | None, ...] = TABLES,
) -> Any:
    return rotary_pool(x, layout, cos, sin, *tables)


WRONG: dict[str, Callable[[], Any]] = {  # by the message
    r"^width = None: gate_up has 9 columns; pass a width": lambda: ops_swiglu(SIX),
    r"^width = 5: gate_up has 9 columns": lambda: ops_swiglu(SIX, 5),
    r"^width = 0: gate_up has 8 columns": lambda: ops_swiglu(NARROW, 0),
    r"'triton' does not support swiglu: it has no float64": lambda: ops_swiglu(
        NARROW, backend="triton"
    ),
    r"^backend = 'cuda': choose one of": lambda: ops_swiglu(NARROW, backend="cuda"),
    r"^swiglu: the input has dtype": lambda: ops_swiglu(NARROW.long()),
    r"^weight has shape \(4,\); x requires \(5,\)": lambda: add_rms_norm(X, X, WEIGHT[1:], EPS),
    r"^delta has shape \(5,\); x requires \(2, 5\)": lambda: add_rms_norm(X, X[0], WEIGHT, EPS),
    r"'triton' does not support add_rms_norm: it has no float64": lambda: add_rms_norm(
        X, X, WEIGHT, EPS, backend="triton"
    ),
    r"^packed has shape \(2, 11, 99\); .* with P >= 102$": lambda: project(PROJECTION[..., :99]),
    r"^packed has shape \(11, 104\); it must be \[B": lambda: project(PROJECTION[0]),
    r"^cos has shape \(10, 1, 3\); it must be \(11, 1, 3\)": lambda: project(cos=COS[1:]),
    r"^sin has shape \(10, 1, 3\); it must be \(11, 1, 3\)": lambda: project(sin=SIN[1:]),
    r"^layout.mean requires block_tokens and token_blocks": lambda: project(tables=TABLES[:1]),
    r"^layout.mean requires block_tokens": lambda: project(tables=(None, TABLES[1])),
    r"^token_blocks has 10 rows; it must have T = 11$": lambda: project(
        tables=(TABLES[0], TABLES[1][1:])
    ),
    r"^layout.mean and layout.pre_rope exclude each other": lambda: project(layout=BOTH),
    r"^layout.kv_sets = 4: must be 1 to 3$": lambda: project(
        torch.zeros(2, 11, sum(FOUR.columns)), FOUR
    ),
    r"^layout.kv_sets = 0: must be 1 to 3$": lambda: project(layout=ALL._replace(kv_sets=0)),
    r"queries is torch.int32 \(3,\); it must be int64": lambda: loss_of(torch.arange(3).int()),
    r"queries is torch.int64 \(2, 2\)": lambda: loss_of(torch.zeros(2, 2).long()),
    r"queries is torch.int64 \(0,\)": lambda: loss_of(torch.arange(0)),
    r"k_sel has length 84; q requires 85": lambda: loss_of(
        sampled(PACKED), k_sel=LOSS.k_sel[:, 1:]
    ),
    r"k_sel has head size 7 and q has 8": lambda: loss_of(
        sampled(PACKED), k_sel=LOSS.k_sel[..., :7]
    ),
    r"^cu_seqlens goes from 0 to 3; .* T = 85$": lambda: loss_of(
        sampled(PACKED), cu_seqlens=torch.tensor([0, 3])
    ),
    r"^scale = nan: must be from": lambda: loss_of(sampled(PACKED), scale=math.nan),
    r"k_cmp has length": lambda: loss_of(sampled(PACKED), k_cmp=LOSS.k_cmp[:, 1:]),
    r"q_cmp has length 84; q requires 85": lambda: loss_of(sampled(PACKED), q_cmp=LOSS.q[:, 1:]),
    r"^k_cmp is torch.float64 .* q is torch.float32": lambda: loss_of(
        sampled(PACKED), q_cmp=LOSS.q.float()
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_raises(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


# SwiGLU.


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("backend", ["blockwise", "triton"])
def test_large_gates_neither_overflow_nor_underflow(backend: str) -> None:
    x = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=DEVICE)
    out, gradient = with_gradients(lambda y: ops_swiglu(y, backend=backend), [x])
    assert out.tolist() == [[0.0, 200.0]]
    assert torch.isfinite(gradient).all()


# RMSNorm.


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
def test_the_total_alone_gives_x_and_delta_its_gradient_and_the_weight_none(backend: str) -> None:
    _, d_x, *d_weight, d_delta = norm((3, 6), "total").results(backend, torch.float32)
    assert torch.equal(d_x, d_delta)
    assert d_x.any()
    assert not any(x.any() for x in d_weight)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_rows_past_the_end_do_not_count_even_if_eps_is_0() -> None:
    given = [fused.normal(3, 6).float().to(DEVICE), fused.normal(6, seed=1).float().to(DEVICE)]
    torch.testing.assert_close(
        *(
            with_gradients(lambda x, w, b=b: add_rms_norm(x, None, w, 0.0, backend=b)[1], given)
            for b in ("triton", "reference")
        )
    )


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
def test_the_norm_is_that_of_the_rounded_sum(backend: str) -> None:
    x, delta, weight = (
        fused.normal(*shape, seed=seed).bfloat16().to(DEVICE)
        for seed, shape in enumerate([(4, 48), (4, 48), (48,)])
    )
    total, normed = add_rms_norm(x, delta, weight, EPS, backend=backend)
    assert torch.equal(total, x + delta)
    exact = add_rms_norm(total.double(), None, weight.double(), EPS)[1]
    assert torch.equal(normed, exact.bfloat16())


def test_under_autocast_the_sum_has_the_wider_dtype() -> None:
    wide, narrow, weight = X.float() + 1 / 3, X.bfloat16() + 2, WEIGHT.float()
    for x, delta in ((wide, narrow), (narrow, wide)):
        total, normed = add_rms_norm(x, delta, weight, EPS)
        assert total.dtype == normed.dtype == torch.float32
        torch.testing.assert_close(total, wide + narrow, rtol=0, atol=0)
        torch.testing.assert_close(normed, F.rms_norm(total, (5,), weight, EPS))


def test_x_and_delta_share_one_gradient() -> None:
    """It is computed and stored once."""
    x, weight, delta = (y.float().to(DEVICE).requires_grad_() for y in norm((3, 6)).inputs())
    stored, saved = [], []
    for y in (x, delta):
        y.register_hook(lambda gradient: stored.append(gradient.data_ptr()))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda y: saved.append(y.untyped_storage().data_ptr()) or y, lambda y: y
    ):
        total, normed = add_rms_norm(x, delta, weight, EPS, backend="triton")
    assert saved
    assert not {y.untyped_storage().data_ptr() for y in (x, delta)} & {*saved}, "kept: their sum"
    (total.sum() + normed.square().sum()).backward()
    assert len(set(stored)) == 1
    assert torch.equal(x.grad, delta.grad)
    x.grad.add_(1)
    assert not torch.equal(x.grad, delta.grad), "a later step would change both"


def test_without_a_residual_the_input_and_its_norm_share_one_gradient_too() -> None:
    """Autograd adds nothing: one backward kernel, whose result is x's gradient."""
    x, weight, _ = (y.float().to(DEVICE).requires_grad_() for y in norm((3, 6)).inputs())
    doubled = x * 2
    total, normed = add_rms_norm(doubled, None, weight, EPS, backend="triton")
    with Recorder() as recorder:
        torch.autograd.backward([total, normed], [torch.ones_like(x), torch.ones_like(x)])
    names = [operation.name for operation in recorder.operations]
    assert names.count("nsa::triton_add_rms_norm_backward") == 1
    assert not any(name.startswith("aten::add") for name in names)


# RoPE and means.


def test_the_projection_is_not_saved_for_the_backward_pass() -> None:
    projection = PROJECTION.clone().requires_grad_() * 1
    saved_storages: list[int] = []

    def pack(saved: Tensor) -> Tensor:
        saved_storages.append(saved.untyped_storage().data_ptr())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        project(projection)
    assert saved_storages
    assert projection.untyped_storage().data_ptr() not in saved_storages


# φ `pool`.


@pytest.mark.parametrize(
    ("documents", "size", "reason"),
    [
        (Documents((3,), l=2, d=2), 129, "a head is larger than 128"),
        (Documents((140,), l=129, d=129), 2, "compressed blocks are longer than 128"),
        (Documents((140,), l=128, d=128), 128, None),
    ],
    ids=["head", "block", "neither"],
)
def test_sizes_that_a_program_cannot_hold_fall_back(
    documents: Documents, size: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset_fallback_counts()
    operation = pool(documents, 1, size, False)
    monkeypatch.setattr(triton, "unsupported_reason", lambda *_, **__: None)
    x = [y.float() for y in operation.inputs()]
    assert operation.run("auto", *x).shape == (1, len(documents.blocks()), 1, size)
    if reason is None:
        assert fallback_counts() == {}
        return
    with pytest.raises(ValueError, match=f"does not support pool: {reason}; use 'auto'"):
        operation.run("triton", *x)
    assert fallback_counts() == {("pool", "triton", reason): 1}
    reset_fallback_counts()


# The selector loss.


def test_few_scores_at_a_time_give_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = fused.selector(PACKED).results("blockwise", torch.float64)
    limit, scores_of, held = 7 * PACKED.seq_len * PACKED.heads, selector._scores, []

    def scores(*args: Any) -> Tensor:
        held.append(scores_of(*args))
        return held[-1]

    monkeypatch.setattr(selector, "SCORES", limit)
    monkeypatch.setattr(selector, "_scores", scores)
    few = fused.selector(PACKED).results("blockwise", torch.float64)
    torch.testing.assert_close(few, at_once, rtol=1e-12, atol=1e-14)
    assert max(x.numel() for x in held) == limit


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
def test_twice_the_scale_is_twice_the_queries(backend: str) -> None:
    x, queries = Inputs.of(FEW, torch.float32).to(DEVICE), fused.sampled(FEW).to(DEVICE)
    given: dict[str, Any] = {"cu_seqlens": FEW.offsets_on(DEVICE), "backend": backend}
    scaled, doubled = (
        selector_loss(q, x.k_cmp, x.k_sel, queries, FEW.spec, scale=scale, **given)
        for q, scale in ((x.q, 2 * FEW.scale), (2 * x.q, None))
    )
    torch.testing.assert_close(scaled, doubled)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what NumPy says of -inf
def test_large_scores_neither_overflow_nor_underflow() -> None:
    operation = fused.selector(PACKED)
    actual, exact = (
        operation.results(name, dtype, lambda x: 8 * x)
        for name, dtype in (("triton", torch.float32), ("reference", torch.float64))
    )
    assert all(bool(y.isfinite().all()) for y in actual)
    assert float(exact[0]) > 1
    torch.testing.assert_close(actual[0].double(), exact[0], rtol=1e-4, atol=0)


def test_the_gradient_of_a_small_loss_survives_half_precision() -> None:
    """A mean over many queries, scaled by fp16's loss scale: neither of them alone underflows."""
    operation = fused.selector(PACKED)

    def gradient(dtype: torch.dtype, backend: str) -> Tensor:
        k, *rest = (x.half().to(DEVICE, dtype) for x in operation.inputs())
        loss, _ = operation.run(backend, k.requires_grad_(), *rest)
        return torch.autograd.grad((loss * 1e-7).double() * 2.0**16, k)[0].double()

    exact = gradient(torch.float64, "reference")
    error = (gradient(torch.float16, "triton") - exact).abs().max()
    assert float(error) < 0.005 * float(exact.abs().max())


def test_no_tensor_has_a_number_per_query_and_key() -> None:
    """The largest beside the inputs has one per query, head and block of 64 keys."""
    m7c = Case(NSASpec(), (2048,), batch=8, kv_heads=2, group=6, key_dim=64, value_dim=64)
    launches = recorded(fused.selector(m7c, queries=range(32)))
    inputs_of_op = {"q", "k_sel", "k_cmp", "dk"}
    sizes = {
        name: x.numel()
        for launch in launches
        for name, x in launch.arguments.items()
        if isinstance(x, Tensor) and name not in inputs_of_op
    }
    assert max(sizes.values()) == sizes["mass"] == 8 * 12 * 32 * 2048 // 64
