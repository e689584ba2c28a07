"""Backend dispatch: `auto` counts fallbacks, a named backend runs or raises with the reason."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa.ops import (
    NSASpec,
    compress_mean,
    compressed_attention,
    fallback_counts,
    nsa_attention,
    reset_fallback_counts,
    select_blocks,
    selected_attention,
    triton,
    window_attention,
)
from nsa.ops.backend import dispatch
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


X = Inputs.of(CASE, torch.float32)
LSE = compressed_attention(X.q, X.k_cmp, X.v_cmp, SPEC, backend="reference")[1]
INDEX = selection(X, CASE, "reference")
# One valid call of each function; tests replace one argument at a time by a wrong one.
VALID: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "compressed_attention": (
        compressed_attention,
        {"q": X.q, "k_cmp": X.k_cmp, "v_cmp": X.v_cmp, "spec": SPEC},
    ),
    "select_blocks": (select_blocks, {"q": X.q, "k_cmp": X.k_cmp, "lse": LSE, "spec": SPEC}),
    "selected_attention": (
        selected_attention,
        {"q": X.q, "k": X.k_sel, "v": X.v_sel, "block_index": INDEX, "spec": SPEC},
    ),
    "window_attention": (window_attention, {"q": X.q, "k": X.k_win, "v": X.v_win, "window": 5}),
    "nsa_attention": (nsa_attention, {**vars(X), "spec": SPEC}),
}


def call(name: str, each: Callable[[Tensor], Tensor] | None = None, **changes: Any) -> Any:
    """Call a function with its valid arguments, or with `each` tensor changed, and `changes`."""
    function, given = VALID[name]
    if each:
        given = {key: each(x) if isinstance(x, Tensor) else x for key, x in given.items()}
    return function(**given | changes)


def test_auto_takes_blockwise_for_every_operation_on_a_cpu() -> None:
    for name in (*OPERATIONS, "nsa_attention"):
        auto, named = call(name), call(name, backend="blockwise")
        torch.testing.assert_close(auto, named, rtol=0, atol=0)


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_every_fallback_is_counted_by_operation_backend_and_reason(
    interpret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter is never taken by `auto`."""
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    call("nsa_attention")
    call("window_attention")
    call("window_attention")
    counts = {"nsa_attention": 1, "window_attention": 2}
    before = fallback_counts()
    assert before == {(name, "triton", ON_CPU): n for name, n in counts.items()}
    reset_fallback_counts()
    assert fallback_counts() == {}
    assert sum(before.values()) == 3, "a reset changes no counts returned before"


def test_a_fallback_in_compiled_code_is_counted_once_at_compilation() -> None:
    def attend(q: Tensor) -> Tensor:
        return window_attention(q, X.k_win, X.v_win, 5)

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    for _ in range(3):
        compiled(X.q)
    assert fallback_counts() == {("window_attention", "triton", ON_CPU): 1}


@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("true", True), ("ON", True), ("0", False), ("off", False)]
)
def test_the_interpreter_is_on_where_triton_takes_it_to_be(
    value: str, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert triton.interpreted() is on


@pytest.mark.parametrize("name", OPERATIONS)
def test_triton_by_name_raises_with_the_reason_where_it_is_unsupported(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=f"'triton' does not support {name}: {ON_CPU}; use 'auto'"):
        call(name, backend="triton")
    assert fallback_counts() == {}


UNSUPPORTED = {
    "it has no float64": torch.zeros(1, 1, 1, 4, dtype=torch.float64),
    "a head is larger than 256": torch.zeros(1, 1, 1, 257),
    "batch times heads is more than 65535": torch.zeros(2, 1, 32_768, 1),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_inputs_that_kernels_do_not_support_raise(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q = UNSUPPORTED[reason]
    k = q[:, :, :1]
    with pytest.raises(ValueError, match=f"support window_attention: {reason}; use 'auto'"):
        window_attention(q, k, k[..., :1], 5, backend="triton")


@pytest.mark.parametrize("name", [*OPERATIONS[::2], "window_attention", "nsa_attention"])
def test_values_wider_than_a_kernels_head_raise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    values = {key: x for key, x in VALID[name][1].items() if key[0] == "v"}
    wide = {key: pad(x, (0, 257 - x.shape[-1])) for key, x in values.items()}
    with pytest.raises(ValueError, match=f"does not support {name}: a head is larger than 256"):
        call(name, **wide, backend="triton")


@pytest.mark.parametrize(("heads", "size"), [(1, 256), (65_535, 1)])
def test_the_largest_inputs_that_kernels_support_do_not_fall_back(heads: int, size: int) -> None:
    q = torch.empty(1, 1, heads, size, device="meta")  # counts as a tensor on a GPU
    assert dispatch("auto", "window_attention", q, q[:, :, :1]) is triton
    assert fallback_counts() == {}


def test_an_error_says_that_triton_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton, "find_spec", lambda name: None)
    monkeypatch.setattr(triton, "_find_device_problem", triton._find_device_problem.__wrapped__)
    with pytest.raises(ValueError, match="the package triton is not installed; use 'auto'"):
        call("window_attention", backend="triton")


def test_integer_inputs_raise() -> None:
    with pytest.raises(ValueError, match=r"q has dtype torch\.int64; it must be one of bfloat16"):
        call("window_attention", Tensor.long)


def three_heads(x: Tensor) -> Tensor:
    return torch.cat([x, x[:, :, :1]], 2)


def offsets(*values: int, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# A function, its wrong arguments, and the message.
(CMP, _, SEL, WIN), ALL = OPERATIONS, "nsa_attention"
SHORT_CMP = {"k_cmp": X.k_cmp[:, 1:], "v_cmp": X.v_cmp[:, 1:]}
SHORT_SEL = {"k": X.k_sel[:, 1:], "v": X.v_sel[:, 1:]}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CMP, {"q": X.q[0]}, r"^q has shape \(20, 4, 8\).*\[B, T"),
    (CMP, {"k_cmp": X.k_cmp[..., 0]}, r"^k_cmp has shape"),
    (CMP, {"v_cmp": X.v_cmp.half()}, r"^v_cmp is torch.float16"),
    (CMP, {"v_cmp": X.v_cmp.to("meta")}, r"^v_cmp .* on meta and q .* on cpu; give both the same"),
    (CMP, {"k_cmp": X.k_cmp[:, 1:]}, r"^k_cmp is .* v_cmp is "),
    (CMP, SHORT_CMP, r"^k_cmp has length 8; block_len 4 at T = 20 requires 9"),
    (CMP, {"cu_seqlens": offsets(0, 8, 20)}, "^k_cmp has length 9; .* 8"),
    (CMP, {"cu_seqlens": offsets(0, 20)} | SHORT_CMP, "^k_cmp has length 8; .* 9"),
    (CMP, {"k_cmp": X.k_cmp[..., :7]}, r"^k_cmp has head size 7"),
    (CMP, {"k_cmp": three_heads(X.k_cmp)}, r"^k_cmp has 3 heads"),
    (CMP, {"v_cmp": three_heads(X.v_cmp)}, r"^v_cmp has 3 heads"),
    (CMP, {"k_cmp": X.k_cmp[:, :, :0]}, r"^k_cmp has 0 heads"),
    (CMP, {"q": X.q.repeat(2, 1, 1, 1)}, r"^k_cmp has batch 1 and q"),
    ("select_blocks", {"k_cmp": X.k_cmp[:, 1:]}, r"^k_cmp has length 8"),
    ("select_blocks", {"k_cmp": X.k_cmp.double()}, r"^k_cmp is torch.float64"),
    ("select_blocks", {"lse": LSE[:, 1:]}, r"^lse has shape \(1, 19, 4\); .*\(1, 20, 4\)"),
    ("select_blocks", {"lse": None}, r"^lse = None: .*; give the lse of compressed_attention"),
    ("select_blocks", {"seq_len": 19}, r"^seq_len = 19 does not fit q's 20"),
    ("select_blocks", {"seq_len": 0}, r"^seq_len = 0 does not fit q's 20"),
    ("select_blocks", {"seq_len": 40}, r"^k_cmp has length 9; .* T = 40 requires 19"),
    ("select_blocks", {"seq_len": 40, "cu_seqlens": offsets(0, 20)}, "40.*leave it out with cu_"),
    (SEL, {"k": X.k_sel[:, 1:]}, r"^k is .* and v is "),
    (SEL, SHORT_SEL, r"^k has length 19; q requires 20"),
    (SEL, {"v": X.v_sel.bfloat16()}, r"^v is torch.bfloat16"),
    (SEL, {"block_index": INDEX[..., :1]}, r"^block_index .*\(1, 20, 2, 1\).*2, 2\).*select_top"),
    (SEL, {"block_index": INDEX[:, :, :1]}, r"^block_index has shape \(1, 20, 1, 2\)"),
    (WIN, {"k": three_heads(X.k_win)}, r"^k has 3 heads"),
    (WIN, {"v": X.v_win[0]}, r"^v has shape"),
    (WIN, {"v": X.v_win[:, :, :1]}, r"^k is \(1, 20, 2, .* and v is \(1, 20, 1, .* head size only"),
    (WIN, {"k": X.k_win[:, 1:], "v": X.v_win[:, 1:]}, r"^k has length 19; q requires 20"),
    (WIN, {"scale": 1e-31}, r"^scale = 1e-31: must be from 1e-30 to 1e30"),
    (WIN, {"scale": 1e31}, r"^scale = 1e\+31: must be from 1e-30 to 1e30"),
    (WIN, {"scale": math.nan}, r"^scale = nan: must be from 1e-30 to 1e30"),
    (ALL, {"scale": -0.5}, r"^scale = -0.5"),
    (WIN, {"window": 0}, r"^window = 0: .* make it 1 or more"),
    (ALL, {"gates": X.gates[..., :2]}, r"^gates has shape \(1, 20, 4, 2\)"),
    (ALL, {"gates": X.gates[:, :, :1]}, r"^gates has shape \(1, 20, 1, 3\)"),
    (ALL, {"k_sel": X.k_sel[:, 1:], "v_sel": X.v_sel[:, 1:]}, "^k_sel has length 19; q requires"),
    (ALL, {"k_win": X.k_win[:, 1:], "v_win": X.v_win[:, 1:]}, "^k_win has length 19; q requires"),
    (ALL, {"k_cmp": X.k_cmp.half()}, r"^k_cmp is torch.float16"),
    (ALL, {"v_cmp": X.v_cmp[..., 0]}, r"^v_cmp has shape"),
    (ALL, {"k_sel": X.k_sel.half()}, r"^k_sel is torch.float16"),
    (ALL, {"v_sel": X.v_sel[:, 1:]}, r"v_sel is \(1, 19"),
    (ALL, {"k_win": X.k_win[..., :7]}, r"^k_win has head size 7"),
    (ALL, {"v_win": three_heads(X.v_win)}, r"^v_win has 3 heads"),
    (ALL, {"v_win": X.v_win[..., :3]}, r"^v_win has heads .*; branches must agree"),
]
WRONG_FOR_ANY: list[tuple[dict[str, Any], str]] = [
    ({"backend": "cuda"}, r"^backend = 'cuda': choose one of auto, triton, "),
    ({"scale": 0.0}, r"^scale = 0.0: must be from 1e-30 to 1e30"),
    *(
        ({"cu_seqlens": cu_seqlens}, f"^cu_seqlens {message}")
        for cu_seqlens, message in (
            (torch.tensor([0.0, 20.0]), r"is torch.float32 \(2,\); it must be int32"),
            (offsets(0, 20)[None], r"is torch.int32 \(1, 2\)"),
            (offsets(20), r"is torch.int32 \(1,\)"),
            (offsets(0, 19), r"goes from 0 to 19; .* T = 20"),
            (offsets(1, 20), r"goes from 1 to 20"),
            (offsets(0, 12, 8, 20), r"falls .* must ascend from 0 to T = 20"),
        )
    ),
]
WRONG += [(name, *wrong) for name in OPERATIONS for wrong in WRONG_FOR_ANY]


@pytest.mark.parametrize(
    ("name", "changes", "message"), WRONG, ids=[f"{n}-{'+'.join(c)}" for n, c, _ in WRONG]
)
def test_an_error_names_the_wrong_argument(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(name, **changes)


@pytest.mark.parametrize("offsets_are_on", ["cpu", "meta"])
@pytest.mark.parametrize("name", [*OPERATIONS, "nsa_attention"])
def test_documents_on_another_device_raise(name: str, offsets_are_on: str) -> None:
    """`meta` stands for a GPU: kernels there would read the other device's memory."""
    rest = "meta" if offsets_are_on == "cpu" else "cpu"
    cu_seqlens = offsets(0, 20, device=offsets_are_on)
    message = f"^cu_seqlens is on {offsets_are_on} and q on {rest}; give both the same device"
    with pytest.raises(ValueError, match=message):
        call(name, lambda x: x.to(rest), cu_seqlens=cu_seqlens)


def test_keys_that_cannot_be_pooled_raise() -> None:
    keys = torch.zeros(1, 20, 2, 4, device="meta")
    with pytest.raises(ValueError, match=r"^cu_seqlens is on cpu and x on meta; give"):
        compress_mean(keys, SPEC, offsets(0, 20))
    with pytest.raises(ValueError, match=r"^x has shape \(20, 2, 4\); it must be \[B, T, heads"):
        compress_mean(keys[0], SPEC)


def test_too_few_compressed_keys_do_not_reach_the_kernel_of_all_branches() -> None:
    short = {name: x.to("meta") for name, x in SHORT_CMP.items()}  # counts as a GPU
    with pytest.raises(ValueError, match=r"^k_cmp has length 8; .* requires 9"):
        call("nsa_attention", lambda x: x.to("meta"), **short)


@pytest.mark.parametrize("name", OPERATIONS)
def test_packed_documents_with_a_batch_raise(name: str) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens packs documents into one row.* batch is 2"):
        call(name, lambda x: torch.cat([x, x]), cu_seqlens=offsets(0, 20))
