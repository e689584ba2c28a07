"""Parity for every tile size, and for lists and sums that are split in parts."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from nsa.ops.triton import selected
from nsa.ops.triton.configs import CHIPS, Config, candidates
from nsa.spec import NSASpec
from tests.kernel_launches import recording
from tests.ops.cases import Calls, Case, default
from tests.ops.tiles import override_choices
from tests.ops.triton.parity import (
    BRANCHES,
    DENSE,
    GATHERED,
    KERNELS,
    assert_parity,
    settings,
)

# Several tiles of everything, full and partial ones, even where a tile is large.
SPEC = NSASpec(4, 2, 20, 3, 1, 1, 37)
LONG = Case(SPEC, (131,), kv_heads=1, group=3, key_dim=4, value_dim=6)
CASE = Case(NSASpec(4, 2, 5, 2, 0, 1, 7), (45,), kv_heads=2, group=3, value_dim=4)
PACKED = replace(CASE, lengths=(0, 21, 1, 0, 2, 19), group=2)
M7C = Case(
    NSASpec(32, 16, 64, 16, 1, 2, 512), (300,), kv_heads=1, group=6, key_dim=64, value_dim=64
)
FEW_BLOCKS = replace(M7C, spec=replace(M7C.spec, select_top=3), lengths=(120, 1, 160))
ONE_HEAD = {"kv_heads": 1, "group": 1}
HEAD_SIZES, DTYPES = (64, 128, 256), (torch.bfloat16, torch.float32)
tilings = pytest.mark.parametrize("tiling", [GATHERED, DENSE], ids=["gathered", "dense"])
branches_of_all = pytest.mark.parametrize("branch", BRANCHES)


def all_tile_sizes() -> list[dict[str, tuple[int, int]]]:
    """Dicts of (rows, keys) per kernel that together contain every candidate."""
    by_kernel = {
        kernel: sorted(
            {
                (config.rows, config.keys)
                for size in HEAD_SIZES
                for dtype in DTYPES
                for chip in CHIPS
                for config in candidates(kernel, (size, size), dtype, chip)
            }
        )
        for kernel in KERNELS
    }
    most = max(len(sizes) for sizes in by_kernel.values())
    return [
        {kernel: sizes[min(i, len(sizes) - 1)] for kernel, sizes in by_kernel.items()}
        for i in range(most)
    ]


def assert_parity_with(sizes: dict[str, tuple[int, int]], case: Case, branch: str) -> None:
    with override_choices(lambda kernel, _: Config(*sizes[kernel], warps=4, stages=1)):
        assert_parity(case, branch)


@branches_of_all
@pytest.mark.parametrize("i", default(1, range(len(all_tile_sizes()))))
def test_every_candidate_passes_parity(i: int, branch: str) -> None:
    assert_parity_with(all_tile_sizes()[i], LONG, branch)


@tilings
@pytest.mark.parametrize("case", default(1, [PACKED, CASE]), ids=["packed", "one document"])
def test_small_tiles_of_the_selected_branch_gathered_and_dense(
    case: Case, tiling: dict[str, int]
) -> None:
    with settings(**tiling):
        assert_parity_with(dict.fromkeys(KERNELS, (16, 16)), case, "selected")


@branches_of_all
@pytest.mark.parametrize(
    "case", default(1, [FEW_BLOCKS, M7C]), ids=["packed, few blocks", "one document"]
)
def test_the_models_own_sizes_in_the_tiles_of_a_bf16_run(case: Case, branch: str) -> None:
    sizes = {kernel: candidates(kernel, (64, 64), torch.bfloat16)[0] for kernel in KERNELS}
    assert_parity_with({kernel: (c.rows, c.keys) for kernel, c in sizes.items()}, case, branch)


@pytest.mark.parametrize(("window", "rows"), [(16, 16), (17, 16), (18, 16), (31, 16), (17, 32)])
def test_a_window_begins_at_its_first_key_wherever_tiles_begin(window: int, rows: int) -> None:
    """By its length, its first key is the last of a tile of keys, the first, or another.

    With 32 rows, a tile's own queries end among the keys that some of them no longer see.
    """
    case = Case(replace(CASE.spec, window=window), (70,), kv_heads=1, group=1, key_dim=16)
    assert_parity_with(dict.fromkeys(KERNELS, (rows, 16)), case, "window")


@pytest.mark.parametrize(
    ("case", "chunk", "short"),  # short 0: heads one by one, None: at once
    [
        (CASE, 3, 0),
        (PACKED, 3, None),
        (replace(CASE, spec=NSASpec(4, 2, 5, 1, 0, 1, 7)), 5, 0),  # lists as long as a part
        *(
            pytest.param(*pair, marks=pytest.mark.full)
            for pair in ((CASE, 3, None), (PACKED, 3, 0), *product([CASE, PACKED], [8], [0, None]))
        ),
    ],
    ids=str,
)
def test_long_lists_of_queries_are_added_up_in_parts(
    case: Case, chunk: int, short: int | None
) -> None:
    with settings(chunk=chunk, short=short):
        assert_parity(case, "selected")


@pytest.mark.parametrize(
    ("case", "step"),
    [
        (Case(NSASpec(2, 1, 1, 2, 0, 1, 7), (129,), **ONE_HEAD), 64),  # 128 blocks at a time
        (Case(NSASpec(4, 2, 4, 2, 0, 1, 7), (*(i % 4 for i in range(20)), 35), **ONE_HEAD), 1),
    ],
    ids=["many blocks", "many documents"],
)
def test_lists_may_take_several_steps(
    case: Case, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block lists its queries; a tile lists its blocks, with their queries as bits."""
    monkeypatch.setattr(selected, "STEP", step)
    with settings(**DENSE):
        assert_parity(case, "selected")


def test_lists_take_three_launches_and_no_other_kernel() -> None:
    """On `meta` tensors, where reading a value would raise."""
    index = torch.empty(8, 2048, 2, 16, dtype=torch.int32, device="meta")
    with recording() as launches, Calls() as recorded:
        selected.queries_by_block(index, None, NSASpec())
    assert [launch.kernel.fn.__name__ for launch in launches] == [
        "members_kernel", "totals_kernel", "lists_kernel",
    ]  # fmt: skip
    assert set(recorded.names) == {"new_empty"}
