"""Known errors of public NSA implementations: absent here, and noticed when planted."""

import random
from functools import partial

import pytest
import torch
from torch import Tensor

from nsa.ops import (
    blockwise,
    compressed_attention,
    reference,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.spec import NSASpec
from tests.ops import cases
from tests.ops.cases import Case, Inputs, branches, selection, with_gradients
from tests.ops.planted_errors import Check, Into, in_source, wrong
from tests.ops.triton.parity import DEVICE

SPEC = NSASpec(4, 2, 3, 3, 1, 1, 7)
on_cpu = pytest.mark.skipif(DEVICE.type == "cuda", reason="the tensors are on the CPU")
in_pytorch = pytest.mark.parametrize("backend", ["blockwise", "reference"])
everywhere = pytest.mark.parametrize(
    "backend", ["blockwise", "reference", pytest.param("triton", marks=on_cpu)]
)


@everywhere
def test_the_first_and_last_blocks_are_always_selected(backend: str) -> None:
    """Also past 128 blocks, where nearly all importance is another block's."""
    case = Case(NSASpec(4, 2, 2, 5, 2, 2, 7), (290,), kv_heads=1, group=2, key_dim=2)
    x = Inputs.of(case, torch.float32)
    x.k_cmp[:, 50] = 10 * x.q.mean((0, 1, 2))
    index = selection(x, case, backend)
    for t in range(290):
        forced = {0, 1, t // 2 - 1, t // 2} & set(range(t // 2 + 1))
        assert forced <= set(index[0, t, 0].tolist()), f"query {t}"


@everywhere
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what NumPy says of overflow
def test_large_logits_neither_overflow_nor_underflow(backend: str) -> None:
    """Rows of one tile whose logits are 20,000 apart, in float32."""
    case = Case(SPEC, (50,), kv_heads=1, group=2, key_dim=1, value_dim=3)
    x = Inputs.of(case, torch.float32)
    x.q.copy_(torch.where(torch.arange(50)[:, None, None] % 2 == 0, 1e4, -1e4))
    for k in (x.k_cmp, x.k_sel, x.k_win):
        k.mul_(1e-4).add_(1)
    wide = x.to(torch.float64)
    index = selection(wide, case, "reference")
    actual, exact = branches(x, case, index, backend), branches(wide, case, index, "reference")
    for name in exact:
        for a, e in zip(
            with_gradients(*actual[name])[:1], with_gradients(*exact[name]), strict=False
        ):
            torch.testing.assert_close(a.double(), e, rtol=1e-2, atol=1e-2)


@everywhere
def test_small_importances_are_still_ranked(backend: str) -> None:
    """One block gets nearly all; the best of the rest, at a millionth, still beats the others."""
    spec = NSASpec(4, 4, 4, 3, 0, 1, 4)
    logits = torch.full((1, 30, 1, 1), -16.0)
    logits[:, 0], logits[:, 20] = 0, -15
    q = torch.ones(1, 120, 2, 1)
    _, lse = compressed_attention(q, logits, logits, spec, scale=1.0, backend=backend)
    index = select_blocks(q, logits, lse, spec, scale=1.0, backend=backend)
    assert index[0, -1, 0].tolist() == [0, 20, 29]


@in_pytorch
def test_key_and_value_gradients_are_rounded_to_bf16_once(backend: str) -> None:
    """Each sum runs over thirty tiles; rounding between them would add up."""
    case = Case(NSASpec(4, 2, 3, 3, 1, 1, 600), (700,), kv_heads=1, group=16, key_dim=4)
    x = Inputs.of(case, torch.bfloat16)
    do = torch.randn(1, 700, 16, 8, generator=torch.Generator().manual_seed(1)).bfloat16()

    def gradients(x: Inputs, backend: str) -> tuple[Tensor, ...]:
        k, v = x.k_win.requires_grad_(), x.v_win.requires_grad_()
        o = window_attention(x.q, k, v, 600, backend=backend)
        return torch.autograd.grad(o, (k, v), do.to(o.dtype))

    exact = gradients(x.to(torch.float64), "reference")
    for actual, e in zip(gradients(x, backend), exact, strict=True):
        once = (e.bfloat16() - e).square().mean().sqrt()
        assert (actual.double() - e).square().mean().sqrt() < 1.5 * once


def test_two_runs_are_the_same_to_the_bit() -> None:
    """With two threads, and as in training: PyTorch's deterministic algorithms are off."""
    case = Case(NSASpec(8, 4, 8, 3, 1, 1, 40), (5, 150), kv_heads=1, group=16, key_dim=16)
    x, runs = Inputs.of(case, torch.float32), []
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(2)
    try:
        for _ in range(2):
            index = selection(x, case, "blockwise")
            runs.append([index, *cases.all_branches(x, case, index)])
    finally:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(before, warn_only=True)
    torch.testing.assert_close(*runs, rtol=0, atol=0)


def test_block_and_row_do_not_overflow_32_bits() -> None:
    """A key made of block · T + row passes 2³¹ long before anything large is allocated."""
    seq_len, spec = 263_000, NSASpec(32, 16, 32, 1, 0, 1, 1)
    last = (seq_len - 1) // 32
    assert last * seq_len > 2**31
    q, v = torch.zeros(1, seq_len, 1, 1), torch.arange(seq_len).view(1, -1, 1, 1).float()
    index = torch.full((1, seq_len, 1, 1), -1, dtype=torch.int32)
    index[:, -2:], index[:, -3] = last, 5
    o = selected_attention(q, q, v, index, spec, backend="blockwise")
    expected = [5 * 32 + 15.5, (last * 32 + seq_len - 2) / 2, (last * 32 + seq_len - 1) / 2]
    torch.testing.assert_close(o[0, -3:, 0, 0], torch.tensor(expected))
    assert int((o != 0).sum()) == 3


def test_near_ties_are_judged_by_score() -> None:
    """Of two blocks whose scores differ by rounding either is right; a worse one is wrong."""
    score = torch.tensor([[torch.inf, 0.5, 0.5 + 1e-9, 0.3, torch.inf]])
    best = torch.tensor([[0, 1, 4]])
    assert cases.same_selection(score, best, torch.tensor([[0, 2, 4]]))
    wrong = ([0, 3, 4], [1, 2, 4], [0, 4, -1], [0, 4, 4], [0, 4, 1], [-1, 0, 4])
    for index in wrong:
        assert not cases.same_selection(score, best, torch.tensor([index])), index


OF_BLOCK_128 = "(block > own - spec.local_blocks) & (own < 128)"

ERRORS: dict[str, tuple[Check, Into]] = {
    "local blocks not forced past 128": (
        partial(test_the_first_and_last_blocks_are_always_selected, "blockwise"),
        in_source(blockwise, "top_blocks", "block > own - spec.local_blocks", OF_BLOCK_128),
    ),
    "local blocks not forced past 128 in the reference": (
        partial(test_the_first_and_last_blocks_are_always_selected, "reference"),
        in_source(reference, "top_blocks", "block > own - spec.local_blocks", OF_BLOCK_128),
    ),
    "one maximum for a tile": (
        partial(test_large_logits_neither_overflow_nor_underflow, "blockwise"),
        in_source(blockwise, "attend", "p = score.softmax(-1)",
                  "p = (score - score.max()).exp(); p = p / p.sum(-1, keepdim=True)"),
    ),
    "importances cubed in fp16 before ranking": (
        partial(test_small_importances_are_still_ranked, "blockwise"),
        wrong(blockwise, "top_blocks", importance=lambda x: x.half() ** 3),
    ),
    "bf16 partial sums for dK": (
        partial(test_key_and_value_gradients_are_rounded_to_bf16_once, "blockwise"),
        in_source(blockwise, "attend_backward", "baddbmm_(ds.mT, q_tile)",
                  "baddbmm_(ds.mT, q_tile).copy_(dk[tile.heads, tile.keys].bfloat16())"),
    ),
    "bf16 partial sums for dV": (
        partial(test_key_and_value_gradients_are_rounded_to_bf16_once, "blockwise"),
        in_source(blockwise, "attend_backward", "baddbmm_(p.mT, do_tile)",
                  "baddbmm_(p.mT, do_tile).copy_(dv[tile.heads, tile.keys].bfloat16())"),
    ),
    "gradients summed in random order": (
        test_two_runs_are_the_same_to_the_bit,
        wrong(blockwise, "attend_backward",
              tiles=lambda tiles: random.sample(every := list(tiles), len(every))),
    ),
    "32-bit keys": (
        test_block_and_row_do_not_overflow_32_bits,
        in_source(blockwise, "_gathered_tiles", "[switch:].long()", "[switch:]"),
    ),
    "selection compared by index": (
        test_near_ties_are_judged_by_score,
        wrong(cases, "_selected_scores", result=lambda _, a: a["index"].double()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_a_check_fails_when_its_error_is_planted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, into = ERRORS[name]
    into(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        check()
