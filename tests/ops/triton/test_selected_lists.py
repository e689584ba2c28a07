"""Lists of the selected branch, bit for bit, against a stable sort of (block, query) pairs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nsa.ops.inputs import document_slices
from nsa.ops.triton import selected
from nsa.ops.triton.launch import recording
from nsa.ops.triton.selected import blocks_by_tile, queries_by_block
from nsa.spec import NSASpec
from tests.ops.cases import Calls, Case
from tests.ops.triton.parity import DEVICE

SHORT = NSASpec(4, 2, 5, 3, 1, 1, 7)
ONE = NSASpec(4, 2, 4, 1, 0, 1, 7)
MANY = NSASpec(2, 1, 1, 6, 0, 1, 7)  # more blocks than a step of the kernels reads at once
CASES = {
    "one document": Case(SHORT, (71,), batch=2),
    "packed": Case(SHORT, (0, 21, 1, 0, 2, 40, 3)),
    "many documents": Case(ONE, (*(i % 4 for i in range(70)), 35), kv_heads=1),
    "one block per query": Case(ONE, (67,), batch=2, kv_heads=3),
    "more blocks than fit a step": Case(MANY, (150,), kv_heads=1),
    "one position": Case(SHORT, (1,)),
}


def sorted_pairs(index: Tensor, case: Case, total: int) -> list[list[list[int]]]:
    """The queries of each block, ascending, per batch and head: by sorting (block, query)."""
    spec, lists = case.spec, []
    for row in index.transpose(1, 2).flatten(0, 1):  # [T, n] of each batch and head
        blocks = []
        for number, document in enumerate(document_slices(case.seq_len, case.cu_seqlens)):
            first = document.start // spec.select_len + number
            own = row[document]
            t = torch.arange(len(own), device=row.device)[:, None].expand_as(own)
            valid = (own >= 0) & (own * spec.select_len <= t)
            pairs = torch.stack([own[valid] + first, t[valid] + document.start], 1)
            blocks += torch.unique(pairs, dim=0).tolist()
        lists.append([[t for block, t in blocks if block == j] for j in range(total)])
    return lists


def random_index(case: Case) -> Tensor:
    """Any blocks, in any order: some twice, some after the query, some -1."""
    draw = torch.Generator().manual_seed(3)
    most = case.spec.select_blocks_len(max(case.lengths)) + 2
    shape = (case.batch, case.seq_len, case.kv_heads, case.spec.select_top)
    return torch.randint(-2, most, shape, generator=draw, dtype=torch.int32)


def local_index(case: Case) -> Tensor:
    """Each query's own block and those before it, ascending, padded with -1."""
    index = torch.full((case.seq_len, case.spec.select_top), -1, dtype=torch.int32)
    for document in document_slices(case.seq_len, case.cu_seqlens):
        for t in range(document.stop - document.start):
            own = t // case.spec.select_len
            blocks = range(max(0, own + 1 - case.spec.select_top), own + 1)
            index[document.start + t, : len(blocks)] = torch.tensor(blocks)
    return index[None, :, None].expand(case.batch, -1, case.kv_heads, -1)


def none_selected(case: Case) -> Tensor:
    return torch.full_like(random_index(case), -1)


def assert_lists_are_sorted_pairs(index: Tensor, case: Case) -> None:
    offsets, queries = queries_by_block(index.to(DEVICE), case.offsets_on(DEVICE), case.spec)
    assert offsets.dtype == queries.dtype == torch.int32
    actual = [
        [row[begin:end] for begin, end in pairwise(bounds)]
        for bounds, row in zip(
            offsets.flatten(0, 1).tolist(), queries.flatten(0, 1).tolist(), strict=True
        )
    ]
    assert actual == sorted_pairs(index, case, offsets.shape[-1] - 1)


@pytest.mark.parametrize("index_of", [random_index, local_index, none_selected])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_each_blocks_list_is_that_of_the_sort(
    case: Case, index_of: Callable[[Case], Tensor]
) -> None:
    assert_lists_are_sorted_pairs(index_of(case), case)


def test_lists_longer_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected, "STEP", 16)
    case = CASES["more blocks than fit a step"]
    assert_lists_are_sorted_pairs(local_index(case), case)


@pytest.mark.parametrize("queries", [1, 5, 21, 32])
@pytest.mark.parametrize("name", ["packed", "more blocks than fit a step"])
def test_the_union_of_a_tile_has_each_block_once_with_its_queries(name: str, queries: int) -> None:
    """In ascending order, and a bit for every query of the tile that selected it."""
    case = CASES[name]
    index, cu = random_index(case), case.offsets_on(DEVICE)
    lists = blocks_by_tile(index.to(DEVICE), cu, case.spec, queries)
    select_len = case.spec.select_len
    for number, document in enumerate(document_slices(case.seq_len, case.cu_seqlens)):
        for begin in range(0, document.stop - document.start, queries):
            slot = document.start // queries + number + begin // queries
            tile = index[0, document][begin : begin + queries]  # [queries, Hkv, n]
            for head in range(case.kv_heads):
                expected: dict[int, int] = {}
                for i, row in enumerate(tile[:, head].tolist()):
                    for block in row:
                        if 0 <= block * select_len <= begin + i:
                            expected[block] = expected.get(block, 0) | 1 << i
                count = int(lists[2][0, slot, head])
                blocks, members = (x[0, slot, head, :count] for x in lists[:2])
                bits = [word & 0xFFFFFFFF for word in members.tolist()]
                pairs = list(zip(blocks.tolist(), bits, strict=True))
                assert pairs == sorted(expected.items())


def test_lists_take_three_launches_and_no_other_kernel() -> None:
    """On `meta` tensors, where reading a value would raise."""
    index = torch.empty(8, 2048, 2, 16, dtype=torch.int32, device="meta")
    with recording() as launches, Calls() as recorded:
        queries_by_block(index, None, NSASpec())
    assert [launch.kernel.fn.__name__ for launch in launches] == [
        "members_kernel", "totals_kernel", "lists_kernel",
    ]  # fmt: skip
    assert set(recorded.names) == {"new_empty"}
