"""Known errors of public NSA implementations: absent here, and detected when planted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nsa.model import compressor
from nsa.ops import blockwise, inputs, reference
from tests.ops import cases
from tests.ops import known_errors as check
from tests.ops.planted_errors import Plant

Check = Callable[[str], None]

CHECKS: list[tuple[Check, tuple[str, ...]]] = [
    (check.compressed_blocks_are_seen_once_they_have_ended, ("blockwise", "reference")),
    (check.the_window_holds_exactly_w_positions, ("blockwise", "reference")),
    (check.documents_do_not_see_each_other, ("blockwise", "reference")),
    (check.the_last_blocks_are_always_selected, ("blockwise", "reference")),
    (check.large_logits_neither_overflow_nor_underflow, ("blockwise", "reference")),
    (check.small_importances_are_still_ranked, ("blockwise", "reference")),
    (check.key_and_value_gradients_are_rounded_to_bf16_once, ("blockwise", "reference")),
    (check.five_runs_are_the_same_to_the_bit, ("blockwise", "reference")),
    (check.block_and_row_do_not_overflow_32_bits, ("blockwise",)),  # T² is too much for a mask
    (check.every_query_head_reads_its_groups_head, ("blockwise", "reference")),
    (check.gradients_are_right_to_nine_digits, ("blockwise",)),
    (check.near_ties_are_judged_by_score, ("any",)),
    (check.positions_inside_a_block_matter_to_the_compressor, ("any",)),
]

PLANTED: dict[str, Plant] = {
    "compressed causality inverted": Plant(
        blockwise, "compressed_tiles", "end > row", "end < row",
        check.compressed_blocks_are_seen_once_they_have_ended,
    ),
    "compressed block seen from its start": Plant(
        reference, "visible_blocks", "start + spec.block_len - 1 <=", "start <=",
        check.compressed_blocks_are_seen_once_they_have_ended,
    ),
    "window of w + 1": Plant(
        blockwise, "_tiles", "spec.window,", "spec.window + 1,",
        check.the_window_holds_exactly_w_positions,
    ),
    "window of w + 1 in the reference": Plant(
        reference, "_visible", "distance < x.spec", "distance <= x.spec",
        check.the_window_holds_exactly_w_positions,
    ),
    "local blocks not forced past 128": Plant(
        blockwise, "top_blocks", "block > own - spec.local_blocks",
        "(block > own - spec.local_blocks) & (own < 128)",
        check.the_last_blocks_are_always_selected,
    ),
    "local blocks not forced past 128 in the reference": Plant(
        reference, "top_blocks", "block > own - spec.local_blocks",
        "(block > own - spec.local_blocks) & (own < 128)",
        check.the_last_blocks_are_always_selected,
    ),
    "one maximum for a tile": Plant(
        blockwise, "attend", "p = score.softmax(-1)",
        "p = (score - score.max()).exp(); p = p / p.sum(-1, keepdim=True)",
        check.large_logits_neither_overflow_nor_underflow,
    ),
    "importances cubed in fp16 before ranking": Plant(
        blockwise, "_fill_index", "top_blocks(importance,", "top_blocks(importance.half() ** 3,",
        check.small_importances_are_still_ranked,
    ),
    "bf16 partial sums for dK": Plant(
        blockwise, "attend_backward", "dk[tile.heads, tile.keys].baddbmm_(ds.mT, q_tile)",
        "x = dk[tile.heads, tile.keys].baddbmm_(ds.mT, q_tile); x.copy_(x.bfloat16())",
        check.key_and_value_gradients_are_rounded_to_bf16_once,
    ),
    "bf16 partial sums for dV": Plant(
        blockwise, "attend_backward", "dv[tile.heads, tile.keys].baddbmm_(p.mT, do_tile)",
        "x = dv[tile.heads, tile.keys].baddbmm_(p.mT, do_tile); x.copy_(x.bfloat16())",
        check.key_and_value_gradients_are_rounded_to_bf16_once,
    ),
    "gradients summed in random order": Plant(
        blockwise, "attend_backward", "for tile in tiles:",
        "for tile in __import__('random').sample(t := list(tiles), len(t)):",
        check.five_runs_are_the_same_to_the_bit,
    ),
    "32-bit keys": Plant(
        blockwise, "_gathered_tiles", "block_index[switch:].long()", "block_index[switch:]",
        check.block_and_row_do_not_overflow_32_bits,
    ),
    "query heads interleaved": Plant(
        blockwise, "by_group", "x_BTHD.unflatten(2, (groups or x_BTHD.shape[2], -1))",
        "x_BTHD.unflatten(2, (-1, groups or x_BTHD.shape[2])).transpose(2, 3)",
        check.every_query_head_reads_its_groups_head,
    ),
    "query heads interleaved backward only": Plant(
        blockwise, "attend_backward", "dq[tile.heads, tile.rows] += dq_tile",
        "dq[tile.heads, tile.rows] += dq_tile.flip(2)",
        check.every_query_head_reads_its_groups_head,
    ),
    "only powers of two as group": Plant(
        inputs, "check_heads", "q.shape[2] % x.shape[2]",
        "bin(q.shape[2] // x.shape[2]).count('1') > 1",
        check.every_query_head_reads_its_groups_head,
    ),
    "groups of 16 and more only": Plant(
        inputs, "check_heads", "q.shape[2] % x.shape[2]",
        "q.shape[2] // x.shape[2] not in (1, *range(16, 99))",
        check.every_query_head_reads_its_groups_head,
    ),
    "documents leak through the window and the selected blocks": Plant(
        blockwise, "_tiles", "document_slices(seq_len, x.cu_seqlens)",
        "document_slices(seq_len, x.cu_seqlens if x.branch == 'compressed' else None)",
        check.documents_do_not_see_each_other,
    ),
    "documents leak through the compressed keys": Plant(
        inputs, "compressed_slices", "slice(start, end)", "slice(0, end - start)",
        check.documents_do_not_see_each_other,
    ),
    "gradient one in a million off": Plant(
        blockwise, "attend_backward", "baddbmm_(ds.mT, q_tile)",
        "baddbmm_(ds.mT, q_tile, alpha=1.000001)", check.gradients_are_right_to_nine_digits,
    ),
    "selection compared by index": Plant(
        cases, "_selected_scores", "selected = score.gather(-1, index.long().clamp(min=0))",
        "selected = index.double()", check.near_ties_are_judged_by_score,
    ),
    "a linear φ": Plant(
        compressor, "BlockMLP.forward", "F.gelu(self.up(x))", "self.up(x)",
        check.positions_inside_a_block_matter_to_the_compressor,
    ),
}  # fmt: skip


def _name(check: Check) -> str:
    return check.__name__


@pytest.mark.parametrize(
    ("check", "backend"),
    [
        pytest.param(check, backend, id=f"{_name(check)}-{backend}")
        for check, backends in CHECKS
        for backend in backends
    ],
)
def test_the_code_does_not_have_a_known_error(check: Check, backend: str) -> None:
    check(backend)


@pytest.mark.parametrize("name", PLANTED)
def test_a_check_fails_when_its_error_is_planted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = PLANTED[name]
    backend = "reference" if plant.module is reference else "blockwise"
    plant.into(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        plant.check(backend)
