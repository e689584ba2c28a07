"""Attention with an index: equals the dense layer, learns by its own loss alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from nsa import NSAttention
from nsa.model import AttentionConfig, LanguageModel
from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.config import ACTIVATION_CHECKPOINTING
from tests.model.models import IMPORTED, ONE_KEY, build, packed, step, tiny, tokens

LENGTH = 37
DOCUMENTS = {"one document": None, "packed": packed(16, 0, 1, 20)}


def layers_of(model: LanguageModel) -> list[NSAttention]:
    return list(model.sparse_layers().values())


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("imported", [{}, IMPORTED], ids=["plain", "imported"])
@torch.no_grad()
def test_it_is_the_dense_model_where_all_blocks_are_selected(
    imported: dict[str, object], documents: str
) -> None:
    """In dense steps at any length, and sparsely up to select_top · select_len tokens."""
    model, ids = build(tiny("index", **imported)).eval(), tokens(LENGTH)
    dense = LanguageModel(replace(model.config, attention=AttentionConfig(kind="dense"))).double()
    dense.load_state_dict({x: y for x, y in model.state_dict().items() if ".index." not in x})
    expected = dense(ids, cu_seqlens=DOCUMENTS[documents])
    sparse = model(ids, cu_seqlens=DOCUMENTS[documents])
    assert not torch.allclose(sparse, expected)
    early = ONE_KEY.select_top * ONE_KEY.select_len
    torch.testing.assert_close(sparse[:, :early], expected[:, :early])
    model.set_dense(True)
    torch.testing.assert_close(model(ids, cu_seqlens=DOCUMENTS[documents]), expected)
    model.set_dense(False)
    assert torch.equal(model(ids, cu_seqlens=DOCUMENTS[documents]), sparse)


def test_its_queries_and_keys_have_norms_of_their_own() -> None:
    model = build(tiny("index", layers=1, **IMPORTED))
    layer, x = layers_of(model)[0], torch.randn(1, LENGTH, 24, dtype=torch.float64)
    metadata = AttentionMetadata.build(model.config, LENGTH, None, x.device)
    queries, keys = layer.layout.parts(layer.project(x, metadata))[3].unbind(2)
    index = layer.index
    torch.testing.assert_close(queries, index.q_norm(index.q(x).unflatten(-1, (2, 6))))
    torch.testing.assert_close(keys, index.k_norm(index.k(x).unflatten(-1, (2, 6))))


@pytest.mark.parametrize(
    ("name", "dense", "mode"),
    [
        *(("index", False, mode) for mode in ACTIVATION_CHECKPOINTING),
        *product(["index", "index, mean"], [True], ["none", "reentrant"]),
        ("index, mean", False, "none"),
    ],
)
def test_only_its_own_loss_trains_the_index_and_nothing_else(
    name: str, dense: bool, mode: str
) -> None:
    def trained(weight: float) -> dict[str, Tensor]:
        config = tiny(name, activation_checkpointing=mode)
        config.attention.selector_loss = weight
        model = build(config)
        model.set_dense(dense)
        return step(model, tokens(LENGTH))[1]

    without, one, two = trained(0.0), trained(1.0), trained(2.0)
    untrained = {name for name in one if name not in without or not without[name].any()}
    assert {name for name in one if ".index." in name} == untrained
    for name, gradient in one.items():
        if ".index." in name:
            assert gradient.any(), name
            torch.testing.assert_close(two[name], 2 * gradient)
        else:
            assert torch.equal(gradient, without[name]), name


def test_the_gradient_of_the_index_is_that_of_finite_differences() -> None:
    """Of index queries, index keys and φ, in the direction of the gradient."""
    model, ids = build(tiny("index", layers=1)), tokens(LENGTH)
    layer = layers_of(model)[0]
    metadata = AttentionMetadata.build(
        model.config, LENGTH, None, ids.device, loss_offset=torch.tensor(5)
    )
    x = torch.randn(1, LENGTH, 24, dtype=torch.float64)

    def loss() -> Tensor:
        layer.take_selector_loss()
        layer(x, metadata=metadata)
        taken = layer.take_selector_loss()
        assert taken is not None
        return taken

    parameters = dict(layer.index.named_parameters())
    given = torch.autograd.grad(loss(), list(parameters.values()))
    for (name, parameter), gradient in zip(parameters.items(), given, strict=True):
        assert gradient.any(), name
        change = 1e-5 * gradient / gradient.norm()
        with torch.no_grad():
            parameter += change
            above = loss()
            parameter -= 2 * change
            below = loss()
            parameter += change
        difference = (above - below) / 2e-5
        torch.testing.assert_close(difference, gradient.norm(), rtol=1e-4, atol=1e-9, msg=name)


def test_the_target_is_the_attention_of_the_layers_own_queries_and_keys() -> None:
    model = build(tiny("index", layers=1))
    layer = layers_of(model)[0]
    model.train()
    step(model, tokens(LENGTH))
    assert layer.selector_target is not None
    queries, target = layer.selector_target
    assert target.shape == (1, 2, len(queries), -(-LENGTH // ONE_KEY.select_len))
    assert not target[..., 0].any(), "the first block is always selected"
    before = target.clone()
    with torch.no_grad():
        layer.index.q.weight.mul_(3)
    step(model, tokens(LENGTH))
    torch.testing.assert_close(layer.selector_target[1], before)
    with torch.no_grad():
        layer.q.weight.mul_(3)
    step(model, tokens(LENGTH))
    assert not torch.allclose(layer.selector_target[1], before)


@pytest.mark.parametrize("imported", [{}, IMPORTED], ids=["plain", "imported"])
def test_a_new_index_starts_as_the_attention_that_it_predicts(imported: dict[str, object]) -> None:
    model = LanguageModel(tiny("index", heads=6, **imported))
    for layer in layers_of(model):
        groups = layer.q.weight.view(2, 3, 6, 24)
        torch.testing.assert_close(layer.index.q.weight.view(2, 6, 24), groups.mean(1))
        assert torch.equal(layer.index.k.weight, layer.k.weight)
        if imported:
            assert torch.equal(layer.index.k.bias, layer.k.bias)
            assert torch.equal(layer.index.q_norm.weight, layer.q_norm.weight)
        phi = layer.index.pool
        assert phi is not None
        assert not phi.weight.any()
        assert torch.equal(phi.scale, torch.ones_like(phi.scale))


@pytest.mark.parametrize("imported", [{}, IMPORTED], ids=["plain", "imported"])
def test_a_new_model_starts_as_the_dense_one_of_its_seed(imported: dict[str, object]) -> None:
    """So both can be compared seed by seed."""
    models = []
    for attention in ("index", "dense"):
        torch.manual_seed(5)
        models.append(LanguageModel(tiny(attention, **imported)))
    indexed, dense = (model.state_dict() for model in models)
    for name, weight in dense.items():
        assert torch.equal(indexed[name], weight), name
