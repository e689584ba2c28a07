"""The three branches and their gates as one operation, `nsa_attention`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa.ops import nsa_attention, nsa_attention_and_blocks
from nsa.ops.inputs import GatedInputs
from nsa.ops.triton.band import gated_backward, gated_forward, triton_gated
from nsa.ops.triton.configs import Config, override_choices
from nsa.ops.triton.launch import recording
from nsa.spec import NSASpec
from tests.ops.cases import (
    Calls,
    Case,
    Inputs,
    branches,
    default,
    random_cases,
    selection,
    with_gradients,
)
from tests.ops.triton.parity import (
    DEVICE,
    RULE,
    assert_exact_enough,
    assert_parity,
    computed,
    inputs,
    settings,
)

SPEC = NSASpec(4, 2, 4, 3, 1, 1, 6)
CASES = [
    Case(SPEC, (38,), batch=2, group=3, key_dim=6, value_dim=5),
    Case(SPEC, (3, 21, 0, 1, 16), kv_heads=1, group=6),
    Case(SPEC, (1,), group=2),
    Case(SPEC, (3,), group=1),
    *random_cases(6, longest=20, seed=3),
]


@pytest.mark.parametrize("case", default(4, CASES), ids=str)
def test_the_gated_sum_and_all_its_gradients_are_those_of_the_definition(case: Case) -> None:
    assert_parity(case, "mixed")


@pytest.mark.parametrize("case", default(1, CASES), ids=str)
@pytest.mark.parametrize("head", [0, 64], ids=["several tiles", "one tile"])
def test_compressed_keys_may_be_several_tiles_and_queries_several_splits(
    case: Case, head: int
) -> None:
    small = override_choices(lambda *_: Config(16, 16, 4, 1))
    with settings(one_tile_head=head, queries_per_split=7), small:
        assert_parity(case, "mixed")


def test_the_compressed_output_is_kept_only_where_the_backward_pass_reads_it() -> None:
    tensors = Inputs.of(CASES[0], torch.float32).tensors()
    for head in (0, 64):
        with settings(one_tile_head=head), recording():
            x = GatedInputs(*(y.to("meta") for y in tensors), None, SPEC, 1.0)
            outputs = gated_forward(x)
            shapes = [y.shape for y in triton_gated(*x[:-2], SPEC.to_ints(), 1.0)]
        assert [y.shape for y in outputs] == shapes
        assert (outputs[2].numel() > 0) == (head == 0)


@pytest.mark.parametrize(
    "setting", default(3, [(0, 0.0), (1, 1.0), (2, 1e-6), (1, 0.0), (2, 0.0), (0, 1e-30)]), ids=str
)
def test_a_gate_may_be_closed_or_open(setting: tuple[int, float]) -> None:
    """A sigmoid is exactly 0 or 1 soon enough, once rounded."""
    case = replace(CASES[0], batch=1, kv_heads=1)
    x = inputs(case)
    branch, gate = setting
    x.gates[:, ::2, :, branch] = gate
    assert_exact_enough(*(computed(case, "mixed", backend, x.to(dtype)) for backend, dtype in RULE))


def test_the_sum_is_that_of_the_branches_called_one_by_one() -> None:
    """To the bit, but for the gates' product: the same kernels do both."""
    case = CASES[1]
    x, cu = inputs(case), CASES[1].offsets_on(DEVICE)
    index = selection(x, case, "triton")
    parts = [with_gradients(*branch)[0] for branch in branches(x, case, index, "triton").values()]
    expected = sum(gate[..., None] * o for gate, o in zip(x.gates.unbind(-1), parts, strict=True))
    given = GatedInputs(*x.tensors(), cu, SPEC, x.q.shape[-1] ** -0.5)
    o, blocks = nsa_attention_and_blocks(given, "triton")
    assert torch.equal(blocks, index)
    torch.testing.assert_close(o, expected, rtol=1e-6, atol=1e-6)


def test_the_backward_pass_allocates_no_gradients_of_outputs_without_one() -> None:
    """Zeros the size of an output for each branch would be half a step's memory at 64k."""
    x = inputs(Case(SPEC, (11,)))
    q, *rest = x.tensors()
    o = nsa_attention(q.requires_grad_(), *rest, SPEC, backend="triton")
    with Calls() as recorded:
        o.backward(torch.ones_like(o))
    zeros = [x.numel() for op, _, x in recorded.calls if "zeros" in op.name()]
    assert max(zeros, default=0) < q[..., 0].numel()


def test_five_runs_give_the_same_bits() -> None:
    case = Case(SPEC, (5, 9), kv_heads=1, group=6)
    first = computed(case, "mixed", "triton", inputs(case))
    for _ in range(4):
        torch.testing.assert_close(
            computed(case, "mixed", "triton", inputs(case)), first, rtol=0, atol=0
        )


@pytest.mark.parametrize("lengths", [(40,), (3, 21, 0, 16)], ids=str)
def test_no_launch_waits_for_a_value(lengths: tuple[int, ...]) -> None:
    """Tensors of the `meta` device have none: reading one raises."""
    case = Case(SPEC, lengths)
    tensors = (x.to("meta") for x in Inputs.of(case, torch.float32).tensors())
    cu = None if case.cu_seqlens is None else case.cu_seqlens.to("meta")
    with recording() as launches:
        x = GatedInputs(*tensors, cu, SPEC, 1.0)
        o, *saved = gated_forward(x)
        gated_backward(o, x, *saved)
    assert len({launch.kernel for launch in launches}) == 11
