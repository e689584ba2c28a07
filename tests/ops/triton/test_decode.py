"""Decoding kernels at real sizes, which need a GPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from nsa.constants import BRANCHES
from nsa.ops.decode import decode_attention
from nsa.ops.inputs import DecodeInputs
from nsa.ops.triton import decode
from nsa.spec import NSASpec
from tests.ops.cases import Case
from tests.ops.decoding import buffers, decoded
from tests.ops.test_decode import loses_what_pytorch_loses, sequences
from tests.ops.triton.parity import DEVICE

pytestmark = pytest.mark.gpu
REAL = {
    "M7C": Case(NSASpec(), (1, 1500, 9000, 16_384), kv_heads=2, group=6, key_dim=64, value_dim=64),
    "64/4/192/128": Case(NSASpec(), (700, 5000), kv_heads=4, group=16, key_dim=192, value_dim=128),
    "head size 256": Case(NSASpec(), (40, 3001), kv_heads=1, group=2, key_dim=256, value_dim=256),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in REAL), ("M7C", torch.float32)], ids=str
)
def test_real_sizes_lose_what_pytorch_loses(name: str, dtype: torch.dtype) -> None:
    with mock.patch.multiple(decode, PART=128, BLOCKS=64, ELEMENTS=2048):
        loses_what_pytorch_loses(REAL[name], dtype)


def test_a_captured_step_is_right_for_other_tokens_and_lengths() -> None:
    case = REAL["M7C"]
    x = buffers(case, sequences(case, dtype=torch.bfloat16))
    lengths = torch.tensor(case.lengths, device=DEVICE)
    expected = decoded(case, x, backend="triton")
    q, *kv_and_gates = [y.clone() for y in x.tensors()]
    scale, counts = q.shape[-1] ** -0.5, torch.ones_like(lengths)
    q.zero_()
    given = DecodeInputs(q, None, *kv_and_gates, counts, case.spec, "+".join(BRANCHES), scale)
    decode_attention(given, "triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = decode_attention(given, "triton")
    q.copy_(x.q)
    counts.copy_(lengths)
    graph.replay()
    assert torch.equal(o, expected)
