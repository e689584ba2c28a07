"""Attention layers against the definitions, computed by hand from the layers' weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.model import LanguageModel
from nsa.model.attention import Attention, NSAttention
from nsa.model.attention_metadata import AttentionMetadata
from tests.model.models import ATTENTIONS, SPEC, build, tiny
from tests.model.test_attention_metadata import by_hand
from tests.ops import naive

LENGTH = 21
NSA = [name for name, config in ATTENTIONS.items() if not config.has_index and name != "dense"]


def first_layer(model: LanguageModel) -> tuple[Attention, AttentionMetadata]:
    attention = model.blocks[0].attention
    assert isinstance(attention, Attention)
    return attention, AttentionMetadata.build(model.config, LENGTH, None, torch.device("cpu"))


def rotated(x: Tensor, positions: list[int]) -> Tensor:
    """[B, T, H, D] rotated by hand."""
    return torch.stack([by_hand(x[:, i], p) for i, p in enumerate(positions)], 1)


def compressed(attention: NSAttention, k: Tensor, v: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """One key and value for each block of the first document, block by block."""
    blocks = naive.compressed_blocks(LENGTH, SPEC)
    if kind == "mean":
        k = rotated(k, list(range(LENGTH)))
        pooled = [(k[:, list(b)].mean(1), v[:, list(b)].mean(1)) for b in blocks]
    else:
        phi_k, phi_v = attention.compress.key, attention.compress.value
        phi = perceptron if kind == "mlp" else weighted_mean
        pooled = [
            (by_hand(phi(phi_k, k[:, list(b)]), b[-1]), phi(phi_v, v[:, list(b)])) for b in blocks
        ]
    return torch.stack([k for k, _ in pooled], 1), torch.stack([v for _, v in pooled], 1)


def perceptron(phi: torch.nn.Module, block: Tensor) -> Tensor:
    """φ of one block [B, l, K, D]: add positions, concatenate the vectors, apply two layers."""
    heads = []
    for h in range(block.shape[2]):
        x = (block[:, :, h] + phi.position).flatten(1)
        heads.append(F.gelu(x @ phi.up.weight.T) @ phi.down.weight.T)
    return torch.stack(heads, 1)


def weighted_mean(phi: torch.nn.Module, block: Tensor) -> Tensor:
    """φ of one block [B, l, K, D]: a softmax over its tokens in each channel weighs them."""
    heads = []
    for h, scale in enumerate(phi.scale.chunk(block.shape[2])):
        x = block[:, :, h]
        heads.append((((x @ phi.weight[h]) + phi.position[h]).softmax(1) * x).sum(1) * scale)
    return torch.stack(heads, 1)


@pytest.mark.parametrize("name", NSA)
@torch.no_grad()
def test_nsa_is_the_gated_sum_of_its_three_branches(name: str) -> None:
    config = ATTENTIONS[name]
    attention, metadata = first_layer(build(tiny(name)))
    assert isinstance(attention, NSAttention)
    x = 3 * torch.randn(1, LENGTH, 24, dtype=torch.float64)
    everywhere = list(range(LENGTH))
    q = rotated((x @ attention.q.weight.T).view(1, LENGTH, 4, 6), everywhere).numpy()
    # Independent keys lie one branch after the other: compressed, selected, window.
    k = (x @ attention.k.weight.T).view(1, LENGTH, 3, 2, 6)
    v = (x @ attention.v.weight.T).view(1, LENGTH, 3, 2, 5)
    k_cmp, k_sel, k_win = (k[:, :, c] for c in range(3))
    v_cmp, v_sel, v_win = (v[:, :, c] for c in range(3))
    pooled = compressed(attention, k_cmp, v_cmp, config.compressor)
    k_cmp, v_cmp = (y.numpy() for y in pooled)
    k_sel, k_win = (rotated(y, everywhere).numpy() for y in (k_sel, k_win))
    scale = 6**-0.5
    index = naive.select_blocks(naive.importance(q, k_cmp, SPEC, scale), SPEC)
    branches = [
        naive.compressed_attention(q, k_cmp, v_cmp, SPEC, scale)[0],
        naive.selected_attention(q, k_sel, v_sel.numpy(), index, SPEC, scale),
        naive.window_attention(q, k_win, v_win.numpy(), SPEC.window, scale),
    ]
    gates = torch.sigmoid(x @ attention.gates.weight.T).view(1, LENGTH, 4, 3).numpy()
    o = np.einsum("bthc,cbthd->bthd", gates, np.stack(branches))
    expected = torch.from_numpy(o).flatten(2) @ attention.o.weight.T
    torch.testing.assert_close(attention(x, metadata=metadata), expected, rtol=1e-5, atol=1e-7)


@torch.no_grad()
def test_dense_is_plain_causal_attention() -> None:
    attention, metadata = first_layer(build(tiny("dense")))
    x = 3 * torch.randn(1, LENGTH, 24, dtype=torch.float64)
    everywhere = list(range(LENGTH))
    q = rotated((x @ attention.q.weight.T).view(1, LENGTH, 4, 6), everywhere).numpy()
    k = rotated((x @ attention.k.weight.T).view(1, LENGTH, 2, 6), everywhere).numpy()
    v = (x @ attention.v.weight.T).view(1, LENGTH, 2, 5).numpy()
    o = naive.window_attention(q, k, v, LENGTH, 6**-0.5)
    expected = torch.from_numpy(o).flatten(2) @ attention.o.weight.T
    torch.testing.assert_close(attention(x, metadata=metadata), expected, rtol=1e-5, atol=1e-7)
