"""Backend dispatch: `auto` counts fallbacks, a named backend runs or raises with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.ops import (
    NSASpec,
    compressed_attention,
    fallback_counts,
    nsa_attention,
    reset_fallback_counts,
    select_blocks,
    selected_attention,
    triton,
    window_attention,
)
from tests.ops.cases import Case, Inputs, selection

SPEC = NSASpec(4, 2, 3, 2, 0, 1, 5)
CASE = Case(SPEC, (20,), kv_heads=2, group=2)
ON_CPU = "tensors are on cpu, and it needs a CUDA device"
OPERATIONS = ("compressed_attention", "select_blocks", "selected_attention", "window_attention")


@pytest.fixture(autouse=True)
def counted_from_zero() -> Iterator[None]:
    reset_fallback_counts()
    yield
    reset_fallback_counts()


@dataclass
class Call:
    """One valid call of each function; tests replace one argument at a time by a wrong one."""

    x: Inputs
    lse: Tensor
    block_index: Tensor

    @classmethod
    def valid(cls) -> Call:
        x = Inputs.of(CASE, torch.float32)
        _, lse = compressed_attention(x.q, x.k_cmp, x.v_cmp, SPEC, backend="reference")
        return cls(x, lse, selection(x, CASE, "reference"))

    def function(self, name: str) -> Callable[..., Any]:
        """The named function on these inputs; keyword arguments replace or add to its own."""
        x = self.x
        functions: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
            "compressed_attention": (
                compressed_attention,
                {"q": x.q, "k_cmp": x.k_cmp, "v_cmp": x.v_cmp, "spec": SPEC},
            ),
            "select_blocks": (
                select_blocks,
                {"q": x.q, "k_cmp": x.k_cmp, "lse": self.lse, "spec": SPEC},
            ),
            "selected_attention": (
                selected_attention,
                {
                    "q": x.q,
                    "k": x.k_sel,
                    "v": x.v_sel,
                    "block_index": self.block_index,
                    "spec": SPEC,
                },
            ),
            "window_attention": (
                window_attention,
                {"q": x.q, "k": x.k_win, "v": x.v_win, "window": 5},
            ),
            "nsa_attention": (nsa_attention, {**vars(x), "spec": SPEC}),
        }
        function, arguments = functions[name]
        return lambda **changes: function(**{**arguments, **changes})


def test_auto_takes_blockwise_for_every_operation_on_a_cpu() -> None:
    call = Call.valid()
    for name in (*OPERATIONS, "nsa_attention"):
        auto, named = call.function(name)(), call.function(name)(backend="blockwise")
        torch.testing.assert_close(auto, named, rtol=0, atol=0)


def test_every_fallback_is_counted_by_operation_backend_and_reason() -> None:
    call = Call.valid()
    reset_fallback_counts()
    call.function("nsa_attention")()
    call.function("window_attention")()
    expected = {(operation, "triton", ON_CPU): 1 for operation in OPERATIONS}
    expected["window_attention", "triton", ON_CPU] = 2
    assert fallback_counts() == expected


def test_a_fallback_in_compiled_code_is_counted_once_at_compilation() -> None:
    x = Call.valid().x
    reset_fallback_counts()

    def attend(q: Tensor) -> Tensor:
        return window_attention(q, x.k_win, x.v_win, 5)

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    for _ in range(3):
        compiled(x.q)
    assert fallback_counts() == {("window_attention", "triton", ON_CPU): 1}


def test_a_backend_requested_by_name_counts_no_fallback() -> None:
    call = Call.valid()
    reset_fallback_counts()
    for backend in ("blockwise", "reference"):
        call.function("nsa_attention")(backend=backend)
    assert fallback_counts() == {}


def test_a_reset_does_not_change_counts_returned_before() -> None:
    Call.valid().function("window_attention")()
    before = fallback_counts()
    reset_fallback_counts()
    assert fallback_counts() == {}
    assert sum(before.values()) == 1


@pytest.mark.parametrize("name", OPERATIONS)
def test_triton_by_name_raises_with_the_reason_where_it_is_unsupported(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    call = Call.valid()
    with pytest.raises(ValueError, match=f"'triton' does not support {name}: {ON_CPU}; use 'auto'"):
        call.function(name)(backend="triton")
    assert fallback_counts() == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, not interpreted")
@pytest.mark.parametrize("name", [*OPERATIONS, "nsa_attention"])
def test_triton_by_name_runs_on_cpu_tensors_in_its_interpreter(name: str) -> None:
    call = Call.valid()
    actual, expected = (call.function(name)(backend=b) for b in ("triton", "reference"))
    torch.testing.assert_close(actual, expected)
    assert fallback_counts() == {}


def test_auto_never_takes_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    call = Call.valid()
    reset_fallback_counts()
    for name in OPERATIONS:
        call.function(name)()
    assert set(fallback_counts()) == {(operation, "triton", ON_CPU) for operation in OPERATIONS}


@pytest.mark.parametrize(
    ("heads", "size", "dtype", "reason"),
    [
        (1, 4, torch.float64, "it has no float64"),
        (1, 257, torch.float32, "a head is larger than 256"),
        (65_536, 1, torch.float32, "batch times heads is more than 65535"),
    ],
    ids=["float64", "head size", "heads"],
)
def test_inputs_that_kernels_do_not_support_raise(
    heads: int, size: int, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q = torch.zeros(1, 1, heads, size, dtype=dtype)
    k = torch.zeros(1, 1, 1, size, dtype=dtype)
    with pytest.raises(
        ValueError, match=f"does not support window_attention: {reason}; use 'auto'"
    ):
        window_attention(q, k, k[..., :1], 5, backend="triton")


def test_an_error_says_that_triton_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton, "find_spec", lambda name: None)
    monkeypatch.setattr(triton, "_find_missing", triton._find_missing.__wrapped__)
    with pytest.raises(ValueError, match="the package triton is not installed; use 'auto'"):
        Call.valid().function("window_attention")(backend="triton")


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_unknown_backend_raises_with_the_valid_ones(name: str) -> None:
    with pytest.raises(ValueError, match="backend = 'cuda': choose one of auto, triton, "):
        Call.valid().function(name)(backend="cuda")


@pytest.mark.parametrize("backend", ["blockwise", "reference", "auto"])
def test_integer_inputs_raise(backend: str) -> None:
    case = Inputs.of(CASE, torch.float32)
    q, k, v = (x.long() for x in (case.q, case.k_win, case.v_win))
    with pytest.raises(ValueError, match=r"q has dtype torch\.int64; attention takes bfloat16"):
        window_attention(q, k, v, 5, backend=backend)


def three_heads(x: Tensor) -> Tensor:
    return torch.cat([x, x[:, :, :1]], 2)


# A function, its wrong arguments, and the message.
WRONG: list[tuple[str, dict[str, Callable[[Call], Any]], str]] = [
    ("compressed_attention", {"q": lambda c: c.x.q[0]}, r"^q has shape \(20, 4, 8\).*\[B, T"),
    ("compressed_attention", {"k_cmp": lambda c: c.x.k_cmp[..., 0]}, r"^k_cmp has shape"),
    ("compressed_attention", {"v_cmp": lambda c: c.x.v_cmp.half()}, r"^v_cmp is torch.float16"),
    ("compressed_attention", {"k_cmp": lambda c: c.x.k_cmp[:, 1:]}, r"^k_cmp is .* v_cmp is "),
    (
        "compressed_attention",
        {"k_cmp": lambda c: c.x.k_cmp[:, 1:], "v_cmp": lambda c: c.x.v_cmp[:, 1:]},
        r"^k_cmp has length 8; block_len 4 at T = 20 requires 9",
    ),
    ("compressed_attention", {"k_cmp": lambda c: c.x.k_cmp[..., :7]}, r"^k_cmp has head size 7"),
    ("compressed_attention", {"k_cmp": lambda c: three_heads(c.x.k_cmp)}, r"^k_cmp has 3 heads"),
    ("compressed_attention", {"v_cmp": lambda c: three_heads(c.x.v_cmp)}, r"^v_cmp has 3 heads"),
    ("compressed_attention", {"k_cmp": lambda c: c.x.k_cmp[:, :, :0]}, r"^k_cmp has 0 heads"),
    (
        "compressed_attention",
        {"q": lambda c: c.x.q.repeat(2, 1, 1, 1)},
        r"^k_cmp has batch 1 and q",
    ),
    ("select_blocks", {"k_cmp": lambda c: c.x.k_cmp[:, 1:]}, r"^k_cmp has length 8"),
    ("select_blocks", {"k_cmp": lambda c: c.x.k_cmp.double()}, r"^k_cmp is torch.float64"),
    (
        "select_blocks",
        {"lse": lambda c: c.lse[:, 1:]},
        r"^lse has shape \(1, 19, 4\); .*\(1, 20, 4\)",
    ),
    ("select_blocks", {"lse": lambda c: None}, r"^lse = None: needs one query head per KV head"),
    ("select_blocks", {"seq_len": lambda c: 19}, r"^seq_len = 19 does not fit q's 20"),
    ("select_blocks", {"seq_len": lambda c: 40}, r"^k_cmp has length 9; .* T = 40 requires 19"),
    ("selected_attention", {"k": lambda c: c.x.k_sel[:, 1:]}, r"^k is .* and v is "),
    (
        "selected_attention",
        {"k": lambda c: c.x.k_sel[:, 1:], "v": lambda c: c.x.v_sel[:, 1:]},
        r"^k has length 19; q requires 20",
    ),
    ("selected_attention", {"v": lambda c: c.x.v_sel.bfloat16()}, r"^v is torch.bfloat16"),
    (
        "selected_attention",
        {"block_index": lambda c: c.block_index[..., :1]},
        r"^block_index has shape \(1, 20, 2, 1\).*\(1, 20, 2, 2\).*select_top",
    ),
    ("window_attention", {"k": lambda c: three_heads(c.x.k_win)}, r"^k has 3 heads"),
    ("window_attention", {"v": lambda c: c.x.v_win[0]}, r"^v has shape"),
    ("window_attention", {"scale": lambda c: 0.0}, r"^scale = 0.0: must be from 1e-30 to 1e30"),
    ("nsa_attention", {"scale": lambda c: -0.5}, r"^scale = -0.5"),
    ("window_attention", {"window": lambda c: 0}, r"^window = 0: .* make it 1 or more"),
    ("nsa_attention", {"gates": lambda c: c.x.gates[..., :2]}, r"^gates has shape \(1, 20, 4, 2\)"),
    ("nsa_attention", {"k_cmp": lambda c: c.x.k_cmp.half()}, r"^k_cmp is torch.float16"),
    ("nsa_attention", {"v_cmp": lambda c: c.x.v_cmp[..., 0]}, r"^v_cmp has shape"),
    ("nsa_attention", {"k_sel": lambda c: c.x.k_sel.half()}, r"^k_sel is torch.float16"),
    ("nsa_attention", {"v_sel": lambda c: c.x.v_sel[:, 1:]}, r"v_sel is \(1, 19"),
    ("nsa_attention", {"k_win": lambda c: c.x.k_win[..., :7]}, r"^k_win has head size 7"),
    ("nsa_attention", {"v_win": lambda c: three_heads(c.x.v_win)}, r"^v_win has 3 heads"),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"), WRONG, ids=[f"{n}-{'+'.join(c)}" for n, c, _ in WRONG]
)
def test_an_error_names_the_wrong_argument(
    name: str, changes: dict[str, Callable[[Call], Any]], message: str
) -> None:
    call = Call.valid()
    with pytest.raises(ValueError, match=message):
        call.function(name)(**{argument: wrong(call) for argument, wrong in changes.items()})


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([0.0, 20.0]), r"^cu_seqlens is torch.float32 \(2,\); it must be int32"),
        (torch.tensor([[0, 20]], dtype=torch.int32), r"^cu_seqlens is torch.int32 \(1, 2\)"),
        (torch.tensor([20], dtype=torch.int32), r"^cu_seqlens is torch.int32 \(1,\)"),
        (torch.tensor([0, 19], dtype=torch.int32), r"^cu_seqlens goes from 0 to 19; .* T = 20"),
        (torch.tensor([1, 20], dtype=torch.int32), r"^cu_seqlens goes from 1 to 20"),
        (torch.tensor([0, 12, 8, 20], dtype=torch.int32), r"must ascend from 0 to T = 20"),
    ],
    ids=["float", "two dimensions", "too short", "ends early", "starts late", "not ascending"],
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_wrong_documents_raise(name: str, cu_seqlens: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Call.valid().function(name)(cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("offsets_are_on", ["cpu", "meta"])
@pytest.mark.parametrize("name", [*OPERATIONS, "nsa_attention"])
def test_documents_on_another_device_raise(name: str, offsets_are_on: str) -> None:
    """`meta` stands for a GPU: kernels there would read the other device's memory."""
    rest, call = ("meta" if offsets_are_on == "cpu" else "cpu"), Call.valid()
    call = Call(call.x.to(rest), call.lse.to(rest), call.block_index.to(rest))
    cu_seqlens = torch.tensor([0, 20], dtype=torch.int32, device=offsets_are_on)
    message = f"^cu_seqlens is on {offsets_are_on} and q on {rest}; give both the same device"
    with pytest.raises(ValueError, match=message):
        call.function(name)(cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("name", OPERATIONS)
def test_packed_documents_with_a_batch_raise(name: str) -> None:
    call = Call.valid()
    two = Inputs(*(x.repeat(2, 1, 1, 1) for x in call.x.tensors()))
    call = replace(
        call, x=two, lse=call.lse.repeat(2, 1, 1), block_index=call.block_index.repeat(2, 1, 1, 1)
    )
    with pytest.raises(ValueError, match=r"cu_seqlens packs documents into one row.* batch is 2"):
        call.function(name)(cu_seqlens=torch.tensor([0, 20], dtype=torch.int32))


def test_decoding_inside_packed_documents_raises() -> None:
    call = Call.valid()
    cu_seqlens = torch.tensor([0, 20], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"seq_len = 40.*leave it out with cu_seqlens"):
        call.function("select_blocks")(seq_len=40, cu_seqlens=cu_seqlens)
