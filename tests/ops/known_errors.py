"""Checks for known errors of public NSA implementations; each takes a backend's name."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops import (
    compressed_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.spec import NSASpec
from tests.ops import cases
from tests.ops.cases import Case, Inputs, branches, selection, with_gradients

SPEC = NSASpec(4, 2, 3, 3, 1, 1, 7)


def the_last_blocks_are_always_selected(backend: str) -> None:
    """Also past 128 blocks, and where all of the compressed attention goes to the first block."""
    spec = NSASpec(4, 2, 2, 3, 0, 2, 7)
    case = Case(spec, (290,), kv_heads=1, group=2, key_dim=2)
    x = Inputs.of(case)
    x.k_cmp[:, :3] = 10 * x.q.mean((0, 1, 2))
    index = selection(x, case, backend)
    for t in range(2, 290):
        assert {t // 2 - 1, t // 2} <= set(index[0, t, 0].tolist()), f"query {t}"


def large_logits_neither_overflow_nor_underflow(backend: str) -> None:
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


def small_importances_are_still_ranked(backend: str) -> None:
    """One block gets nearly all; the best of the rest, at a millionth, still beats the others."""
    spec = NSASpec(4, 4, 4, 3, 0, 1, 4)
    logits = torch.full((1, 30, 1, 1), -16.0)
    logits[:, 0], logits[:, 20] = 0, -15
    q = torch.ones(1, 120, 2, 1)
    _, lse = compressed_attention(q, logits, logits, spec, scale=1.0, backend=backend)
    index = select_blocks(q, logits, lse, spec, scale=1.0, backend=backend)
    assert index[0, -1, 0].tolist() == [0, 20, 29]


def key_and_value_gradients_are_rounded_to_bf16_once(backend: str) -> None:
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


def five_runs_are_the_same_to_the_bit(backend: str) -> None:
    case = Case(SPEC, (110,), kv_heads=1, group=16)
    x = Inputs.of(case, torch.float32)
    index = selection(x, case, backend)
    runs = [cases.all_branches(x, case, index, backend) for _ in range(5)]
    for run in runs[1:]:
        for a, b in zip(run, runs[0], strict=True):
            assert torch.equal(a, b)


def block_and_row_do_not_overflow_32_bits(backend: str) -> None:
    """A key made of block · T + row passes 2³¹ long before anything large is allocated."""
    seq_len, spec = 263_000, NSASpec(32, 16, 32, 1, 0, 1, 1)
    last = (seq_len - 1) // 32
    assert last * seq_len > 2**31
    q, v = torch.zeros(1, seq_len, 1, 1), torch.arange(seq_len).view(1, -1, 1, 1).float()
    index = torch.full((1, seq_len, 1, 1), -1, dtype=torch.int32)
    index[:, -2:], index[:, -3] = last, 5
    o = selected_attention(q, q, v, index, spec, backend=backend)
    expected = [5 * 32 + 15.5, (last * 32 + seq_len - 2) / 2, (last * 32 + seq_len - 1) / 2]
    torch.testing.assert_close(o[0, -3:, 0, 0], torch.tensor(expected))
    assert int((o != 0).sum()) == 3
