"""Baselines of the benchmarks: FlexAttention's mask and compilation, fla's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from nsa.bench import baselines, module
from nsa.bench.baselines import block_mask, compiled_flex, flex
from nsa.bench.implementations import Inputs, difference
from nsa.bench.options import shapes
from nsa.ops import NSASpec
from tests.ops.cases import one_thread as one_thread

CPU = torch.device("cpu")


@pytest.mark.parametrize("length", [100, 1100])
def test_the_block_sparse_mask_is_causal_and_as_sparse_as_the_pattern(length: int) -> None:
    spec = NSASpec(select_len=64, select_top=4, window=128)  # two blocks of 128, and one of window
    inputs = Inputs.random(shapes("2x1x8")[0], 1, length, spec, CPU, torch.float32)
    torch.manual_seed(1)
    visible = block_mask(length, spec, CPU).to_dense()[0, 0].bool()
    row = torch.arange(len(visible))
    assert visible.sum(-1).max() <= 1 + 2 + 1  # own, selected, window
    assert visible.diagonal().all()
    assert visible[row[1:], row[1:] - 1].all()
    assert not visible.triu(1).any()
    mask = visible.repeat_interleave(128, 0).repeat_interleave(128, 1)[:length, :length].tril()
    torch.manual_seed(1)
    o = flex(inputs, spec).forward()
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k_sel, inputs.v_sel))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(o, expected.transpose(1, 2))


def test_flex_attention_is_compiled_for_each_length_separately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One kernel for all lengths would mask every tile."""
    graphs: list[list[bool]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append([isinstance(x, torch.SymInt) for x in inputs])
        return graph.forward

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **kw: compile(*a, **kw, backend=backend))
    attend = compiled_flex()
    for length in (128, 256, 384):
        q = torch.randn(1, 1, length, 16)
        attend(q, q, q, block_mask=block_mask(length, None, CPU))
    assert len(graphs) == 3
    assert not any(map(any, graphs))


@pytest.mark.gpu
def test_fla_computes_the_same_as_nsa_with_its_pattern() -> None:
    pytest.importorskip("fla", reason="fla-core is not installed")
    shape, device = shapes("32x2x64")[0], torch.device("cuda")
    inputs = Inputs.random(shape, 1, 2048, baselines.FLA_SPEC, device, torch.bfloat16)
    built = module._same_pattern(inputs, shape, "triton")
    for ending in ("", "-with-window"):
        ours, theirs = (built[f"{name}{ending}"]().forward() for name in ("nsa", "fla"))
        assert difference(theirs, ours) < 0.02  # bf16, and near-ties selected differently
