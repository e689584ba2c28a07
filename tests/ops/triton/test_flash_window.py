"""flash-attn for the window branch: we call its published signatures, for the same window.

flash-attn needs a GPU and its own build. So its signatures are copied here, with PyTorch bodies
that mask as its docstrings say; an installed flash-attn is compared with the copies.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from nsa.ops import nsa_attention, window_attention
from nsa.ops.inputs import AttentionInputs
from nsa.ops.triton import band, flash_window
from nsa.ops.triton.configs import save_tuned, tuning_key
from nsa.ops.triton.flash_window import FLASH, OPERATION, OURS, flash_forward, is_faster
from nsa.spec import NSASpec
from tests.ops.cases import Case, with_gradients
from tests.ops.triton import gpu_checks
from tests.ops.triton.parity import DEVICE, by_head, inputs

pytestmark = pytest.mark.usefixtures("own_cache")
SPEC = NSASpec(4, 2, 4, 2, 0, 1, 5)
CASES = {
    "batch": Case(SPEC, (23,), batch=2, group=3),
    "packed": Case(SPEC, (9, 1, 0, 14, 2), kv_heads=1, group=6),
    "one query": Case(SPEC, (1,)),
}
by_case = pytest.mark.parametrize("name", CASES)
BF16 = torch.bfloat16


# Signatures of flash-attn 2.8.3.post2, flash_attn/flash_attn_interface.py.
def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """Query i sees the keys from i - left to i + right, inclusive; -1 is no bound."""
    assert (dropout_p, softcap, alibi_slopes) == (0.0, 0.0, None)
    left, right = window_size
    ahead = (
        torch.arange(k.shape[1], device=q.device)
        - torch.arange(q.shape[1], device=q.device)[:, None]
    )
    seen = torch.ones_like(ahead, dtype=torch.bool)
    for bound, within in (
        (left, ahead >= -left),
        (right, ahead <= right),
        (-1 + causal, ahead <= 0),
    ):
        seen &= within | (bound < 0)
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    score = torch.einsum("bqhd,bkhd->bhqk", q, k).float() * softmax_scale
    score = score.masked_fill(~seen, -torch.inf)
    lse = score.logsumexp(-1)
    o = torch.einsum("bhqk,bkhd->bqhd", score.softmax(-1).to(v.dtype), v)
    o = torch.empty_like(q).copy_(o)  # laid out as q is
    return (o, lse, None) if return_attn_probs else o


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """q [tokens, heads, size], lse [heads, tokens]; each document as above."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert block_table is None
    assert return_attn_probs
    parts = []
    for start, stop in pairwise(cu_seqlens_q.tolist()):
        assert stop - start <= max_seqlen_q == max_seqlen_k
        document = (x[None, start:stop] for x in (q, k, v))
        parts.append(
            flash_attn_func(
                *document, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                deterministic, return_attn_probs,
            )
        )  # fmt: skip
    return torch.cat([o[0] for o, *_ in parts]), torch.cat([lse[0] for _, lse, _ in parts], 1), None


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `import flash_attn` return the functions above."""
    module = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    for function in (flash_attn_func, flash_attn_varlen_func):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    flash_window._installed.cache_clear()
    yield
    flash_window._installed.cache_clear()


@by_case
@pytest.mark.parametrize("window", [1, 2, 5, 64])
@pytest.mark.usefixtures("published")
def test_its_output_and_lse_equal_our_kernels_for_the_same_window(name: str, window: int) -> None:
    case = CASES[name]
    x, cu = inputs(case), case.offsets_on(DEVICE)
    rest = cu, "window", NSASpec(window=window), case.scale
    ours = band.band_forward(AttentionInputs(x.q, x.k_win, x.v_win, None, *rest))
    for q in (x.q, by_head(x.q)):
        theirs = flash_forward(q, x.k_win, x.v_win, cu, window, case.scale)
        for a, b in zip(theirs, ours, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            assert a.is_contiguous()


@by_case
@pytest.mark.parametrize("function", [window_attention, nsa_attention])
@pytest.mark.usefixtures("published")
def test_both_functions_use_it_and_give_the_definitions_gradients(
    name: str, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward pass is ours, from flash-attn's lse."""
    case, calls = CASES[name], []
    x, options = inputs(case), {"cu_seqlens": case.offsets_on(DEVICE)}
    tensors = x.tensors() if function is nsa_attention else (x.q, x.k_win, x.v_win)
    pattern = case.spec if function is nsa_attention else case.spec.window

    def results(backend: str) -> list[Tensor]:
        return with_gradients(lambda *y: function(*y, pattern, **options, backend=backend), tensors)

    expected = results("reference")
    monkeypatch.setattr(band, "is_faster", lambda *_: calls.append(True) or True)
    torch.testing.assert_close(results("triton"), expected, rtol=1e-4, atol=1e-5)
    # The window branch calls it once; nsa_attention also before, to choose separate kernels.
    assert calls == [True] * (2 if function is nsa_attention else 1)


def fake(size: int = 64, value: int = 64, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """Fake q and v on a GPU."""
    with FakeTensorMode():
        return tuple(
            torch.empty(1, 8, 2, width, dtype=dtype, device="cuda") for width in (size, value)
        )


@pytest.mark.usefixtures("published")
def test_it_is_used_only_where_it_was_measured_to_be_faster_and_supports_the_inputs() -> None:
    assert not is_faster(*fake())
    save_tuned({tuning_key(OPERATION, (64, 64), BF16, 8): FLASH})
    assert is_faster(*fake())
    assert not is_faster(*fake(128, 128))
    assert not is_faster(*fake(dtype=torch.float16))
    save_tuned({tuning_key(OPERATION, (64, 64), BF16, 8): OURS})
    assert not is_faster(*fake())
    for dtype in (BF16, torch.float32):
        for sizes in ((64, 64), (64, 128)):
            save_tuned({tuning_key(OPERATION, sizes, dtype, 8): FLASH})
    assert not is_faster(*fake(dtype=torch.float32))
    assert not is_faster(*fake(value=128))
    assert not is_faster(*fake(60, 60))
    assert not is_faster(*(x.to(BF16) for x in (torch.empty(1, 8, 2, 64),) * 2))


def test_our_kernel_runs_if_flash_attn_was_removed_after_tuning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_window, "find_spec", lambda name: None)
    flash_window._installed.cache_clear()
    save_tuned({tuning_key(OPERATION, (64, 64), BF16, 8): FLASH})
    assert not is_faster(*fake())
    flash_window._installed.cache_clear()


def test_an_installed_flash_attn_has_the_copied_signatures() -> None:
    installed = pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    for function in (flash_attn_func, flash_attn_varlen_func):
        copied = inspect.signature(function).parameters
        actual = inspect.signature(getattr(installed, function.__name__)).parameters
        assert list(actual)[: len(copied)] == list(copied)
        assert [actual[name].default for name in copied] == [p.default for p in copied.values()]


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(4096,), (1000, 1, 0, 2047)], ids=str)
def test_an_installed_flash_attn_loses_no_more_than_pytorchs_attention(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    monkeypatch.setattr(band, "is_faster", lambda *_: True)
    case = Case(NSASpec(), lengths, kv_heads=2, group=6, key_dim=64, value_dim=64)
    gpu_checks.loses_no_more_than_plain_attention(case, BF16)
