"""Parity of every branch with `reference`, forward and backward, for any sizes and documents."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from nsa.ops import nsa_attention, window_attention
from nsa.ops.inputs import AttentionInputs
from nsa.ops.triton.band import band_backward, band_forward
from nsa.spec import NSASpec
from tests.ops.cases import Case, branches, default, random_cases, with_gradients
from tests.ops.triton.parity import (
    BRANCHES,
    DENSE,
    DEVICE,
    GATHERED,
    RULE,
    assert_exact_enough,
    assert_parity,
    inputs,
    settings,
)

# A GPU compiles for every pattern and size, so it gets fewer.
RANDOM = random_cases(14 if DEVICE.type == "cpu" else 7, longest=24, seed=1)
SMALL = NSASpec(8, 4, 8, 3, 1, 1, 16)
ONE_HEAD = {"kv_heads": 1, "group": 1}
DESIGNED = [
    Case(SMALL, (19,), kv_heads=1, group=2, key_dim=192, value_dim=128),
    Case(SMALL, (33,), batch=2, group=3, key_dim=16, value_dim=32),
    Case(NSASpec(4, 2, 8, 2, 0, 1, 7), (0, 21, 1, 0, 2, 30, 1), group=2),
    Case(NSASpec(5, 5, 4, 1, 0, 1, 1), (1, 1), **ONE_HEAD),
    Case(SMALL, (1,), group=6),
    Case(SMALL, (7,), group=4),
    Case(SMALL, (9,), kv_heads=1, group=40),
    Case(NSASpec(4, 4, 2, 19, 1, 2, 90), (61,), **ONE_HEAD),
    Case(NSASpec(2, 1, 2, 2, 0, 1, 2), (*(i % 3 for i in range(70)), 9), **ONE_HEAD),
]
HEAD_SIZES = [
    Case(SMALL, (37,), **ONE_HEAD, key_dim=key, value_dim=value)
    for key, value in ((6, 24), (24, 6), (32, 96), (96, 16), (128, 256), (256, 64))
]
DEFAULT = default(7, RANDOM) + default(8, DESIGNED) + default(2, HEAD_SIZES)
branches_of_all = pytest.mark.parametrize("branch", BRANCHES)


@branches_of_all
@pytest.mark.parametrize("case", DEFAULT, ids=str)
def test_outputs_lse_and_gradients_are_those_of_the_definition(case: Case, branch: str) -> None:
    assert_parity(case, branch)


def test_more_documents_than_one_load_of_offsets_holds() -> None:
    assert_parity(DESIGNED[-1], "compressed")


@pytest.mark.parametrize("queries_per_split", [None, 7], ids=["one split", "splits"])
def test_compressed_keys_beyond_the_last_document_get_zero_gradients(
    queries_per_split: int | None,
) -> None:
    """With cu_seqlens on a device nothing counts them, so the launcher gets them here directly."""
    case, surplus = DESIGNED[2], 5
    x, cu = inputs(case), case.offsets_on(DEVICE)
    results = []
    for rows in (0, surplus):
        k, v = (F.pad(y, (0, 0, 0, 0, 0, rows), value=torch.nan) for y in (x.k_cmp, x.v_cmp))
        call = AttentionInputs(x.q, k, v, None, cu, "compressed", case.spec, case.scale)
        with settings(queries_per_split=queries_per_split):
            o, lse = band_forward(call)
            results.append([o, *band_backward(o.cos(), torch.ones_like(lse), call, o, lse)])
    for exact, padded in zip(*results, strict=True):
        assert torch.equal(padded[:, : exact.shape[1]], exact)
        assert not padded[:, exact.shape[1] :].any()  # NaN is true


def test_another_scale_and_64_bit_offsets() -> None:
    case = Case(NSASpec(4, 2, 4, 2, 0, 1, 5), (3, 16), kv_heads=1)
    x, cu = inputs(case), torch.tensor(case.offsets, device=DEVICE)
    assert cu.dtype == torch.int64
    assert_exact_enough(
        *(
            with_gradients(
                lambda *y, b=backend: nsa_attention(
                    *y, case.spec, scale=0.3, cu_seqlens=cu, backend=b
                ),
                x.to(dtype).tensors(),
            )
            for backend, dtype in RULE
        )
    )


@pytest.mark.parametrize("tiling", [GATHERED, DENSE], ids=["gathered", "dense"])
@pytest.mark.parametrize("lengths", default(1, [(1, 20, 0, 15), (40,)]), ids=str)
def test_any_block_index_is_valid(lengths: tuple[int, ...], tiling: dict[str, int]) -> None:
    """Rows without blocks, with one twice, or with blocks of the future.

    With parts of two queries, so that naming blocks again would make lists longer than there are
    queries.
    """
    case = Case(NSASpec(4, 2, 4, 3, 1, 1, 5), lengths, kv_heads=2, group=3)
    draw = torch.Generator().manual_seed(3)
    shape = (1, case.seq_len, case.kv_heads, 3)
    index = torch.randint(-1, 11, shape, generator=draw, dtype=torch.int32)
    index[:, 1::5] = 0
    index[:, 2::6] = index[:, 2::6, :, [0]]
    index[:, 3::6, :, 2] = index[:, 3::6, :, 0]
    index[:, 4::11] = 10
    index[:, ::7] = -1
    index = index.to(DEVICE)
    x = inputs(case)
    with settings(**tiling, chunk=2):
        actual, usual, exact = (
            with_gradients(*branches(x.to(dtype), case, index, backend)["selected"])
            for backend, dtype in RULE
        )
    assert_exact_enough(actual, usual, exact)
    o = actual[0]
    assert torch.equal(o[:, ::7], torch.zeros_like(o[:, ::7]))


def test_scores_far_below_zero_still_weigh_their_values() -> None:
    """exp of each of them is 0 in float32; their softmax is not."""
    q, v = (
        torch.full((1, 7, 1, 16), 20.0),
        torch.arange(7.0).view(1, 7, 1, 1).expand(-1, -1, -1, 16),
    )
    o = window_attention(*(x.to(DEVICE) for x in (q, -q, v)), 3, backend="triton")
    expected = torch.tensor([0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0]).view_as(v[..., :1]).expand_as(v)
    torch.testing.assert_close(o.cpu(), expected)
