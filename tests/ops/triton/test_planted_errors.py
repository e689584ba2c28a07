"""Mutation tests of the parity checks: each error planted in a kernel or launcher fails one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch

from nsa.ops import select_blocks
from nsa.ops.triton import band, common, per_token, pooling, rotary, select, selected, selector_loss
from nsa.ops.triton.configs import Config, override_choices
from nsa.spec import NSASpec
from tests.ops.cases import (
    Case,
    branches,
    default,
    exact_score,
    same_selection,
    selection,
    with_gradients,
)
from tests.ops.planted_errors import Plant
from tests.ops.projections import DOCUMENTS as PACKED_DOCUMENTS
from tests.ops.projections import LAYOUTS, Documents
from tests.ops.selector import PATTERNS
from tests.ops.triton.parity import (
    DEVICE,
    RULE,
    assert_exact_enough,
    assert_parity,
    computed,
    inputs,
    reference_blocks,
    settings,
)
from tests.ops.triton.test_activation import assert_swiglu_parity
from tests.ops.triton.test_cross_entropy import assert_cross_entropy_parity
from tests.ops.triton.test_normalization import assert_norm_parity, fused, tensors
from tests.ops.triton.test_pooling import assert_pool_parity
from tests.ops.triton.test_rotary import assert_rotary_pool_parity
from tests.ops.triton.test_select import assert_selects_as_well
from tests.ops.triton.test_selector_loss import assert_selector_parity

Check = Callable[[], None]
CASE = Case(NSASpec(4, 2, 5, 2, 0, 1, 7), (24,), kv_heads=1, group=2, key_dim=4, value_dim=3)
PACKED = replace(CASE, lengths=(9, 0, 1, 13))
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="compiled kernels do not see errors planted in their helpers"
)


def parity(branch: str, case: Case = CASE, **how: int) -> Check:
    """Parity in small tiles, so that there are several of each kind."""

    def check() -> None:
        with settings(**how), override_choices(lambda *_: Config(16, 16, 4, 1)):
            assert_parity(case, branch)

    return check


def selection_is_as_good() -> None:
    specs = NSASpec(7, 3, 4, 4, 2, 1, 5), NSASpec(4, 2, 4, 4, 0, 1, 5)
    for case in (PACKED, *(replace(CASE, lengths=(90,), spec=spec) for spec in specs)):
        x = inputs(case)
        index = selection(x, case, "triton")
        assert same_selection(exact_score(x, case), index, reference_blocks(case))


def one_head_selects_without_an_lse() -> None:
    specs = NSASpec(5, 2, 3, 4, 0, 1, 5), NSASpec(4, 4, 4, 3, 1, 1, 5)
    for spec in specs:
        for lengths in ((90,), (9, 0, 1, 60)):
            case = replace(CASE, spec=spec, lengths=lengths, group=1)
            assert_selects_as_well(case)
            assert_selects_as_well(case, logits=300)


def selector_losses_of_own_queries_are_those_of_pytorch() -> None:
    with override_choices(lambda *_: Config(16, 16, 4, 1)):
        assert_selector_parity(PATTERNS["packed"], heads=1)
        assert_selector_parity(PATTERNS["batch"], heads=2)


def unmasked_tiles_are_fully_visible() -> None:
    case = Case(NSASpec(20, 2, 2, 4, 0, 1, 5), (121,), kv_heads=1, group=1)
    x = inputs(case)
    with override_choices(lambda *_: Config(16, 16, 4, 1)):
        index = selection(x, case, "triton")
    assert same_selection(exact_score(x, case), index, reference_blocks(case))


def ties_go_to_the_lower_index() -> None:
    """Seventeen blocks, in tiles of sixteen, all alike but for the forced ones."""
    case = Case(NSASpec(4, 4, 4, 4, 0, 1, 5), (68,), kv_heads=1, group=1, key_dim=4)
    x = inputs(case)
    x.k_cmp.zero_()
    with override_choices(lambda *_: Config(16, 16, 4, 1)):
        assert selection(x, case, "triton")[0, -1, 0].tolist() == [0, 1, 2, 16]


def the_last_positions_select_as_in_the_full_sequence() -> None:
    x = inputs(CASE)
    lse = torch.zeros(1, 3, 2)
    index = select_blocks(x.q[:, -3:], x.k_cmp, lse, CASE.spec, seq_len=24, backend="triton")
    assert index[0, :, 0, -1].tolist() == [4, 4, 4]


def any_block_index_is_valid() -> None:
    index = torch.full((1, 24, 1, 2), -1, dtype=torch.int32)
    index[:, ::2], index[:, 5], index[:, 9] = 1, 3, 30
    index[:, :8, :, 1] = index[:, 15:, :, 1] = 3  # eight queries before it: more than its five
    x = inputs(CASE)
    with settings(chunk=2):
        assert_exact_enough(
            *(
                with_gradients(*branches(x.to(dtype), CASE, index, backend)["selected"])
                for backend, dtype in RULE
            )
        )


def gates_may_be_closed() -> None:
    x = inputs(CASE)
    x.gates[:, ::2] = 0
    assert_exact_enough(*(computed(CASE, "mixed", backend, x.to(dtype)) for backend, dtype in RULE))


def pool_is_that_of_pytorch() -> None:
    assert_pool_parity(Documents((21, 9), l=7, d=3), heads=2, size=6, rotates=True)


def rotary_pool_is_that_of_pytorch() -> None:
    assert_rotary_pool_parity(LAYOUTS["prefill"], PACKED_DOCUMENTS[1])


def swiglu_is_that_of_pytorch() -> None:
    assert_swiglu_parity((3, 12), 5)


def norms_are_those_of_pytorch() -> None:
    assert_norm_parity(fused, tensors(70, 24))


def losses_are_those_of_pytorch() -> None:
    with mock.patch.object(per_token, "COLUMNS", 16):
        assert_cross_entropy_parity(4, 40)


def selector_losses_are_those_of_pytorch() -> None:
    with override_choices(lambda *_: Config(16, 16, 4, 1)):
        assert_selector_parity(PATTERNS["packed"])
        assert_selector_parity(PATTERNS["large blocks"])  # keys in several steps


LONG = parity("compressed", Case(NSASpec(3, 1, 5, 2, 0, 1, 40), (70,), kv_heads=1, group=3))
COMPRESSED, WINDOW, MIXED = parity("compressed"), parity("window"), parity("mixed")
SEVERAL_TILES = parity("mixed", one_tile_head=0)
SELECTED, PARTS = parity("selected"), parity("selected", chunk=3)
SPLITS = parity("compressed", queries_per_split=7)
DOCUMENTS = [parity(branch, PACKED) for branch in ("compressed", "selected", "window")]


PLANTS = {
    "a compressed block is seen one position early": Plant(
        band, "_forward", "visible(t, C)", "visible(t + 1, C)", COMPRESSED
    ),
    "a query sees the position after its own": Plant(
        band, "_scores", "i[None, :] < (future", "i[None, :] <= (future", WINDOW
    ),
    "a window of w + 1": Plant(
        band, "_scores", "(far_end - first)", "(far_end - first - 1)", WINDOW
    ),
    "a window of w + 1 for keys and values": Plant(
        band, "_keys_step", "local - C.WINDOW", "local - C.WINDOW - 1", WINDOW
    ),
    "a window shorter than a tile sees the future at its far end": Plant(
        band, "_scores", "C.WINDOW <= C.KEYS + C.ROWS // C.GROUP", "C.WINDOW <= 1", WINDOW
    ),
    "keys of a window shorter than a tile are seen from beyond it": Plant(
        band, "_keys_step", "C.WINDOW <= C.KEYS + C.ROWS // C.GROUP", "C.WINDOW <= 1", WINDOW
    ),
    "the last tile of keys is dropped where it is partial": Plant(
        band, "_bounds", "high = visible(t_last, C)",
        "high = visible(t_last, C) // C.KEYS * C.KEYS", COMPRESSED,
    ),
    "a tile of keys is not masked where only its first rows see all": Plant(
        band, "_bounds", "visible(t_first, C) // C.KEYS",
        "visible(t_last, C) // C.KEYS", LONG,
    ),
    "a row that saw nothing yet turns NaN": Plant(
        common, "start_softmax", "-3.4028234e38", 'float("-inf")', COMPRESSED
    ),
    "a row that saw nothing has probabilities": Plant(
        common, "binary_lse", 'lse == float("-inf")', "lse != lse", COMPRESSED
    ),
    "the running sum is not rescaled": Plant(
        common, "softmax_step", "total * old", "total", SELECTED
    ),
    "the gradient of lse has the wrong sign": Plant(
        common, "_backward_rows_kernel", "total -= tl.load", "total += tl.load", COMPRESSED
    ),
    "dk lacks the scale": Plant(
        band, "_key_gradients", "dk_acc *= scale_out", "dk_acc *= 1.0", COMPRESSED
    ),
    "dq lacks the scale": Plant(
        common, "store_query_gradient", "x *= scale_out", "x *= 1.0", WINDOW
    ),
    "a split ends one query early": Plant(
        band, "_key_gradients", "(split + 1) * split_len)", "(split + 1) * split_len - 1)",
        SPLITS,
    ),
    "a split begins one query early": Plant(
        band, "_key_gradients",
        "= tl.maximum(split * split_len,", "= tl.maximum(split * split_len - 1,", SPLITS,
    ),
    "a group's heads are laid out by head and stored by query": Plant(
        common, "group_rows", "i // C.GROUP, i % C.GROUP", "i // C.GROUP, i * C.GROUP // C.ROWS",
        WINDOW,
    ),
    "a block counts for every query of its tile": Plant(
        selected, "_scores", "((bits >> local) & 1) == 1", "bits != 0", SELECTED
    ),
    "a block's last part takes in the next block": Plant(
        selected, "_scores", "tl.minimum(seen, left - 1)", "seen", SELECTED
    ),
    "positions after the query's own count in its block": Plant(
        selected, "_scores", "t - first, -1)", "C.KEYS, -1)", SELECTED
    ),
    "a query's own block counts as one of the past": Plant(
        selected, "_block_list", "t0 // C.SELECT)", "t0 // C.SELECT + 1)", SELECTED
    ),
    "a block of the past takes in the next block": Plant(
        selected, "_scores", "own[None, :], s", "own[None, :] | True, s", SELECTED
    ),
    "a block of the past counts for every query in the gradient": Plant(
        selected, "selected_queries_kernel", 'tl.where(rows, row_lse, float("inf"))', "row_lse",
        SELECTED,
    ),
    "a block named twice counts twice": Plant(
        selected, "_members", "words |= tl.where", "words += tl.where",
        any_block_index_is_valid,
    ),
    "all heads of a group read one head's lse": Plant(
        selected, "_keys_step", "tl.load(lse2 + at + h,", "tl.load(lse2 + at,", SELECTED
    ),
    "a block's own queries see all of it, in dk and dv": Plant(
        selected, "_keys_step", "if CAUSAL:", "if False:", SELECTED
    ),
    "later chunks of a list take their first queries for the block's own": Plant(
        selected, "selected_keys_kernel",
        "C.SELECT - chunk * C.CHUNK", "C.SELECT - chunk * C.SELECT", PARTS,
    ),
    "a block that begins after a query counts for it": Plant(
        selected, "_members", "tl.where(b * SELECT <= t, b, -1)", "b",
        any_block_index_is_valid,
    ),
    "dk of selected blocks lacks the scale": Plant(
        selected, "selected_keys_kernel", "dk_acc *= scale_out", "dk_acc *= 1.0", SELECTED
    ),
    "parts of two lists are kept in one place": Plant(
        selected, "_part_number", "begin * 2 // CHUNK", "begin // CHUNK", PARTS
    ),
    "the last part of a list is left out": Plant(
        selected, "add_parts_kernel",
        "tl.cdiv(end - begin, C.CHUNK)", "(end - begin) // C.CHUNK", PARTS,
    ),
    "a list counts positions from its document's first": Plant(
        selected, "lists_kernel", "start + t,", "t,", DOCUMENTS[1]
    ),
    "the first queries of a list are not counted": Plant(
        selected, "totals_kernel", "j * SELECT // WORD", "j * SELECT // WORD + 1", SELECTED
    ),
    "only half of a word is counted": Plant(
        selected, "_popcount", "x += x >> 8", "x += 0 * x", SELECTED
    ),
    "a document ends one position early": Plant(
        common, "locate", "offsets + run + 1)", "offsets + run + 1) - 1", DOCUMENTS[2]
    ),
    "a document reads another's compressed keys": Plant(
        common, "keys_before", "visible(length - 1,", "visible(length - 3,", DOCUMENTS[0]
    ),
    "overlaps all weigh the same": Plant(
        select, "_importance", "overlap(i, j, C)",
        "tl.minimum(overlap(i, j, C), 1.0)", selection_is_as_good,
    ),
    "overlaps that are alike for every block all weigh the same": Plant(
        select, "_importance", "(0, C) + c", "(0, C) + 1",
        selection_is_as_good,
    ),
    "the first overlapping block is left out": Plant(
        select, "_importance", "for c in range(C.COUNT)", "for c in range(1, C.COUNT)",
        selection_is_as_good,
    ),
    "a tile of blocks that some queries do not see is not masked": Plant(
        select,
        "select_kernel",
        "tl.min(visible(t, C), 0) - 1",
        "tl.min(visible(t, C), 0) + 9",
        unmasked_tiles_are_fully_visible,
    ),
    "only one head of the group counts": Plant(
        select, "_importance", "for h in range(C.GROUP)", "for h in range(1)", selection_is_as_good
    ),
    "the first blocks are not forced": Plant(
        select, "select_kernel", "(j < C.INIT)", "(j < 0)", selection_is_as_good
    ),
    "one local block too few is forced": Plant(
        select, "select_kernel", "own - C.LOCAL", "own - C.LOCAL + 1", selection_is_as_good
    ),
    "ties go to the higher index": Plant(
        select, "_keep_best", "tl.min(tl.where(score == top[:, None], j[None, :], NONE), 1)",
        "tl.max(tl.where(score == top[:, None], j[None, :], -1), 1)", ties_go_to_the_lower_index,
    ),
    "of equal blocks the lowest is given up first": Plant(
        select, "_keep_best", "tl.max(tl.where(best == least[:, None], index, -1), 1)",
        "tl.min(tl.where(best == least[:, None], index, NONE), 1)", ties_go_to_the_lower_index,
    ),
    "decoding begins at the document's first position": Plant(
        select, "select_kernel", "before = seq_len - q_len", "before = 0",
        the_last_positions_select_as_in_the_full_sequence,
    ),
    "a branch is mixed in by another's gate": Plant(
        selected, "selected_forward_kernel", "gate + 2, valid", "gate, valid", MIXED
    ),
    "the compressed branch's gradient of queries is left out": Plant(
        band, "band_queries_kernel", "cmp_lse, cmp_delta, acc,", "cmp_lse + 99, cmp_delta, acc,",
        SEVERAL_TILES,
    ),
    "the same where one tile has all compressed keys": Plant(
        band, "_single_tile_step", "at, dq_tile,", "at, 0.0 * dq_tile,", MIXED
    ),
    "the gate of the compressed branch's values is left out": Plant(
        band, "_single_tile_step", "p *= gate[None, :]", "p *= 1.0", MIXED
    ),
    "all heads of a group have one head's gate": Plant(
        band, "_single_tile_step", "load(gates + (row + at) * 3", "load(gates + row * 3 + 0 * at",
        MIXED,
    ),
    "compressed keys of the future count where one tile has them all": Plant(
        band, "_single_tile_step", "visible(t0 + local,", "visible(t0 + local + 2,", MIXED
    ),
    "the window's keys get the compressed branch's delta": Plant(
        band, "band_keys_kernel", "delta_win, dk_win", "delta_cmp, dk_win",
        SEVERAL_TILES,
    ),
    "a gate enters its branch's gradients upside down": Plant(
        band, "_branch_rows", "- tl.log2", "+ tl.log2", MIXED
    ),
    "a closed gate lets gradients through": Plant(
        band, "_branch_rows", 'closed, float("inf")', "closed, 0.0", gates_may_be_closed
    ),
    "a branch's gradient of queries replaces the others'": Plant(
        common, "store_query_gradient", "x += load_rows(dq", "x += 0.0 * load_rows(dq", MIXED
    ),
    "a query does not see its own key in the target": Plant(
        selector_loss, "_selected_mass", "key[None, :] <= position", "key[None, :] < position",
        selector_losses_are_those_of_pytorch,
    ),
    "the target's running sum is not rescaled": Plant(
        selector_loss, "_add", "total * tl.exp2(m - top)", "total",
        selector_losses_are_those_of_pytorch,
    ),
    "a query ranks blocks by a compressed key that it does not see": Plant(
        selector_loss, "_compressed_mass", "< seen_by[:, None]", "<= seen_by[:, None]",
        selector_losses_are_those_of_pytorch,
    ),
    "without an lse a block is ranked by its first compressed key": Plant(
        select, "_log_importance", "total * tl.exp2(m - m_new) + part", "tl.maximum(total, part)",
        one_head_selects_without_an_lse,
    ),
    "without an lse overlaps all weigh the same": Plant(
        select, "_log_importance", "* weight[None, :]", "* 1.0",
        one_head_selects_without_an_lse,
    ),
    "without an lse a query ranks blocks by keys that it does not see": Plant(
        select, "_log_importance", "< seen_by[:, None]", "<= seen_by[:, None]",
        one_head_selects_without_an_lse,
    ),
    "without an lse scores overflow": Plant(
        select, "_log_importance", "tl.exp2(s - m_new)", "tl.exp2(s)",
        one_head_selects_without_an_lse,
    ),
    "the gradient of own queries lacks the scale": Plant(
        selector_loss, "queries_kernel", "total *= scale *", "total *=",
        selector_losses_of_own_queries_are_those_of_pytorch,
    ),
    "the gradient of own queries lacks a tile of keys": Plant(
        selector_loss, "queries_kernel", "range(begin, end,", "range(begin, end - C.KEYS,",
        selector_losses_of_own_queries_are_those_of_pytorch,
    ),
    "own queries are those of another sample": Plant(
        selector_loss, "_query_rows", "* seq_len + t)", "* seq_len + 0 * t)",
        selector_losses_of_own_queries_are_those_of_pytorch,
    ),
    "the mean over own queries is one over attention's": Plant(
        selector_loss, "divergence_kernel", "by_head_p, 0) / RANKING", "by_head_p, 0) / C.GROUP",
        selector_losses_of_own_queries_are_those_of_pytorch,
    ),
    "overlaps all weigh the same in the loss": Plant(
        selector_loss, "_compressed_mass", "* weight[None, :]", "* 1.0",
        selector_losses_are_those_of_pytorch,
    ),
    "the loss reads another document's compressed keys": Plant(
        selector_loss, "_documents_of", "visible(end - begin - 1,", "visible(end - begin - 9,",
        selector_losses_are_those_of_pytorch,
    ),
    "a tile's rows are all of its first document": Plant(
        selector_loss, "mass_kernel", "valid & (start == current)", "valid",
        selector_losses_are_those_of_pytorch,
    ),
    "one local block too few is left out of the loss": Plant(
        selector_loss, "divergence_kernel", "own - C.LOCAL", "own - C.LOCAL + 1",
        selector_losses_are_those_of_pytorch,
    ),
    "the compressed softmax's gradient lacks its mean": Plant(
        selector_loss, "_score_gradient", "gradient / C.LEN - delta[None, :]", "gradient / C.LEN",
        selector_losses_are_those_of_pytorch,
    ),
    "a compressed key's gradient is of one selection block": Plant(
        selector_loss, "_score_gradient", "(C.LEN + C.SELECT - 2) // C.SELECT + 1", "1",
        selector_losses_are_those_of_pytorch,
    ),
    "the selector loss's gradient lacks the scale": Plant(
        selector_loss, "keys_kernel", "total *= scale *", "total *=",
        selector_losses_are_those_of_pytorch,
    ),
    "a key's gradient has queries of another document": Plant(
        selector_loss, "_score_gradient", "i[:, None] - first_key", "i[:, None] - 0 * first_key",
        selector_losses_are_those_of_pytorch,
    ),
    "the gate's gradient is that of a sigmoid alone": Plant(
        per_token, "swiglu_backward_kernel", "(1.0 + gate", "(0.0 + gate",
        swiglu_is_that_of_pytorch,
    ),
    "the residual's own gradient is left out": Plant(
        per_token, "rms_norm_backward_kernel", "dh += _load(", "dh += 0.0 * _load(",
        norms_are_those_of_pytorch,
    ),
    "the last part of the norm's weight gradient is left out": Plant(
        common, "sum_parts_kernel", "(row < rows)", "(row < rows - 1)",
        norms_are_those_of_pytorch,
    ),
    "the mean square counts a column too many": Plant(
        per_token, "_inverse_rms", "/ WIDTH + eps", "/ (WIDTH + 1) + eps",
        norms_are_those_of_pytorch,
    ),
    "the padding's gradient is not written": Plant(
        per_token, "swiglu_backward_kernel", "PACKED > 2 * WIDTH", "PACKED > 9 * WIDTH",
        swiglu_is_that_of_pytorch,
    ),
    "a pair of a head is not rotated as one": Plant(
        rotary, "_rotate_heads", "b * cos + a * sin", "b * cos - a * sin",
        rotary_pool_is_that_of_pytorch,
    ),
    "the gradient of queries is rotated forwards": Plant(
        rotary, "rotary_backward_kernel", "packed, c, -s,", "packed, c, s,",
        rotary_pool_is_that_of_pytorch,
    ),
    "the gradient of keys is rotated forwards": Plant(
        rotary, "_set_gradients", "a * cos + b * sin", "a * cos - b * sin",
        rotary_pool_is_that_of_pytorch,
    ),
    "all sets have the first one's keys": Plant(
        rotary, "_set_columns", "C.HEADS + SET * C.KV_HEADS", "C.HEADS + 0 * C.KV_HEADS",
        rotary_pool_is_that_of_pytorch,
    ),
    "the last token of a block is not in its mean": Plant(
        rotary, "pool_kernel", "valid = i < C.LEN", "valid = i < C.LEN - 1",
        rotary_pool_is_that_of_pytorch,
    ),
    "a token's gradient is that of one block": Plant(
        rotary, "_unpool", "range(C.COVER)", "range(1)",
        rotary_pool_is_that_of_pytorch,
    ),
    "the gradient of a mean is that of a sum": Plant(
        rotary, "_unpool", "total / C.LEN", "total",
        rotary_pool_is_that_of_pytorch,
    ),
    "the last token of a block has no weight": Plant(
        pooling, "pool_forward_kernel", "valid = i < LEN", "valid = i < LEN - 1",
        pool_is_that_of_pytorch,
    ),
    "a pooled key is rotated backwards": Plant(
        pooling, "pool_forward_kernel", "a * c - b * s", "a * c + b * s",
        pool_is_that_of_pytorch,
    ),
    "a score has no gradient": Plant(
        pooling, "pool_backward_kernel", "dk = dot(ds.to(k.dtype), tl.trans(w), dk)", "dk += 0.0",
        pool_is_that_of_pytorch,
    ),
    "a position's gradient is that of the next": Plant(
        pooling, "pool_backward_kernel", "== i[None, :]", "== i[None, :] + 1",
        pool_is_that_of_pytorch,
    ),
    "the scale's gradient counts a block for each of its tokens": Plant(
        pooling, "pool_backward_kernel", "covered & (i == 0)", "covered",
        pool_is_that_of_pytorch,
    ),
    "the gradient of a gate lacks the sigmoid's slope": Plant(
        rotary, "rotary_backward_kernel", "g * (1 - g)", "g",
        rotary_pool_is_that_of_pytorch,
    ),
    "the gradient of padding is not written": Plant(
        rotary, "rotary_backward_kernel", "C.REST, REST_P", "C.GATES, REST_P",
        rotary_pool_is_that_of_pytorch,
    ),
    "the sum of a row is not rescaled where its maximum rises": Plant(
        per_token, "cross_entropy_kernel", "total * tl.exp(m - m_new)", "total",
        losses_are_those_of_pytorch,
    ),
    "an ignored row has a gradient": Plant(
        per_token, "cross_entropy_kernel", "tl.zeros([COLUMNS],", "tl.full([COLUMNS], 1.0,",
        losses_are_those_of_pytorch,
    ),
    "the label's gradient lacks its minus 1": Plant(
        per_token, "cross_entropy_kernel", "p - 1.0", "p", losses_are_those_of_pytorch
    ),
}  # fmt: skip


@pytest.mark.parametrize("check", {plant.check: None for plant in PLANTS.values()})
def test_the_code_passes_every_check(check: Check) -> None:
    check()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what NumPy says of NaN and overflow
@pytest.mark.parametrize("name", default(15, [*PLANTS][::3] + [*PLANTS][1::3] + [*PLANTS][2::3]))
def test_a_planted_error_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant = PLANTS[name]
    plant.into(monkeypatch)
    with pytest.raises(AssertionError):
        plant.check()
