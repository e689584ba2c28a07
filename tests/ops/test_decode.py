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

from nsa.ops import (
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.ops.decode import decode_attention
from nsa.spec import NSASpec
from tests.ops.cases import one_thread, random_spec

__all__ = ["one_thread"]
NAN = float("nan")


class Sequences:
    """Random sequences of several lengths, in full and as the buffers of a cache.

    Buffers are NaN after a sequence's length.
    """

    def __init__(
        self,
        spec: NSASpec,
        lengths: list[int],
        *,
        kv_heads: int = 2,
        group: int = 2,
        key_dim: int = 6,
        value_dim: int = 5,
        spare: int = 3,
        ring: int | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

        self.spec, self.lengths = spec, torch.tensor(lengths)
        longest, heads, batch = max(lengths), kv_heads * group, len(lengths)
        blocks = spec.compressed_len(longest)
        self.q = normal(batch, longest, heads, key_dim)
        self.gates = normal(batch, longest, heads, 3).sigmoid()
        self.full = {
            f"{kind}_{branch}": normal(batch, count, kv_heads, size)
            for branch, count in (("cmp", blocks), ("sel", longest), ("win", longest))
            for kind, size in (("k", key_dim), ("v", value_dim))
        }
        ring = ring or spec.window
        self.buffers = {}
        for name, x in self.full.items():
            size = ring if name[2:] == "win" else x.shape[1] + spare
            buffer = x.new_full((batch, size, *x.shape[2:]), NAN)
            for row, length in enumerate(lengths):
                count = spec.compressed_len(length) if name[2:] == "cmp" else length
                for position in range(count):  # in a ring later ones overwrite earlier ones
                    buffer[row, position % size] = x[row, position]
            self.buffers[name] = buffer

    def decoded(self, branches: tuple[str, ...] = ("cmp", "sel", "win"), **changes: Any) -> Tensor:
        rows = torch.arange(len(self.lengths))
        gate_index = [["cmp", "sel", "win"].index(name) for name in branches]
        given = {
            "q": self.q[rows, self.lengths - 1],
            **self.buffers,
            "gates": self.gates[rows, self.lengths - 1][..., gate_index],
            "lengths": self.lengths,
        }
        return decode_attention(**(given | changes), spec=self.spec, branches=branches)

    def by_own_queries(self, **changes: Any) -> Tensor:
        """The selected branch without gates, whose blocks the first heads of q rank."""
        rows = torch.arange(len(self.lengths))
        heads = self.full["k_cmp"].shape[2]
        given = {
            "q": self.q[rows, self.lengths - 1],
            "q_cmp": self.q[rows, self.lengths - 1, :heads],
            **self.buffers,
            **dict.fromkeys(("v_cmp", "k_win", "v_win", "gates")),
            "lengths": self.lengths,
        }
        return decode_attention(**(given | changes), spec=self.spec, branches=("sel",))

    def expected_by_own_queries(self) -> Tensor:
        """The same, from the full sequences by the definition."""
        outputs = []
        for row in range(len(self.lengths)):
            x = self.sequence(row)
            queries = x["q"][:, :, : x["k_cmp"].shape[2]]
            index = select_blocks(queries, x["k_cmp"], None, self.spec, backend="reference")
            pair = x["k_sel"], x["v_sel"]
            o = selected_attention(x["q"], *pair, index, self.spec, backend="reference")
            outputs.append(o[0, -1])
        return torch.stack(outputs)

    def sequence(self, row: int) -> dict[str, Tensor]:
        """One sequence, up to its length."""
        length = int(self.lengths[row])
        blocks = self.spec.compressed_len(length)
        full = {
            name: x[row : row + 1, : blocks if name[2:] == "cmp" else length]
            for name, x in self.full.items()
        }
        return {"q": self.q[row : row + 1, :length], **full}

    def expected(self) -> Tensor:
        outputs = []
        for row, length in enumerate(self.lengths.tolist()):
            gates = self.gates[row : row + 1, :length]
            o = nsa_attention(
                **self.sequence(row), gates=gates, spec=self.spec, backend="reference"
            )
            outputs.append(o[0, -1])
        return torch.stack(outputs)


@pytest.mark.parametrize("seed", range(12))
def test_queries_of_their_own_rank_the_blocks_of_a_decoded_token(seed: int) -> None:
    x = random_sequences(seed)
    torch.testing.assert_close(x.by_own_queries(), x.expected_by_own_queries())


def test_ranking_queries_need_the_selected_branch_alone_and_a_head_per_kv_head() -> None:
    x = Sequences(NSASpec(4, 2, 4, 3, 1, 1, 6), [30, 7])
    with pytest.raises(ValueError, match=r"q_cmp has shape \(2, 4, 6\); it must be \(2, 2, 6\)"):
        x.by_own_queries(q_cmp=x.q[:, 0])
    with pytest.raises(ValueError, match="q_cmp: ranks blocks of the branch sel alone"):
        x.decoded(q_cmp=x.q[:, 0, :2])
    with pytest.raises(ValueError, match=r"gates = None: branches = .* are mixed by gates"):
        x.decoded(gates=None)


def random_sequences(seed: int) -> Sequences:
    draw = random.Random(seed)
    spec = random_spec(draw)
    return Sequences(
        spec,
        [1, spec.block_len, *(draw.randint(1, 70) for _ in range(3))],
        kv_heads=draw.choice([1, 2, 3]),
        group=draw.choice([1, 2, 3, 4, 6]),
        key_dim=draw.choice([2, 8]),
        value_dim=draw.choice([1, 5]),
        spare=draw.choice([0, 1, 20]),
        ring=draw.choice([None, 70, 2 * spec.window]),
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_decoded_token_is_the_last_of_the_full_sequence(seed: int) -> None:
    sequences = random_sequences(seed)
    expected = sequences.expected()
    torch.testing.assert_close(sequences.decoded(), expected, rtol=0, atol=1e-12)


def test_tokens_at_many_positions_of_a_small_version_of_the_papers_pattern() -> None:
    spec = NSASpec(8, 4, 16, 4, 1, 2, 24)
    sequences = Sequences(spec, list(range(1, 131, 3)), kv_heads=1, group=6)
    torch.testing.assert_close(sequences.decoded(), sequences.expected(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("branches", ["cmp", "sel", "win", "cmp+sel", "cmp+win", "sel+win"])
def test_a_subset_of_branches_reads_only_their_buffers(branches: str) -> None:
    sequences = random_sequences(3)
    names = tuple(branches.split("+"))
    needed = {name for name in sequences.buffers if name[2:] in names}
    needed |= {"k_cmp"} if "sel" in names else set()
    without = {name: None for name in sequences.buffers if name not in needed}
    actual = sequences.decoded(names, **without)
    for row, length in enumerate(sequences.lengths.tolist()):
        at, spec = sequences.sequence(row), sequences.spec
        o_cmp, lse = compressed_attention(at["q"], at["k_cmp"], at["v_cmp"], spec)
        index = select_blocks(at["q"], at["k_cmp"], lse, spec)
        each = {
            "cmp": o_cmp,
            "sel": selected_attention(at["q"], at["k_sel"], at["v_sel"], index, spec),
            "win": window_attention(at["q"], at["k_win"], at["v_win"], spec.window),
        }
        gates = dict(zip(each, sequences.gates[row, length - 1].unbind(-1), strict=True))
        expected = sum(gates[name][:, None] * each[name][0, -1] for name in names)
        torch.testing.assert_close(actual[row], expected, rtol=0, atol=1e-12)


def test_ties_go_to_the_lower_block() -> None:
    spec = NSASpec(4, 4, 4, 4, 1, 1, 3)
    sequences = Sequences(spec, [61, 64])
    for keys in (sequences.full, sequences.buffers):
        keys["k_cmp"].nan_to_num_(0).zero_()  # every block ties
    expected = sequences.expected()
    torch.testing.assert_close(sequences.decoded(), expected, rtol=0, atol=1e-12)
    values = sequences.buffers["v_sel"]
    values[:, 12:60] = NAN  # all but blocks 0, 1, 2 and the query's own
    torch.testing.assert_close(sequences.decoded(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_loses_no_more_than_the_parallel_pass(dtype: torch.dtype) -> None:
    spec = NSASpec(8, 4, 16, 40, 1, 2, 24)  # every block is selected, whatever the rounding
    low = Sequences(spec, [5, 77, 130], dtype=dtype)
    high = Sequences(spec, [5, 77, 130])
    for name in ("q", "gates"):
        setattr(high, name, getattr(low, name).double())
    high.full = {name: x.double() for name, x in low.full.items()}
    exact = high.expected()
    parallel, decoded = ((x.double() - exact).abs().max() for x in (low.expected(), low.decoded()))
    assert decoded <= 1.5 * parallel
    assert low.decoded().dtype == dtype


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
    sequences = random_sequences(1)
    with HostSyncs() as mode:
        sequences.decoded()
    assert not mode.syncs
    with HostSyncs() as mode:
        torch.ones(1).item()
    assert mode.syncs


WRONG = {
    r"^branches = \('cmp', 'sel', 'win'\): pass k_win and v_win$": {"k_win": None},
    r"^k_cmp = None: the selected branch needs it; pass k_cmp$": {
        "k_cmp": None,
        "branches": ("sel",),
    },
    r"^gates has shape \(2, 4, 2\); it must be \(2, 4, 3\)": {"gates": torch.ones(2, 4, 2)},
    r"^lengths is torch.int32 \(2,\); it must be int64 \[2\]$": {
        "lengths": torch.ones(2, dtype=torch.int32)
    },
    r"^v_sel is torch.float32": {"v_sel": torch.zeros(2, 9, 2, 5)},
    r"^backend = 'fast': choose one of auto": {"backend": "fast"},
}


@pytest.mark.parametrize("message", WRONG)
def test_an_error_names_the_wrong_argument(message: str) -> None:
    sequences = Sequences(NSASpec(4, 2, 4, 3, 1, 1, 6), [9, 4])
    wrong = dict(WRONG[message])
    with pytest.raises(ValueError, match=message):
        sequences.decoded(wrong.pop("branches", ("cmp", "sel", "win")), **wrong)


def test_a_backend_by_name_runs_or_raises_with_the_reason() -> None:
    sequences = Sequences(replace(NSASpec(), window=8), [9])
    for name in ("reference", "blockwise"):
        assert torch.equal(sequences.decoded(backend=name), sequences.decoded())
    with pytest.raises(
        ValueError, match=r"^backend = 'triton' does not support decode_attention: "
    ):
        sequences.decoded(backend="triton")
