"""Known errors of public NSA implementations: absent here, and noticed when planted.

A check takes a backend's name and raises if the backend has the error.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nsa.model import compressor
from nsa.ops import (
    blockwise,
    compressed_attention,
    inputs,
    reference,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.spec import NSASpec
from tests.ops import cases, naive
from tests.ops.cases import Case, Inputs, branches, selection, with_gradients
from tests.ops.planted_errors import Check, Into, in_source, wrong

SPEC = NSASpec(4, 2, 3, 3, 1, 1, 7)
ONE = Case(SPEC, (50,), kv_heads=1, group=2)
PACKED = Case(SPEC, (13, 2, 0, 21, 14), group=3, key_dim=4, value_dim=5)


def identity(x: Tensor) -> Tensor:
    """Values that turn an attention's output into its probabilities: key n's value is e_n."""
    length, heads = x.shape[1:3]
    return torch.eye(length, dtype=x.dtype)[None, :, None].expand(1, -1, heads, -1)


def assert_sees_exactly(probability: Tensor, seen: list[list[int]]) -> None:
    """Every head of query t gives weight to the keys seen[t], and to no other."""
    for t, keys in enumerate(seen):
        expected = torch.zeros(probability.shape[-1], dtype=torch.bool)
        expected[keys] = True
        assert bool(((probability[0, t] > 0) == expected).all()), f"query {t}"


def compressed_blocks_are_seen_once_they_have_ended(backend: str) -> None:
    for case in (ONE, PACKED):
        x, cu, length = Inputs.of(case), case.cu_seqlens, case.seq_len
        p, _ = compressed_attention(
            x.q, x.k_cmp, identity(x.k_cmp), SPEC, cu_seqlens=cu, backend=backend
        )
        seen = [naive.compressed_seen(t, length, SPEC, case.offsets) for t in range(length)]
        assert_sees_exactly(p, seen)


def the_window_holds_exactly_w_positions(backend: str) -> None:
    for case in (ONE, PACKED):
        x, cu, length = Inputs.of(case), case.cu_seqlens, case.seq_len
        p = window_attention(x.q, x.k_win, identity(x.k_win), 7, cu_seqlens=cu, backend=backend)
        seen = [naive.window_seen(t, length, 7, case.offsets) for t in range(length)]
        assert_sees_exactly(p, seen)


def documents_do_not_see_each_other(backend: str) -> None:
    """Packed, every output and every index is what the document gives alone."""
    x, offsets, blocks = Inputs.of(PACKED), PACKED.offsets, 0
    index = selection(x, PACKED, backend)
    packed = {n: with_gradients(*b) for n, b in branches(x, PACKED, index, backend).items()}
    assert offsets is not None
    for start, length in zip(offsets, PACKED.lengths, strict=False):
        if length == 0:
            continue
        token = slice(start, start + length)
        block = slice(blocks, blocks := blocks + SPEC.compressed_len(length))
        alone = replace(PACKED, lengths=(length,))
        part = Inputs(
            *(y[:, block if y is x.k_cmp or y is x.v_cmp else token] for y in x.tensors())
        )
        assert torch.equal(selection(part, alone, backend), index[:, token])
        for name, (function, given) in branches(part, alone, index[:, token], backend).items():
            output = function(*given)
            o = output[0] if isinstance(output, tuple) else output
            torch.testing.assert_close(packed[name][0][:, token], o, rtol=1e-9, atol=1e-9)


def the_first_and_last_blocks_are_always_selected(backend: str) -> None:
    """Also past 128 blocks, where nearly all importance is another block's."""
    case = Case(NSASpec(4, 2, 2, 5, 2, 2, 7), (290,), kv_heads=1, group=2, key_dim=2)
    x = Inputs.of(case, torch.float32)
    x.k_cmp[:, 50] = 10 * x.q.mean((0, 1, 2))
    index = selection(x, case, backend)
    for t in range(290):
        forced = {0, 1, t // 2 - 1, t // 2} & set(range(t // 2 + 1))
        assert forced <= set(index[0, t, 0].tolist()), f"query {t}"


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
    """With two threads, and as in training: PyTorch's deterministic algorithms are off."""
    case = Case(NSASpec(8, 4, 8, 3, 1, 1, 40), (5, 250), kv_heads=1, group=16, key_dim=16)
    x, runs = Inputs.of(case, torch.float32), []
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        with cases.threads(2):
            for _ in range(5):
                index = selection(x, case, backend)
                runs.append([index, *cases.all_branches(x, case, index, backend)])
    finally:
        torch.use_deterministic_algorithms(before, warn_only=True)
    for run in runs[1:]:
        torch.testing.assert_close(run, runs[0], rtol=0, atol=0)


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


def every_query_head_reads_its_groups_head(backend: str) -> None:
    """Also packed and backward: each KV head written out once per query head gives the same."""
    for group in (1, 3, 6):
        case = replace(PACKED, group=group)
        x = Inputs.of(case)
        index = selection(x, case, backend)
        grouped = branches(x, case, index, backend)
        written_out = branches(x, case, index.repeat_interleave(group, 2), backend)
        for name, (function, given) in grouped.items():
            alone = written_out[name][0]
            expected = with_gradients(
                lambda q, k, v, alone=alone, g=group: alone(
                    q, k.repeat_interleave(g, 2), v.repeat_interleave(g, 2)
                ),
                given,
            )
            torch.testing.assert_close(
                with_gradients(function, given), expected, rtol=1e-9, atol=1e-9
            )


def gradients_are_right_to_nine_digits(backend: str) -> None:
    """No absolute tolerance that a wrong gradient would fit into."""
    x = Inputs.of(ONE)
    index = selection(x, ONE, "reference")
    actual, exact = (cases.all_branches(x, ONE, index, b) for b in (backend, "reference"))
    for a, e in zip(actual, exact, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)


def near_ties_are_judged_by_score(backend: str) -> None:
    """Of two blocks whose scores differ by rounding either is right; a worse one is wrong."""
    score = torch.tensor([[torch.inf, 0.5, 0.5 + 1e-9, 0.3, torch.inf]])
    best = torch.tensor([[0, 1, 4]])
    assert cases.same_selection(score, best, torch.tensor([[0, 2, 4]]))
    wrong = ([0, 3, 4], [1, 2, 4], [0, 4, -1], [0, 4, 4], [0, 4, 1], [-1, 0, 4])
    for index in wrong:
        assert not cases.same_selection(score, best, torch.tensor([index])), index


def positions_inside_a_block_matter_to_the_compressor(backend: str) -> None:
    """The effect of φ's position embeddings depends on the tokens: it is not one constant."""
    torch.manual_seed(0)
    phi = compressor.BlockMLP(block_len=4, size=3, hidden=5).double()
    blocks = torch.randn(1, 6, 4, 1, 3, dtype=torch.float64)
    without = phi(blocks)
    torch.nn.init.normal_(phi.position)
    effect = (phi(blocks) - without).detach().flatten(0, 2)
    assert float((effect - effect[0]).abs().max()) > 1e-2


ANY, EVERY = ("any",), ("blockwise", "reference")
CHECKS: dict[Check, tuple[str, ...]] = {
    compressed_blocks_are_seen_once_they_have_ended: EVERY,
    the_window_holds_exactly_w_positions: EVERY,
    documents_do_not_see_each_other: EVERY,
    the_first_and_last_blocks_are_always_selected: (*EVERY, "triton"),
    large_logits_neither_overflow_nor_underflow: (*EVERY, "triton"),
    small_importances_are_still_ranked: (*EVERY, "triton"),
    key_and_value_gradients_are_rounded_to_bf16_once: EVERY,
    five_runs_are_the_same_to_the_bit: EVERY,
    block_and_row_do_not_overflow_32_bits: ("blockwise",),  # T² is too much for a mask
    every_query_head_reads_its_groups_head: EVERY,
    gradients_are_right_to_nine_digits: ("blockwise",),
    near_ties_are_judged_by_score: ANY,
    positions_inside_a_block_matter_to_the_compressor: ANY,
}
OF_BLOCK_128 = "(block > own - spec.local_blocks) & (own < 128)"

# By check and backend.
PLANTED: dict[tuple[Check, str], dict[str, Into]] = {
    (compressed_blocks_are_seen_once_they_have_ended, "blockwise"): {
        "compressed causality inverted": wrong(blockwise, "_bias", mask=torch.logical_not),
    },
    (compressed_blocks_are_seen_once_they_have_ended, "reference"): {
        "compressed block seen from its start":
            in_source(reference, "visible_blocks", "start + spec.block_len - 1 <=", "start <="),
    },
    (the_window_holds_exactly_w_positions, "blockwise"): {
        "window of w + 1": wrong(blockwise, "window_tiles", window=lambda w: w + 1),
    },
    (the_window_holds_exactly_w_positions, "reference"): {
        "window of w + 1 in the reference":
            in_source(reference, "_visible", "distance < x.spec", "distance <= x.spec"),
    },
    (the_first_and_last_blocks_are_always_selected, "blockwise"): {
        "local blocks not forced past 128":
            in_source(blockwise, "top_blocks", "block > own - spec.local_blocks", OF_BLOCK_128),
    },
    (the_first_and_last_blocks_are_always_selected, "reference"): {
        "local blocks not forced past 128 in the reference":
            in_source(reference, "top_blocks", "block > own - spec.local_blocks", OF_BLOCK_128),
    },
    (large_logits_neither_overflow_nor_underflow, "blockwise"): {
        "one maximum for a tile":
            in_source(blockwise, "attend", "p = score.softmax(-1)",
                      "p = (score - score.max()).exp(); p = p / p.sum(-1, keepdim=True)"),
    },
    (small_importances_are_still_ranked, "blockwise"): {
        "importances cubed in fp16 before ranking":
            wrong(blockwise, "top_blocks", importance=lambda x: x.half() ** 3),
    },
    (key_and_value_gradients_are_rounded_to_bf16_once, "blockwise"): {
        "bf16 partial sums for dK":
            in_source(blockwise, "attend_backward", "baddbmm_(ds.mT, q_tile)",
                      "baddbmm_(ds.mT, q_tile).copy_(dk[tile.heads, tile.keys].bfloat16())"),
        "bf16 partial sums for dV":
            in_source(blockwise, "attend_backward", "baddbmm_(p.mT, do_tile)",
                      "baddbmm_(p.mT, do_tile).copy_(dv[tile.heads, tile.keys].bfloat16())"),
    },
    (five_runs_are_the_same_to_the_bit, "blockwise"): {
        "gradients summed in random order":
            wrong(blockwise, "attend_backward",
                  tiles=lambda tiles: random.sample(every := list(tiles), len(every))),
    },
    (block_and_row_do_not_overflow_32_bits, "blockwise"): {
        "32-bit keys":
            in_source(blockwise, "_gathered_tiles", "[switch:].long()", "[switch:]"),
    },
    (every_query_head_reads_its_groups_head, "blockwise"): {
        "query heads interleaved":
            in_source(blockwise, "by_group", "(groups or x_BTHD.shape[2], -1))",
                      "(-1, groups or x_BTHD.shape[2])).transpose(2, 3)"),
        "query heads interleaved backward only":
            in_source(blockwise, "attend_backward", "+= dq_tile", "+= dq_tile.flip(2)"),
        "only powers of two as group":
            in_source(inputs, "check_heads", "q.shape[2] % x.shape[2]",
                      "bin(q.shape[2] // x.shape[2]).count('1') > 1"),
        "groups of 16 and more only":
            in_source(inputs, "check_heads", "q.shape[2] % x.shape[2]",
                      "q.shape[2] // x.shape[2] not in (1, *range(16, 99))"),
    },
    (documents_do_not_see_each_other, "blockwise"): {
        "documents leak through the window and the selected blocks":
            in_source(blockwise, "_tiles", "document_slices(seq_len, x.cu_seqlens)",
                      "document_slices(seq_len, x.cu_seqlens if x.branch[0] == 'c' else None)"),
        "documents leak through the compressed keys":
            wrong(inputs, "compressed_slices",
                  result=lambda y, _: [slice(0, part.stop - part.start) for part in y]),
    },
    (gradients_are_right_to_nine_digits, "blockwise"): {
        "gradient one in a million off":
            in_source(blockwise, "attend_backward", "(ds.mT, q", "(ds.mT * 1.000001, q"),
    },
    (near_ties_are_judged_by_score, "any"): {
        "selection compared by index":
            wrong(cases, "_selected_scores", result=lambda _, a: a["index"].double()),
    },
    (positions_inside_a_block_matter_to_the_compressor, "any"): {
        "a linear φ":
            in_source(compressor, "BlockMLP.forward", "F.gelu(self.up(x))", "self.up(x)"),
    },
}  # fmt: skip
ERRORS = {name: (*on, into) for on, errors in PLANTED.items() for name, into in errors.items()}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what NumPy says of overflow
@pytest.mark.parametrize(
    ("check", "backend"), [(check, name) for check, names in CHECKS.items() for name in names]
)
def test_the_code_does_not_have_a_known_error(check: Check, backend: str) -> None:
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("kernels are compiled, and the checks are of CPU tensors")
    check(backend)


@pytest.mark.parametrize("name", ERRORS)
def test_a_check_fails_when_its_error_is_planted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, backend, into = ERRORS[name]
    into(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        check(backend)
