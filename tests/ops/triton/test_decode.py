"""Decoding kernels: a token decoded from a cache equals the full sequence's last position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nsa.constants import BRANCHES
from nsa.model import AttentionConfig, LanguageModel, ModelConfig
from nsa.model.config import SUBSETS
from nsa.model.decode import prefill, step
from nsa.ops.decode import decode_attention
from nsa.ops.triton import decode
from nsa.ops.triton.launch import recording
from nsa.spec import NSASpec
from tests.ops import decoding
from tests.ops.cases import Case, Inputs
from tests.ops.decoding import buffers, by_own_queries, defined, defined_by_own_queries
from tests.ops.triton.parity import DEVICE, FLOOR, assert_exact_enough
from tests.ops.triton.test_addresses import far_apart
from tests.ops.triton.test_addresses import memory as memory

SPEC = NSASpec(4, 2, 5, 3, 1, 1, 7)
LENGTHS = (1, 61, 3, 26)
# Sizes that divide one another or not; groups of any size.
PATTERNS = {
    "small": Case(SPEC, LENGTHS, group=3, key_dim=6, value_dim=4),
    "one head each": Case(NSASpec(3, 3, 4, 3, 0, 1, 5), (50, 2), group=1, value_dim=3),
    "stride 1": Case(NSASpec(3, 1, 5, 2, 0, 1, 40), (70, 9), kv_heads=1, group=2),
    "wide blocks": Case(NSASpec(20, 2, 2, 4, 0, 2, 5), (113, 19), kv_heads=1, group=6),
    "compressed blocks longer than selection blocks": Case(
        NSASpec(9, 7, 5, 7, 2, 1, 9), (80, 36), kv_heads=1
    ),
    "long selection blocks": Case(NSASpec(2, 1, 40, 2, 0, 1, 17), (150, 41), kv_heads=1, group=2),
    "a group of more than 16": Case(NSASpec(4, 4, 4, 3, 0, 2, 5), (47,), group=20, key_dim=16),
    "the window is the token itself": Case(NSASpec(4, 4, 4, 2, 1, 1, 1), (33, 5)),
    "all blocks selected": Case(NSASpec(4, 2, 4, 16, 1, 2, 8), (40, 64), kv_heads=1, group=2),
    "the paper's": Case(NSASpec(select_top=4), (620, 31), kv_heads=1, group=4, key_dim=16),
}


@pytest.fixture(autouse=True)
def small_parts() -> Iterator[None]:
    """Several parts to join and several tiles per part, on sequences short enough to interpret."""
    with mock.patch.multiple(decode, PART=24, BLOCKS=16, ELEMENTS=32):
        yield


decoded = partial(decoding.decoded, backend="triton")


@cache
def sequences(case: Case, dtype: torch.dtype = torch.float32) -> list[Inputs]:
    return [x.to(DEVICE) for x in decoding.sequences(case, dtype)]


@cache
def small_batch() -> Tensor:
    case = PATTERNS["small"]
    return decoded(case, buffers(case, sequences(case)))


def assert_is_the_last_position(
    case: Case, x: Inputs, full: Sequence[Inputs], names: Sequence[str] = BRANCHES
) -> None:
    wide = [y.to(torch.float64) for y in full]
    usual, exact = (defined(case, rows, names) for rows in (full, wide))
    assert_exact_enough([decoded(case, x, names)], [usual], [exact])


@pytest.mark.parametrize("name", PATTERNS)
def test_a_decoded_token_is_the_last_position_of_its_full_sequence(name: str) -> None:
    case = PATTERNS[name]
    full = sequences(case)
    assert_is_the_last_position(case, buffers(case, full), full)


@pytest.mark.parametrize("branches", SUBSETS[1:])
def test_a_subset_of_branches_gives_their_sum(branches: str) -> None:
    case = PATTERNS["small"]
    full = sequences(case)
    assert_is_the_last_position(case, buffers(case, full), full, branches.split("+"))


@pytest.mark.parametrize("name", PATTERNS)
def test_queries_of_their_own_rank_the_blocks_of_a_decoded_token(name: str) -> None:
    case = PATTERNS[name]
    full = sequences(case)
    o = by_own_queries(case, buffers(case, full), backend="triton")
    usual, exact = (
        defined_by_own_queries(case, [x.to(dtype) for x in full])
        for dtype in (torch.float32, torch.float64)
    )
    assert_exact_enough([o], [usual], [exact])


def test_a_ring_may_be_larger_than_the_window() -> None:
    case = Case(replace(SPEC, window=30), (4, 31, 50), kv_heads=1, value_dim=3)
    full = sequences(case)
    exact, larger = (buffers(case, full, ring=ring) for ring in (30, 64))
    assert_is_the_last_position(case, larger, full, ["win"])
    assert torch.equal(decoded(case, larger, ["win"]), decoded(case, exact, ["win"]))


def test_a_ring_may_be_smaller_than_the_window_while_no_sequence_fills_it() -> None:
    case = Case(replace(SPEC, window=30), (1, 8, 5), kv_heads=1)
    full = sequences(case)
    assert_is_the_last_position(case, buffers(case, full, ring=8), full, ["win"])


def test_a_sequence_gives_the_same_bits_in_any_batch_and_capacity() -> None:
    case = PATTERNS["small"]
    full = sequences(case)
    for i, length in list(enumerate(LENGTHS))[1::2]:
        alone = replace(case, lengths=(length,))
        x = buffers(alone, full[i : i + 1], spare=100)
        assert torch.equal(decoded(alone, x), small_batch()[i : i + 1])


def test_a_sequence_of_length_0_gives_zeros() -> None:
    case = PATTERNS["small"]
    x = buffers(case, sequences(case))
    expected = small_batch().clone()
    expected[1] = 0
    lengths = torch.tensor((1, 0, 3, 26), device=DEVICE)
    assert torch.equal(decoded(case, x, lengths=lengths), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's warnings of NaN
def test_a_nan_query_selects_blocks_inside_its_own_sequence() -> None:
    case = PATTERNS["small"]
    x = buffers(case, sequences(case))
    x.q[1, 0, 0] = torch.nan
    with mock.patch.object(decode, "launch", wraps=decode.launch) as launched:
        o = decoded(case, x)
    (index,) = {x.kwargs["index"] for x in launched.mock_calls if "index" in x.kwargs}
    assert sorted(index[1, 0].tolist()) == [0, 1, 12]
    assert o[1, 0].isnan().all()
    others = [0, 2, 3]
    assert torch.equal(o[others], small_batch()[others])


def test_ties_go_to_the_lower_index() -> None:
    """Every compressed key is the same; the output's values show which blocks were selected."""
    case = Case(NSASpec(4, 4, 4, 4, 1, 1, 5), (140, 43), kv_heads=1, group=3)
    full = [replace(x) for x in sequences(case)]
    for x in full:
        x.k_cmp = x.k_cmp[:, :1].expand_as(x.k_cmp)
    assert_is_the_last_position(case, buffers(case, full), full, ["sel"])


def test_large_logits_neither_overflow_nor_underflow() -> None:
    case = PATTERNS["one head each"]
    full = [replace(x, q=100 * x.q) for x in sequences(case)]
    assert_is_the_last_position(case, buffers(case, full), full)


def loses_what_pytorch_loses(case: Case, dtype: torch.dtype) -> None:
    full = sequences(case, dtype)
    x, lengths = buffers(case, full), torch.tensor(case.lengths, device=DEVICE)
    plain = decode_attention(*x.tensors(), lengths, case.spec, backend="blockwise")
    wide = x.to(torch.float64)
    exact = decode_attention(*wide.tensors(), lengths, case.spec, backend="blockwise")
    lost, usual = (float((o.double() - exact).abs().max()) for o in (decoded(case, x), plain))
    assert lost <= 2 * usual + FLOOR


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_loses_what_pytorch_loses_in_it(dtype: torch.dtype) -> None:
    case = Case(SPEC, (61, 3), kv_heads=1, key_dim=16, value_dim=16)
    loses_what_pytorch_loses(case, dtype)


def test_offsets_may_exceed_32_bits(memory: Tensor) -> None:
    case = Case(SPEC, (61,), kv_heads=1, group=2, key_dim=4, value_dim=3)
    x = buffers(case, sequences(case), ring=20)
    names = [f"{kind}_{branch}" for branch in BRANCHES for kind in "kv"]
    far = {name: far_apart(getattr(x, name), memory, i) for i, name in enumerate(names)}
    assert torch.equal(decoded(case, replace(x, **far)), decoded(case, x))


def test_buffers_need_not_be_contiguous() -> None:
    case = PATTERNS["small"]
    x = buffers(case, sequences(case))
    by_head = Inputs(*(y.transpose(1, 2).contiguous().transpose(1, 2) for y in x.tensors()))
    assert torch.equal(decoded(case, by_head), small_batch())


def test_launches_depend_on_the_capacity_and_read_no_length() -> None:
    """On `meta` tensors reading a value would raise; so a step can be captured as a CUDA graph."""
    case = PATTERNS["small"]
    x = buffers(case, sequences(case)).to("meta")
    lengths = torch.empty(len(LENGTHS), dtype=torch.int64, device="meta")
    with recording() as launches:
        decode.decode_forward(
            decode.DecodeInputs(x.q, None, *x.tensors()[1:], lengths, SPEC, "+".join(BRANCHES), 0.5)
        )
    names = [launch.kernel.fn.__name__.split("_")[1] for launch in launches]
    assert names == ["compressed", "importance", "rank", "parts", "mix"]
    assert launches[0].grid == (-(-x.k_cmp.shape[1] // 24), 2, len(LENGTHS))
    assert launches[3].grid == (SPEC.select_top + 1, 2, len(LENGTHS))


def test_the_op_matches_its_declaration_with_and_without_each_branch() -> None:
    case = replace(PATTERNS["small"], lengths=(30, 2), group=1, kv_heads=1)
    q, *tensors, gates = buffers(case, sequences(case)).tensors()
    lengths, pattern = torch.tensor(case.lengths, device=DEVICE), SPEC.to_ints()
    tests = ("test_schema", "test_faketensor")
    for names, given, used_gates in (
        ("cmp+sel+win", [None, *tensors], gates),
        ("sel", [None, tensors[0], None, *tensors[2:4], None, None], gates[..., :1]),
        ("sel", [q, tensors[0], None, *tensors[2:4], None, None], None),
    ):
        arguments = (q, *given, used_gates, lengths, pattern, names, 0.5)
        torch.library.opcheck(decode.triton_decode, arguments, test_utils=tests)


@pytest.mark.parametrize("options", [{}, {"compressor": "mlp"}, {"branches": "sel+win"}], ids=str)
@torch.no_grad()
def test_a_model_decodes_as_with_pytorch(options: dict[str, Any]) -> None:
    """With the model's own cache: shared buffers, growing ones, blocks that get complete."""
    torch.manual_seed(0)
    attention = AttentionConfig(spec=SPEC, backend="blockwise", **options)
    config = ModelConfig(
        vocab_size=40, layers=1, width=16, heads=6, kv_heads=2, head_dim=4, value_dim=6,
        mlp_width=8, attention=attention,
    )  # fmt: skip
    model = LanguageModel(config)
    model.initialize(0.5)
    model.to(DEVICE)
    tokens = torch.randint(40, (2, 30), device=DEVICE)
    steps = []
    for backend in ("blockwise", "triton"):
        cache = prefill(model, [tokens[0, :23], tokens[1, :3]])[1]
        model.blocks[0].attention.backend = backend
        steps.append(torch.stack([step(model, tokens[:, i], cache) for i in range(3)]))
        model.blocks[0].attention.backend = "blockwise"
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-4, atol=1e-4)


REAL = {
    "M7C": Case(NSASpec(), (1, 1500, 9000, 16_384), kv_heads=2, group=6, key_dim=64, value_dim=64),
    "64/4/192/128": Case(NSASpec(), (700, 5000), kv_heads=4, group=16, key_dim=192, value_dim=128),
    "head size 256": Case(NSASpec(), (40, 3001), kv_heads=1, group=2, key_dim=256, value_dim=256),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in REAL), ("M7C", torch.float32)],
    ids=str,
)
def test_real_sizes_lose_what_pytorch_loses(name: str, dtype: torch.dtype) -> None:
    with mock.patch.multiple(decode, PART=128, BLOCKS=64, ELEMENTS=2048):
        loses_what_pytorch_loses(REAL[name], dtype)


@pytest.mark.gpu
def test_a_captured_step_is_right_for_other_tokens_and_lengths() -> None:
    case = REAL["M7C"]
    x = buffers(case, sequences(case, torch.bfloat16))
    lengths = torch.tensor(case.lengths, device=DEVICE)
    expected = decoded(case, x)
    given, counts = [y.clone() for y in x.tensors()], torch.ones_like(lengths)
    given[0].zero_()
    decode_attention(*given, counts, case.spec, backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = decode_attention(*given, counts, case.spec, backend="triton")
    given[0].copy_(x.q)
    counts.copy_(lengths)
    graph.replay()
    assert torch.equal(o, expected)
