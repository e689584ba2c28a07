"""Parameter and FLOP counts against built models and PyTorch's counter."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from nsa.constants import BRANCHES
from nsa.model import AttentionConfig, ModelConfig, flops_per_token, parameter_count
from tests.model.models import ATTENTIONS, NAMED, build, flop_counter, tiny, tokens
from tests.ops import naive

attentions = pytest.mark.parametrize("attention", ATTENTIONS)


def counted(config: ModelConfig, length: int) -> int:
    """FLOPs of a forward and backward pass over one document, by PyTorch's counter."""
    attention = replace(config.attention, backend="reference")
    model, ids = build(replace(config, attention=attention), torch.float32), tokens(length)
    with flop_counter() as counter:
        model(ids, labels=ids).backward()
    return counter.get_total_flops()


@attentions
def test_parameter_count_equals_the_built_models(attention: str) -> None:
    config = tiny(attention)
    assert parameter_count(config) == sum(p.numel() for p in build(config).parameters())


def test_parameter_count_of_m7c_by_hand() -> None:
    """Per layer q, o, three k and v, gates, SwiGLU and two norms; the tied embedding once."""
    q_and_o, kv, gates = 2 * 768 * 768, 3 * 2 * 768 * 128, 768 * 36
    layer = q_and_o + kv + gates + 3 * 768 * 2368 + 2 * 768
    assert 124e6 <= 12 * layer + 50304 * 768 + 768 == parameter_count(ModelConfig()) <= 126e6


@pytest.mark.parametrize(
    ("attention", "length"),
    [*product(NAMED, [37]), *product(ATTENTIONS, [3])],  # many compressed blocks, and none
)
def test_flops_are_what_pytorch_counts_without_the_masked_pairs(
    attention: str, length: int
) -> None:
    """The reference computes all pairs and masks some; the masked ones are subtracted.

    A pair costs Dk + Dv multiplications a head forward and twice that backward; block selection
    multiplies queries and compressed keys once more, forward only. Without a compressed branch it
    needs the branch's forward pass, and with an index these scores alone.
    """
    config = tiny(attention)
    config.attention.selector_loss = 0.0
    indexed, names = config.attention.has_index, config.attention.branch_names
    names = ("sel",) if attention == "dense" else names
    ranking = config.kv_heads if indexed else config.heads
    score, pair = 2 * ranking * config.head_dim, 2 * config.heads * (config.head_dim + 5)
    computed, visible = _pairs(length, config.attention)
    more = {name: a - b for name, a, b in zip(BRANCHES, computed, visible, strict=True)}
    masked = 3 * pair * sum(more[name] for name in names)
    if "sel" in names:
        masked += (score + pair * ("cmp" not in names and not indexed)) * more["cmp"]
    expected = counted(config, length) - config.layers * masked
    assert flops_per_token(config, length) * length == pytest.approx(expected, rel=1e-12)


def _pairs(length: int, attention: AttentionConfig) -> tuple[list[int], list[int]]:
    """(query, key) pairs by branch, compressed first: those that are computed, and the visible."""
    causal = length * (length + 1) // 2
    if attention.kind == "dense":
        # PyTorch counts causal attention as if all pairs were seen.
        return [0, length**2, 0], [0, causal, 0]
    blocks = len(naive.compressed_blocks(length, attention.spec))
    # The selection does not change the count: the query's own block is always selected.
    selected = naive.select_blocks(
        np.zeros((1, length, 1, -(-length // attention.spec.select_len))), attention.spec
    )[0, :, 0]
    visible = [
        sum(len(naive.compressed_seen(t, length, attention.spec)) for t in range(length)),
        sum(
            len(naive.selected_seen(t, length, selected[t], attention.spec)) for t in range(length)
        ),
        sum(len(naive.window_seen(t, length, attention.spec.window)) for t in range(length)),
    ]
    return [length * blocks, length**2, length**2], visible


def test_an_index_that_learns_costs_the_gradients_of_its_pooling() -> None:
    """Twice the product of φ; its projections get their gradient with the layer's, used or not."""
    learning = tiny("index")
    frozen = replace(learning, attention=replace(learning.attention, selector_loss=0.0))
    size = learning.kv_heads * learning.head_dim
    more = 2 * 2 * size * learning.head_dim * learning.layers
    assert flops_per_token(learning, 37) - flops_per_token(frozen, 37) == pytest.approx(more)


@attentions
@pytest.mark.parametrize("length", [1, 37, 2048])
def test_dense_equivalent_flops_are_those_of_the_dense_twin(attention: str, length: int) -> None:
    config = tiny(attention)
    twin = replace(config, attention=replace(config.attention, kind="dense", selector_loss=0.0))
    twin.validate()
    assert flops_per_token(config, length, dense_equivalent=True) == flops_per_token(twin, length)
