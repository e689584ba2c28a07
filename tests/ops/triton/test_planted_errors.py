"""Mutation tests of the parity checks: each error planted in a kernel or launcher fails one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl

from nsa.ops.triton import band, common, per_token, pooling, rotary, select, selected, selector_loss
from nsa.spec import NSASpec
from tests.ops import fused, test_selection
from tests.ops.cases import Case, default
from tests.ops.fused import LAYOUTS, PATTERNS, Documents
from tests.ops.planted_errors import Check, Into, in_source, wrong
from tests.ops.test_cross_entropy import assert_cross_entropy_parity
from tests.ops.test_selection import assert_selects_as_well
from tests.ops.tiles import small_tiles
from tests.ops.triton import test_parity
from tests.ops.triton.parity import DEVICE, assert_parity, settings

CASE = Case(NSASpec(4, 2, 5, 2, 0, 1, 7), (24,), kv_heads=1, group=2, key_dim=4, value_dim=3)
PACKED = replace(CASE, lengths=(9, 0, 1, 13))
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="compiled kernels do not see errors planted in their helpers"
)


def in_small_tiles(check: Callable[..., None], *args: Any, **how: int) -> Check:
    """The check in tiles so small that there are several of each kind."""

    def run() -> None:
        with settings(**how), small_tiles():
            check(*args)

    return run


def parity(branch: str, case: Case = CASE, **how: int) -> Check:
    return in_small_tiles(assert_parity, case, branch, **how)


selects_as_well = test_selection.test_the_selected_blocks_are_as_good_as_the_definitions


def selection_is_as_good() -> None:
    specs = NSASpec(7, 3, 4, 4, 2, 1, 5), NSASpec(4, 2, 4, 4, 0, 1, 5)
    for case in (PACKED, *(replace(CASE, lengths=(90,), spec=spec) for spec in specs)):
        selects_as_well(case)


def one_head_selects_without_an_lse() -> None:
    specs = NSASpec(5, 2, 3, 4, 0, 1, 5), NSASpec(4, 4, 4, 3, 1, 1, 5), NSASpec(1, 1, 4, 3, 1, 1, 5)
    for spec in specs:
        for lengths in ((90,), (9, 0, 1, 60)):
            case = replace(CASE, spec=spec, lengths=lengths, group=1)
            assert_selects_as_well(case)
            assert_selects_as_well(case, logits=300)


def losses_are_those_of_pytorch() -> None:
    with mock.patch.object(per_token, "COLUMNS", 16):
        assert_cross_entropy_parity(4, 40)


def selector_losses_are_those_of_pytorch(heads: dict[str, int]) -> None:
    for pattern, count in heads.items():
        fused.selector(PATTERNS[pattern], count).assert_parity()


TIES = in_small_tiles(test_selection.test_exact_ties_go_to_the_lower_index, "triton", torch.float32)
UNMASKED = in_small_tiles(selects_as_well, test_selection.PATTERNS[-1])
LAST_POSITIONS = partial(
    test_selection.test_selection_of_the_last_positions_is_the_tail_of_the_full_selection,
    *("triton", 13),
)
ANY_BLOCKS = partial(test_parity.test_any_block_index_is_valid, (1, 20, 0, 15), {})
CLOSED = partial(test_parity.test_a_gate_may_be_closed_or_open, (2, 0.0))
# The keys of large blocks take several steps.
LOSSES = in_small_tiles(selector_losses_are_those_of_pytorch, {"packed": 0, "large blocks": 0})
OWN_QUERIES = in_small_tiles(selector_losses_are_those_of_pytorch, {"packed": 1, "batch": 2})
POOL = fused.pool(Documents((21, 9), l=7, d=3), heads=2, size=6, rotates=True).assert_parity
ROTARY = fused.rotary(LAYOUTS["prefill"], Documents((9, 0, 1, 8), l=5, d=3)).assert_parity
SWIGLU, NORM = fused.swiglu((3, 12), 5).assert_parity, fused.norm((70, 24)).assert_parity
LONG = parity("compressed", Case(NSASpec(3, 1, 5, 2, 0, 1, 40), (70,), kv_heads=1, group=3))
COMPRESSED, WINDOW, MIXED = parity("compressed"), parity("window"), parity("mixed")
SELECTED, PARTS = parity("selected"), parity("selected", chunk=3)
SPLITS = parity("compressed", queries_per_split=7)
DOCUMENTS = [parity(branch, PACKED) for branch in ("compressed", "selected", "window")]


def plus(number: float) -> Callable[[Any], Any]:
    return lambda x: x + number


def fixed(value: Any) -> Callable[[Any], Any]:
    return lambda x: value


def having(**fields: Callable[[int], int]) -> Callable[[Any], Any]:
    """Change fields of a kernel's constants."""
    return lambda c: c._replace(**{name: new(getattr(c, name)) for name, new in fields.items()})


far = having(WINDOW=fixed(99))


def alike(a: dict[str, Any]) -> bool:
    """Whether `overlap` is called once for every block."""
    return type(a["j"]) is int


def laid_out_by_head(y: Any, a: dict[str, Any]) -> Any:
    """Of `group_rows` with one KV head."""
    c = a["C"]
    return y[0], y[0] * c.GROUP + tl.arange(0, c.ROWS) * c.GROUP // c.ROWS


def without_rescaling(y: Any, a: dict[str, Any]) -> Any:
    """Of `softmax_step`."""
    return y[0], y[1] + a["total"] * (1 - tl.exp2(a["m"] - y[0])), y[2]


def only_the_first_block(token_blocks: torch.Tensor) -> torch.Tensor:
    return torch.cat([token_blocks[:, :1], torch.full_like(token_blocks[:, 1:], -1)], 1)


def first_head(x: torch.Tensor) -> torch.Tensor:
    """The first head's numbers for all heads, [B, T, H, ..]."""
    return x[:, :, :1].expand_as(x).contiguous()


PLANTS: dict[Check, dict[str, Into]] = {
    COMPRESSED: {
        "a compressed block is seen one position early": wrong(band, "visible", t=plus(1)),
        "the last tile of keys is dropped where it is partial":
            wrong(band, "_bounds", result=lambda y, a: (*y[:3], y[3] // 16 * 16)),
        "a row that saw nothing yet turns NaN":
            wrong(common, "start_softmax", result=lambda y, a: (y[0] * 10, *y[1:])),
        "a row that saw nothing has probabilities":
            wrong(common, "binary_lse", result=lambda y, a: a["lse"] * common.LOG2E),
        "the gradient of lse has the wrong sign":
            wrong(common, "_backward_rows_kernel", dlse=torch.neg),
        "dk lacks the scale": wrong(band, "band_keys_kernel", scale_out=fixed(1.0)),
    },
    WINDOW: {
        "a query sees the position after its own": wrong(band, "_scores", future=plus(1)),
        "a window of w + 1": wrong(band, "_scores", far_end=plus(-1)),
        "a window of w + 1 for keys and values":
            wrong(band, "_keys_step", C=having(WINDOW=plus(1))),
        "a window shorter than a tile sees the future at its far end":
            wrong(band, "_scores", lambda a: {"future": a["future"] + 99 * (a["PHASE"] == 0)}),
        "keys of a window shorter than a tile are seen from beyond it":
            wrong(band, "_keys_step", lambda a: {"C": far(a["C"]) if a["PHASE"] == 0 else a["C"]}),
        "dq lacks the scale": wrong(common, "store_query_gradient", scale_out=fixed(1.0)),
        "a group's heads are laid out by head and stored by query":
            wrong(common, "group_rows", result=laid_out_by_head),
    },
    LONG: {
        "a tile of keys is not masked where only its first rows see all":
            wrong(band, "_bounds", result=lambda y, a: (*y[:2], y[3] // 16 * 16, y[3])),
    },
    SELECTED: {
        "the running sum is not rescaled":
            wrong(common, "softmax_step", result=without_rescaling),
        "a block counts for every query of its tile":
            wrong(selected, "blocks_by_tile", result=lambda y, a: (y[0], y[1].fill_(-1), y[2])),
        "a block's last part takes in the next block":
            in_source(selected, "_scores", "tl.minimum(seen, left - 1)", "seen"),
        "positions after the query's own count in its block":
            wrong(selected, "_scores", t=plus(99)),
        "a query's own block counts as one of the past":
            wrong(selected, "_block_list", t0=plus(CASE.spec.select_len)),
        "a block of the past takes in the next block":
            in_source(selected, "_scores", "own[None, :], s", "own[None, :] | True, s"),
        "a block of the past counts for every query in the gradient":
            wrong(common, "add_query_gradient", lse2=lambda x: tl.where(x < float("inf"), x, 0.0)),
        "all heads of a group read one head's lse":
            wrong(selected, "selected_keys_kernel", lse2=first_head),
        "a block's own queries see all of it, in dk and dv":
            wrong(selected, "_keys_step", CAUSAL=fixed(False)),
        "dk of selected blocks lacks the scale":
            wrong(selected, "selected_keys_kernel", scale_out=fixed(1.0)),
        "the first queries of a list are not counted":
            in_source(selected, "totals_kernel", "j * SELECT // WORD", "j * SELECT // WORD + 1"),
        "only half of a word is counted": wrong(selected, "_popcount", x=lambda x: x & 0xFFFF),
    },
    SPLITS: {
        "a split ends one query early":
            wrong(band, "_keys_step", lambda a: {"end_row": a["end_row"] - a["C"].GROUP}),
        "a split begins one query early":
            wrong(band, "_keys_step", lambda a: {"first_row": a["first_row"] - a["C"].GROUP}),
    },
    DOCUMENTS[2]: {
        "a document ends one position early":
            wrong(common, "locate", result=lambda y, a: (*y[:2], y[2] - 1, y[3])),
    },
    DOCUMENTS[0]: {
        "a document reads another's compressed keys":
            wrong(common, "keys_before", result=lambda y, a: tl.maximum(y - 1, 0)),
    },
    ANY_BLOCKS: {
        "a block named twice counts twice":
            in_source(selected, "_members", "words |= tl.where", "words += tl.where"),
        "a block that begins after a query counts for it": wrong(selected, "_members", t=plus(99)),
    },
    PARTS: {
        "later chunks of a list take their first queries for the block's own":
            in_source(selected, "selected_keys_kernel", "- chunk * C.CHUNK", "- chunk * C.SELECT"),
        "parts of two lists are kept in one place":
            wrong(selected, "_part_number", begin=lambda x: x // 2),
        "the last part of a list is left out":
            in_source(selected, "add_parts_kernel", "cdiv(end - begin,", "cdiv(end - begin - 2,"),
    },
    DOCUMENTS[1]: {
        "a list counts positions from its document's first":
            in_source(selected, "lists_kernel", "start + t,", "t,"),
    },
    selection_is_as_good: {
        "overlaps all weigh the same":
            wrong(select, "overlap", result=lambda y, a: tl.minimum(y, 9.0 if alike(a) else 1.0)),
        "overlaps that are alike for every block all weigh the same":
            wrong(select, "overlap", result=lambda y, a: tl.minimum(y, 1.0 if alike(a) else 9.0)),
        "the first overlapping block is left out":
            wrong(select, "first_overlap", result=lambda y, a: y + 1),
        "only one head of the group counts":
            wrong(select, "select_kernel", lse=lambda x: x + torch.tensor([0, torch.inf])),
        "the first blocks are not forced": wrong(select, "select_kernel", C=having(INIT=fixed(0))),
        "one local block too few is forced":
            wrong(select, "select_kernel", C=having(LOCAL=plus(-1))),
    },
    UNMASKED: {
        "a tile of blocks that some queries do not see is not masked":
            in_source(select, "select_kernel", "visible(t, C), 0) - 1", "visible(t, C), 0) + 9"),
    },
    TIES: {
        "ties go to the higher index":
            in_source(select, "_keep_best",
                      "tl.min(tl.where(score == top[:, None], j[None, :], NONE)",
                      "tl.max(tl.where(score == top[:, None], j[None, :], -1)"),
        "of equal blocks the lowest is given up first":
            in_source(select, "_keep_best", "tl.max(tl.where(best == least[:, None], index, -1)",
                      "tl.min(tl.where(best == least[:, None], index, NONE)"),
    },
    LAST_POSITIONS: {
        "decoding begins at the document's first position":
            wrong(select, "select_kernel", lambda a: {"seq_len": a["q_len"]}),
    },
    one_head_selects_without_an_lse: {
        "without an lse a block is ranked by its first compressed key":
            in_source(select, "_log_importance", "m_new) + part", "m_new) + part * (c == 0)"),
        "without an lse overlaps all weigh the same":
            wrong(select, "overlap", result=lambda y, a: tl.minimum(y, 1.0)),
        "without an lse a query ranks blocks by keys that it does not see":
            in_source(select, "_log_importance", "< seen_by[:, None]", "<= seen_by[:, None]"),
        "without an lse scores overflow":
            in_source(select, "_log_importance", "tl.exp2(s - m_new)", "tl.exp2(s)"),
    },
    MIXED: {
        "a branch is mixed in by another's gate":
            wrong(selected, "selected_forward_kernel", gates=lambda x: x[..., [0, 1, 0]].clone()),
        "the gates are left out of the gradients":
            wrong(band, "band_queries_kernel", gates=torch.ones_like),
        "all heads of a group have one head's gate":
            wrong(band, "band_queries_kernel", gates=first_head),
        "a gate enters its branch's gradients upside down":
            wrong(band, "band_queries_kernel", gates=torch.reciprocal),
        "a branch's gradient of queries replaces the others'":
            wrong(common, "store_query_gradient", ADD=fixed(False)),
        "the compressed branch's gradient of queries is left out":
            wrong(band, "_query_gradient", result=lambda y, a: y if a["C"].WINDOW else a["acc"]),
        "the window's keys get the compressed branch's delta":
            wrong(band, "band_keys_kernel", lambda a: {"delta_win": a["delta_cmp"]}),
    },
    CLOSED: {
        "a closed gate lets gradients through":
            wrong(band, "band_keys_kernel", lse2_win=lambda x: x.where(x < torch.inf, 0)),
    },
    LOSSES: {
        "a query does not see its own key in the target":
            wrong(selector_loss, "_selected_mass", position=plus(-1)),
        "the target's running sum is not rescaled":
            in_source(selector_loss, "_add", "total * tl.exp2(m - top)", "total"),
        "a query ranks blocks by a compressed key that it does not see":
            wrong(selector_loss, "_compressed_mass", seen_by=plus(1)),
        "overlaps all weigh the same in the loss":
            wrong(select, "overlap", result=lambda y, a: tl.minimum(y, 1.0)),
        "the loss reads another document's compressed keys":
            wrong(selector_loss, "_documents_of", result=lambda y, a: (y[0], y[1] - (y[1] > 0))),
        "a tile's rows are all of its first document":
            in_source(selector_loss, "mass_kernel", "valid & (start == current)", "valid"),
        "one local block too few is left out of the loss":
            wrong(selector_loss, "divergence_kernel", C=having(LOCAL=plus(-1))),
        "the compressed softmax's gradient lacks its mean":
            wrong(selector_loss, "keys_kernel", by_head=lambda x: torch.stack([x[0], 0 * x[1]])),
        "a compressed key's gradient is of one selection block":
            in_source(selector_loss, "_score_gradient", "C.LEN + C.SELECT - 2) // C.SELECT", "0)"),
        "the selector loss's gradient lacks the scale":
            wrong(selector_loss, "keys_kernel", scale_out=fixed(1.0)),
        "a key's gradient has queries of another document":
            wrong(selector_loss, "_score_gradient", first_key=lambda x: 0 * x),
    },
    OWN_QUERIES: {
        "the gradient of own queries lacks the scale":
            wrong(selector_loss, "queries_kernel", scale_out=fixed(1.0)),
        "the gradient of own queries lacks a tile of keys":
            in_source(selector_loss, "queries_kernel", "range(begin,", "range(begin + C.KEYS,"),
        "own queries are those of another sample":
            wrong(selector_loss, "_query_rows", t=lambda x: 0 * x),
        "the mean over own queries is one over attention's":
            in_source(selector_loss, "divergence_kernel", "p, 0) / RANKING", "p, 0) / 3"),
    },
    SWIGLU: {
        "the gate's gradient is that of a sigmoid alone":
            in_source(per_token, "swiglu_backward_kernel", "(1.0 + gate", "(0.0 + gate"),
        "the padding's gradient is not written":
            in_source(per_token, "swiglu_backward_kernel", "PACKED > 2 *", "PACKED > 9 *"),
    },
    NORM: {
        "the residual's own gradient is left out":
            wrong(per_token, "rms_norm_backward_kernel", d_total=fixed(None)),
        "the last part of the norm's weight gradient is left out":
            wrong(common, "sum_parts_kernel", rows=plus(-1)),
        "the mean square counts a column too many": wrong(per_token, "_inverse_rms", WIDTH=plus(1)),
    },
    losses_are_those_of_pytorch: {
        "the sum of a row is not rescaled where its maximum rises":
            in_source(per_token, "cross_entropy_kernel", "total * tl.exp(m - m_new)", "total"),
        "an ignored row has a gradient":
            in_source(per_token, "cross_entropy_kernel", "tl.zeros([", "1 + tl.zeros(["),
        "the label's gradient lacks its minus 1":
            in_source(per_token, "cross_entropy_kernel", "p - 1.0", "p"),
    },
    ROTARY: {
        "a pair of a head is not rotated as one":
            in_source(rotary, "_rotate_heads", "b * cos + a * sin", "b * cos - a * sin"),
        "the gradient of queries is rotated forwards":
            in_source(rotary, "rotary_backward_kernel", "packed, c, -s,", "packed, c, s,"),
        "the gradient of keys is rotated forwards":
            wrong(rotary, "_set_gradients", sin=lambda x: -x),
        "all sets have the first one's keys": wrong(rotary, "_set_columns", SET=fixed(0)),
        "the last token of a block is not in its mean":
            in_source(rotary, "pool_kernel", "valid = i < C.LEN", "valid = i < C.LEN - 1"),
        "a token's gradient is that of one block":
            wrong(rotary, "rotary_backward_kernel", token_blocks=only_the_first_block),
        "the gradient of a mean is that of a sum":
            wrong(rotary, "_unpool", result=lambda y, a: y * a["C"].LEN),
        "the gradient of a gate lacks the sigmoid's slope":
            in_source(rotary, "rotary_backward_kernel", "g * (1 - g)", "g"),
        "the gradient of padding is not written":
            in_source(rotary, "rotary_backward_kernel", "C.REST, REST_P", "C.GATES, REST_P"),
    },
    POOL: {
        "the last token of a block has no weight":
            in_source(pooling, "pool_forward_kernel", "valid = i < LEN", "valid = i < LEN - 1"),
        "a pooled key is rotated backwards": wrong(pooling, "pool_forward_kernel", sin=torch.neg),
        "a score has no gradient":
            in_source(pooling, "pool_backward_kernel", "tl.trans(w), dk", "0 * tl.trans(w), dk"),
        "a position's gradient is that of the next":
            wrong(pooling, "sum_parts", result=lambda y, a: [y[0], y[1].roll(1, 1), y[2]]),
        "the scale's gradient counts a block for each of its tokens":
            in_source(pooling, "pool_backward_kernel", "covered & (i == 0)", "covered"),
    },
}  # fmt: skip


ERRORS = {name: (into, check) for check, errors in PLANTS.items() for name, into in errors.items()}


@pytest.mark.parametrize("check", PLANTS)
def test_the_code_passes_every_check(check: Check) -> None:
    check()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what NumPy says of NaN and overflow
@pytest.mark.parametrize("name", default(15, [*ERRORS][::3] + [*ERRORS][1::3] + [*ERRORS][2::3]))
def test_a_planted_error_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    into, check = ERRORS[name]
    into(monkeypatch)
    with pytest.raises(AssertionError):
        check()
