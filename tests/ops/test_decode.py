"""Decoding one token from buffers, against `nsa_attention` over the full sequence."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.model.config import SUBSETS
from nsa.spec import NSASpec
from tests.ops.cases import Case, Inputs, random_spec
from tests.ops.decoding import (
    buffers,
    by_own_queries,
    decoded,
    defined,
    defined_by_own_queries,
    sequences,
)

SMALL = Case(NSASpec(4, 2, 4, 3, 1, 1, 6), (9, 4), key_dim=6, value_dim=5)


def random_case(seed: int) -> tuple[Case, list[Inputs], Inputs]:
    """Sequences of several lengths, in full and as a cache of any capacity."""
    draw = random.Random(seed)
    spec = random_spec(draw)
    case = Case(
        spec,
        (1, spec.block_len, *(draw.randint(1, 70) for _ in range(3))),
        kv_heads=draw.choice([1, 2, 3]),
        group=draw.choice([1, 2, 3, 4, 6]),
        key_dim=draw.choice([2, 8]),
        value_dim=draw.choice([1, 5]),
        seed=seed,
    )
    spare, ring = draw.choice([0, 1, 20]), draw.choice([None, 70, 2 * spec.window])
    full = sequences(case, torch.float64)
    return case, full, buffers(case, full, spare, ring)


def exactly(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_queries_of_their_own_rank_the_blocks_of_a_decoded_token(seed: int) -> None:
    case, full, x = random_case(seed)
    exactly(by_own_queries(case, x), defined_by_own_queries(case, full))


def test_ranking_queries_need_the_selected_branch_alone_and_a_head_per_kv_head() -> None:
    x = buffers(SMALL, sequences(SMALL, torch.float64))
    with pytest.raises(ValueError, match=r"q_cmp has shape \(2, 4, 6\); it must be \(2, 2, 6\)"):
        by_own_queries(SMALL, x, q_cmp=x.q)
    with pytest.raises(ValueError, match="q_cmp: ranks blocks of the branch sel alone"):
        decoded(SMALL, x, q_cmp=x.q[:, :2])
    with pytest.raises(ValueError, match=r"gates = None: branches = .* are mixed by gates"):
        decoded(SMALL, x, gates=None)


@pytest.mark.parametrize("seed", range(40))
def test_a_decoded_token_is_the_last_of_the_full_sequence(seed: int) -> None:
    case, full, x = random_case(seed)
    exactly(decoded(case, x), defined(case, full))


def test_tokens_at_many_positions_of_a_small_version_of_the_papers_pattern() -> None:
    case = Case(NSASpec(8, 4, 16, 4, 1, 2, 24), tuple(range(1, 131, 3)), kv_heads=1, group=6)
    full = sequences(case, torch.float64)
    exactly(decoded(case, buffers(case, full)), defined(case, full))


@pytest.mark.parametrize("branches", SUBSETS[1:])
def test_a_subset_of_branches_reads_only_their_buffers(branches: str) -> None:
    case, full, x = random_case(3)
    names = tuple(branches.split("+"))
    exactly(decoded(case, x, names), defined(case, full, names))


def test_ties_go_to_the_lower_block() -> None:
    case = Case(NSASpec(4, 4, 4, 4, 1, 1, 3), (61, 64))
    full = [replace(x, k_cmp=torch.zeros_like(x.k_cmp)) for x in sequences(case, torch.float64)]
    x, expected = buffers(case, full), defined(case, full)
    exactly(decoded(case, x), expected)
    x.v_sel[:, 12:60] = torch.nan  # all but blocks 0, 1, 2 and the query's own
    exactly(decoded(case, x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_loses_no_more_than_the_parallel_pass(dtype: torch.dtype) -> None:
    spec = NSASpec(8, 4, 16, 40, 1, 2, 24)  # every block is selected, whatever the rounding
    case = Case(spec, (5, 77, 130), key_dim=6, value_dim=5)
    full = sequences(case, dtype)
    exact = defined(case, [x.to(torch.float64) for x in full])
    o = decoded(case, buffers(case, full))
    parallel, lost = ((x.double() - exact).abs().max() for x in (defined(case, full), o))
    assert lost <= 1.5 * parallel
    assert o.dtype == dtype


class HostSyncs(TorchDispatchMode):
    """Record the operations that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name().removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))

    @property
    def syncs(self) -> set[str]:
        syncing = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "item"}
        return syncing & set(self.counts)


def test_decoding_makes_no_host_sync() -> None:
    case, _, x = random_case(1)
    lengths = torch.tensor(case.lengths)
    with HostSyncs() as mode:
        decoded(case, x, lengths=lengths)
    assert not mode.syncs


WRONG = {
    r"^branches = \('cmp', 'sel', 'win'\): pass k_win and v_win$": {"k_win": None},
    r"^k_cmp = None: the selected branch needs it; pass k_cmp$": {
        "k_cmp": None,
        "names": ("sel",),
    },
    r"^gates has shape \(2, 4, 2\); it must be \(2, 4, 3\)": {"gates": torch.ones(2, 4, 2)},
    r"^lengths is torch.int32 \(2,\); it must be int64 \[2\]$": {
        "lengths": torch.ones(2, dtype=torch.int32)
    },
    r"^v_sel is torch.float32": {"v_sel": torch.zeros(2, 14, 2, 5)},
    r"^backend = 'fast': choose one of auto": {"backend": "fast"},
    r"^backend = 'triton' does not support decode_attention: ": {"backend": "triton"},
}


@pytest.mark.parametrize("message", WRONG)
def test_an_error_names_the_wrong_argument(message: str) -> None:
    x = buffers(SMALL, sequences(SMALL, torch.float64))
    with pytest.raises(ValueError, match=message):
        decoded(SMALL, x, **WRONG[message])


def test_a_backend_by_name_gives_the_same() -> None:
    x = buffers(SMALL, sequences(SMALL, torch.float64))
    for name in ("reference", "blockwise"):
        assert torch.equal(decoded(SMALL, x, backend=name), decoded(SMALL, x))
