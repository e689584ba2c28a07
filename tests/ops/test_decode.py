"""Decoding one token from buffers, in PyTorch and in kernels, against the full sequence."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nsa.constants import BRANCHES
from nsa.model.config import SUBSETS
from nsa.ops.inputs import DecodeInputs
from nsa.ops.triton import decode
from nsa.spec import NSASpec
from tests.kernel_launches import Launch, recording
from tests.ops import decoding
from tests.ops.cases import Case, Inputs, check_calls, default, random_spec
from tests.ops.decoding import buffers, by_own_queries, decoded, defined, defined_by_own_queries
from tests.ops.triton.parity import DEVICE, assert_exact_enough, by_head

SPEC = NSASpec(4, 2, 5, 3, 1, 1, 7)
LENGTHS = (1, 61, 3, 26)
SMALL = Case(SPEC, LENGTHS, group=3, key_dim=6, value_dim=4)
# Sizes that divide one another or not; groups of any size.
PATTERNS = {
    "small": SMALL,
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
SIZES = ("parts", "score_stride", "blocks")  # of buffers, by the name that kernels give them
backends = pytest.mark.parametrize("backend", ["blockwise", "triton"])


@pytest.fixture(autouse=True)
def small_parts() -> Iterator[None]:
    """Several parts to join and several tiles per part, on sequences short enough to interpret."""
    with mock.patch.multiple(decode, PART=24, BLOCKS=16, ELEMENTS=32):
        yield


@cache
def sequences(
    case: Case, backend: str = "triton", dtype: torch.dtype | None = None
) -> list[Inputs]:
    """In float64 for PyTorch, and in float32 for kernels."""
    dtype = dtype or (torch.float64 if backend == "blockwise" else torch.float32)
    return [x.to(DEVICE) for x in decoding.sequences(case, dtype)]


@cache
def small_batch() -> Tensor:
    return decoded(SMALL, buffers(SMALL, sequences(SMALL)), backend="triton")


def assert_right(
    o: Tensor, definition: Callable[[Sequence[Inputs]], Tensor], full: Sequence[Inputs]
) -> None:
    exact = definition([y.to(torch.float64) for y in full])
    if o.dtype == torch.float64:
        torch.testing.assert_close(o, exact, rtol=0, atol=1e-12)
    else:
        assert_exact_enough([o], [definition(full)], [exact])


def assert_is_the_last_position(
    case: Case,
    backend: str,
    full: Sequence[Inputs] | None = None,
    names: Sequence[str] = BRANCHES,
    **buffered: Any,
) -> None:
    full = full or sequences(case, backend)
    o = decoded(case, buffers(case, full, **buffered), names, backend=backend)
    assert_right(o, lambda x: defined(case, x, names), full)


def assert_own_queries_rank(case: Case, backend: str, **buffered: Any) -> None:
    full = sequences(case, backend)
    o = by_own_queries(case, buffers(case, full, **buffered), backend=backend)
    assert_right(o, lambda x: defined_by_own_queries(case, x), full)


@backends
@pytest.mark.parametrize("name", PATTERNS)
def test_a_decoded_token_is_the_last_position_of_its_full_sequence(name: str, backend: str) -> None:
    assert_is_the_last_position(PATTERNS[name], backend)
    assert_own_queries_rank(PATTERNS[name], backend)


def test_outputs_of_branches_are_rounded_before_their_gates_mix_them() -> None:
    """As in nsa_attention, so that a token is the same whether it is decoded or prefilled."""
    x = buffers(SMALL, sequences(SMALL, "blockwise", torch.bfloat16))
    alone = (decoded(SMALL, x, [name], "blockwise", gates=None) for name in BRANCHES)
    mixed = sum(gate[..., None] * o for gate, o in zip(x.gates.unbind(-1), alone, strict=True))
    assert torch.equal(decoded(SMALL, x, backend="blockwise"), mixed)


@pytest.mark.parametrize("seed", default(25, range(40)))
def test_any_pattern_length_and_capacity_give_the_last_position(seed: int) -> None:
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
    buffered = {"spare": draw.choice([0, 1, 20]), "ring": draw.choice([None, 70, 2 * spec.window])}
    assert_is_the_last_position(case, "blockwise", **buffered)
    assert_own_queries_rank(case, "blockwise", **buffered)


@backends
@pytest.mark.parametrize("branches", SUBSETS[1:])
def test_a_subset_of_branches_reads_only_their_buffers(branches: str, backend: str) -> None:
    assert_is_the_last_position(SMALL, backend, names=branches.split("+"))


@pytest.mark.parametrize(("lengths", "ring"), [((4, 31, 50), 64), ((1, 8, 5), 8)], ids=str)
def test_a_ring_may_be_larger_or_while_no_sequence_fills_it_smaller_than_the_window(
    lengths: tuple[int, ...], ring: int
) -> None:
    case = Case(replace(SPEC, window=30), lengths, kv_heads=1, value_dim=3)
    assert_is_the_last_position(case, "triton", names=["win"], ring=ring)


@backends
def test_ties_go_to_the_lower_block(backend: str) -> None:
    """Every compressed key is the same; NaN stands where no selected block is."""
    case = Case(NSASpec(4, 4, 4, 4, 1, 1, 3), (61, 64))
    full = [replace(x, k_cmp=torch.zeros_like(x.k_cmp)) for x in sequences(case, backend)]
    assert_is_the_last_position(case, backend, full)
    x = buffers(case, full)
    before = decoded(case, x, backend=backend)
    x.v_sel[:, 12:60] = torch.nan  # all but blocks 0, 1, 2 and the query's own
    assert torch.equal(decoded(case, x, backend=backend), before)


def test_a_sequence_gives_the_same_bits_in_any_batch_and_capacity() -> None:
    full = sequences(SMALL)
    for i, length in list(enumerate(LENGTHS))[1::2]:
        alone = replace(SMALL, lengths=(length,))
        x = buffers(alone, full[i : i + 1], spare=100)
        assert torch.equal(decoded(alone, x, backend="triton"), small_batch()[i : i + 1])


@backends
def test_a_sequence_of_length_0_gives_zeros(backend: str) -> None:
    x = buffers(SMALL, sequences(SMALL, backend))
    expected, lengths = decoded(SMALL, x, backend=backend), torch.tensor((1, 0, 3, 26))
    expected[1] = 0
    assert torch.equal(decoded(SMALL, x, lengths=lengths.to(DEVICE), backend=backend), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's warnings of NaN
def test_a_nan_query_selects_blocks_inside_its_own_sequence() -> None:
    x = buffers(SMALL, sequences(SMALL))
    x.q[1, 0, 0] = torch.nan
    with recording(dry=False) as launches:
        o = decoded(SMALL, x, backend="triton")
    (index,) = {id(y): y for x in launches if (y := x.arguments.get("index")) is not None}.values()
    assert sorted(index[1, 0].tolist()) == [0, 1, 12]
    assert o[1, 0].isnan().all()
    others = [0, 2, 3]
    assert torch.equal(o[others], small_batch()[others])


@pytest.mark.parametrize(("name", "factor"), [("one head each", 100), ("stride 1", 5)])
def test_logits_may_be_large(name: str, factor: float) -> None:
    """If attention is sharp enough, which head sees a block decides whether it is selected."""
    case = PATTERNS[name]
    full = [replace(x, q=factor * x.q) for x in sequences(case)]
    assert_is_the_last_position(case, "triton", full)


def loses_what_pytorch_loses(case: Case, dtype: torch.dtype) -> None:
    x = buffers(case, sequences(case, dtype=dtype))
    exact = decoded(case, x.to(torch.float64), backend="blockwise")
    o, plain = (decoded(case, x, backend=backend) for backend in ("triton", "blockwise"))
    assert_exact_enough([o], [plain], [exact])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_loses_what_pytorch_loses_in_it(dtype: torch.dtype) -> None:
    case = Case(SPEC, (61, 3), kv_heads=1, key_dim=16, value_dim=16)
    loses_what_pytorch_loses(case, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_loses_no_more_than_the_parallel_pass(dtype: torch.dtype) -> None:
    spec = NSASpec(8, 4, 16, 40, 1, 2, 24)  # every block is selected, whatever the rounding
    case = Case(spec, (5, 77, 130), key_dim=6, value_dim=5)
    full = sequences(case, dtype=dtype)
    exact = defined(case, [x.to(torch.float64) for x in full])
    o = decoded(case, buffers(case, full))
    parallel, lost = ((x.double() - exact).abs().max() for x in (defined(case, full), o))
    assert lost <= 1.5 * parallel
    assert o.dtype == dtype


def of_larger(x: Tensor) -> Tensor:
    """The first rows of each sequence's buffer, as of a cache that is longer."""
    return torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, : x.shape[1]]


@pytest.mark.parametrize("layout", [by_head, of_larger])
def test_buffers_need_not_be_contiguous(layout: Callable[[Tensor], Tensor]) -> None:
    x = Inputs(*(layout(y) for y in buffers(SMALL, sequences(SMALL)).tensors()))
    with recording(dry=False) as launches:
        assert torch.equal(decoded(SMALL, x, backend="triton"), small_batch())
    read = {y.data_ptr() for z in launches for y in z.arguments.values() if isinstance(y, Tensor)}
    copied = x.k_sel.data_ptr() not in read
    assert copied == (layout is by_head), "a step that copies a longer cache reads all of it"


def test_launches_depend_on_the_capacity_and_read_no_length() -> None:
    """On `meta` tensors reading a value would raise; so a step can be captured as a CUDA graph."""
    x = buffers(SMALL, sequences(SMALL)).to("meta")
    lengths = torch.empty(len(LENGTHS), dtype=torch.int64, device="meta")

    def launched(spec: NSASpec, branches: str) -> list[Launch]:
        with recording() as launches:
            decode.decode_forward(
                DecodeInputs(x.q, None, *x.tensors()[1:], lengths, spec, branches, 0.5)
            )
        return launches

    def names(launches: list[Launch]) -> list[str]:
        return [launch.kernel.fn.__name__.split("_")[1] for launch in launches]

    launches = launched(SPEC, "+".join(BRANCHES))
    assert names(launches) == ["compressed", "importance", "rank", "parts", "mix"]
    assert launches[0].grid == (-(-x.k_cmp.shape[1] // 24), 2, len(LENGTHS))
    assert launches[3].grid == (SPEC.select_top + 1, 2, len(LENGTHS))
    sizes = [x.arguments[name] for x in launches for name in SIZES if name in x.arguments]
    assert not any(size % 16 for size in sizes), "each other size would compile again"
    all_blocks = replace(SPEC, select_top=99)
    assert names(launched(all_blocks, "+".join(BRANCHES))) == ["compressed", "parts", "mix"]
    assert names(launched(all_blocks, "sel")) == ["parts", "mix"]


@torch.no_grad()
def test_the_op_matches_its_declaration_with_and_without_each_branch() -> None:
    case = replace(SMALL, lengths=(30, 2), group=1, kv_heads=1)
    x = buffers(case, sequences(case))
    for names in (BRANCHES, ("sel",)):
        check_calls(lambda names=names: decoded(case, x, names, backend="triton"))
    check_calls(lambda: by_own_queries(case, x, backend="triton"))


def test_a_backend_that_cannot_decode_is_refused() -> None:
    x = buffers(SMALL, sequences(SMALL, "blockwise"))
    for name, message in (("fast", "choose one of auto"), ("triton", "does not support decode_")):
        with pytest.raises(ValueError, match=rf"^backend = '{name}'.* {message}"):
            decoded(SMALL, x, backend=name)
    wide = buffers(case := replace(SMALL, value_dim=257), sequences(case))
    with pytest.raises(ValueError, match="decode_attention: a head is larger than 256"):
        decoded(case, wide, backend="triton")


def test_a_backend_by_name_gives_the_same() -> None:
    x = buffers(SMALL, sequences(SMALL, "blockwise"))
    for name in ("reference", "blockwise"):
        assert torch.equal(decoded(SMALL, x, backend=name), decoded(SMALL, x))
