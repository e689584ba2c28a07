"""An index and the selector loss: equal to the dense layer, learning by their own loss alone."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAttention, ops
from nsa.model import AttentionConfig, LanguageModel
from nsa.model.attention_metadata import (
    QUERIES,
    AttentionMetadata,
    Rotary,
    apply_rotary,
    sample_queries,
)
from nsa.model.compressor import Compressor, cut_blocks
from nsa.model.config import ACTIVATION_CHECKPOINTING
from nsa.model.index import add_index
from nsa.spec import NSASpec
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
    pooled: list[int] = []
    hooks = [
        layer.index.pool.register_forward_hook(lambda *_: pooled.append(1))
        for layer in layers_of(model)
    ]
    torch.testing.assert_close(model(ids, cu_seqlens=DOCUMENTS[documents]), expected)
    assert not pooled, "nothing reads the index"
    for hook in hooks:
        hook.remove()
    model.set_dense(False)
    assert torch.equal(model(ids, cu_seqlens=DOCUMENTS[documents]), sparse)


def test_its_queries_and_keys_have_norms_of_their_own() -> None:
    model = build(tiny("index", layers=1, **IMPORTED))
    layer, x = layers_of(model)[0], torch.randn(1, LENGTH, 24, dtype=torch.float64)
    queries, keys = layer.layout.parts(layer.project(x))[3].unbind(2)
    index = layer.index
    torch.testing.assert_close(queries, index.q_norm(index.q(x).unflatten(-1, (2, 6))))
    torch.testing.assert_close(keys, index.k_norm(index.k(x).unflatten(-1, (2, 6))))
    for offset, gradients in ((None, True), (torch.tensor(5), False), (torch.tensor(5), True)):
        metadata = AttentionMetadata.build(model.config, LENGTH, None, x.device, loss_offset=offset)
        with torch.set_grad_enabled(gradients):
            kv = layer.branch_kv(layer.rotary_pool(layer.project(x), metadata), metadata)
        learns = offset is not None and gradients
        assert kv["index"][1].requires_grad == learns, "otherwise nothing uses its graph"


@pytest.mark.parametrize(
    ("name", "dense", "mode"),
    [
        ("index", False, "none"),
        ("index", True, "reentrant"),
        ("index, mean", False, "none"),
        ("index, mean", True, "none"),
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
        return layer.take_selector_loss()

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
        assert not phi.weight.any()
        assert torch.equal(phi.scale, torch.ones_like(phi.scale))


def test_an_index_that_is_added_has_the_dtype_of_the_weights() -> None:
    weights = build(tiny("dense"), torch.bfloat16).state_dict()
    converted = add_index(weights, tiny("index"))
    assert {weight.dtype for weight in converted.values()} == {torch.bfloat16}
    LanguageModel(tiny("index")).load_state_dict(converted)


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


SPEC = NSASpec(8, 4, 8, select_top=4, init_blocks=1, local_blocks=1, window=16)
ATTENTION = AttentionConfig(spec=SPEC, selector_loss=1.0)
ROWS = 12  # of the weight of k, for compressed keys
PACKED = {"one document": None, "packed": packed(5, 65, 58)}
IDS = tokens(128)


def build_of(weight: float, checkpointing: str = "none") -> LanguageModel:
    config = tiny(replace(ATTENTION, selector_loss=weight), activation_checkpointing=checkpointing)
    return build(config, torch.float32, std=0.3)


@pytest.mark.parametrize("seq_len", [1, 31, 63, 64, 1_000])
def test_queries_are_spread_over_the_sequence_and_differ_by_offset(seq_len: int) -> None:
    seen = set()
    for offset in range(1_000):
        queries = sample_queries(seq_len, torch.tensor(offset)).tolist()
        assert queries[0] >= 0
        assert queries[-1] < seq_len
        assert len(queries) >= min(seq_len, QUERIES)
        seen |= set(queries)
    assert len(seen) > seq_len - max(1, seq_len // QUERIES)


@pytest.mark.parametrize("name", PACKED)
def test_the_selector_loss_changes_gradients_and_not_the_training_losss_value(name: str) -> None:
    cu_seqlens, with_loss, without = PACKED[name], build_of(1.0), build_of(0.0)
    args = {"labels": IDS, "cu_seqlens": cu_seqlens}
    assert torch.equal(with_loss(IDS, **args), without(IDS, **args))
    mine, plain = (step(model, IDS, cu_seqlens)[1] for model in (with_loss, without))
    trained = [name for name in plain if name.endswith("attention.k.weight")]
    for name in plain:
        rows = ROWS if name in trained else 0  # of compressed keys
        assert torch.equal(mine[name][rows:], plain[name][rows:]), name
        assert not rows or not torch.allclose(mine[name][:rows], plain[name][:rows], atol=1e-5)
    name = trained[-1]
    doubled = step(build_of(2.0), IDS, cu_seqlens)[1][name] - plain[name]
    assert torch.allclose(doubled, 2 * (mine[name] - plain[name]), atol=1e-5)


def test_the_weight_of_a_micro_batch_does_not_apply_to_the_selector_loss() -> None:
    name = "blocks.1.attention.k.weight"
    with_loss, without = (step(build_of(weight), IDS)[1][name] for weight in (1.0, 0.0))
    weighted = []
    for model in (build_of(1.0), build_of(0.0)):
        labels = IDS.roll(-1, 1)
        loss, mean = model(IDS, labels, loss_weight=0.25), model(IDS, labels)
        assert loss == 0.25 * mean
        loss.backward()
        weighted.append(model.get_parameter(name).grad)
    assert torch.allclose(weighted[0] - weighted[1], with_loss - without, atol=1e-6)
    assert torch.allclose(weighted[1], 0.25 * without, atol=1e-6)
    assert (with_loss - without).abs().max() > 1e-4


class FirstToken(Compressor):
    """Keeps the first of a block's keys and values."""

    def compress_blocks(self, k: Tensor, v: Tensor, block_rotary: Rotary) -> tuple[Tensor, Tensor]:
        return apply_rotary(k[:, :, 0], block_rotary), v[:, :, 0]


@pytest.mark.parametrize("name", PACKED)
def test_the_selector_loss_ranks_the_keys_of_a_compressor_of_ones_own(name: str) -> None:
    torch.manual_seed(0)
    layer = NSAttention(32, 4, kv_heads=2, spec=SPEC, selector_loss=1.0, compressor="mlp")
    layer.compress, x = FirstToken(), torch.randn(1, 128, 32)
    metadata = AttentionMetadata.build(layer.config, 128, PACKED[name], x.device)
    parts = layer.rotary_pool(layer.project(x), metadata)
    ranked = layer.branch_kv(parts, metadata)["cmp"][0]
    torch.testing.assert_close(layer.ranking_keys(x, metadata), ranked)


@pytest.mark.parametrize("name", PACKED)
def test_the_gradient_of_cutting_into_blocks_equals_that_of_indexing(name: str) -> None:
    spec = NSASpec(7, 3, 5, select_top=4, window=6)
    config = tiny(replace(ATTENTION, spec=spec))
    metadata = AttentionMetadata.build(config, 128, PACKED[name], torch.device("cpu"))
    x = torch.randn(2, 128, 3, 4, dtype=torch.float64, requires_grad=True)
    cut = cut_blocks(x, metadata)
    gradient = torch.randn_like(cut)
    (mine,) = torch.autograd.grad(cut, x, gradient)
    (expected,) = torch.autograd.grad(x[:, metadata.block_tokens], x, gradient)
    torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"compressor": "pool"},
        {"compressor": "mlp"},
        {"qkv_bias": True, "qk_norm": True},
        {"qkv_bias": True, "qk_norm": True, "compressor": "pool"},
    ],
    ids=str,
)
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "hooked"])
def test_the_loss_trains_the_compressor_and_its_keys_projection_alone(
    name: str, change: dict[str, Any], plain: bool
) -> None:
    """By the gradient that the loss has through the layer's own compressed keys."""
    torch.manual_seed(0)
    sizes = {"kv_heads": 2, "value_dim": 4, "spec": SPEC, "selector_loss": 1.0}
    layer = NSAttention(32, 4, **sizes, **change).double()
    if not plain:
        layer.k.register_forward_hook(lambda *_: None)
    for part, parameter in layer.named_parameters():  # some start at 0 or 1
        if part.startswith("compress.") or part in ("k.bias", "k_norm.weight"):
            torch.nn.init.normal_(parameter)
    x = torch.randn(1, 128, 32, dtype=torch.float64, requires_grad=True)
    cu_seqlens, offset = PACKED[name], torch.tensor(5)
    metadata = AttentionMetadata.build(layer.config, 128, cu_seqlens, x.device, loss_offset=offset)
    layer(x, metadata=metadata)
    loss = layer.take_selector_loss()
    parts = layer.rotary_pool(layer.project(x), metadata)
    kv = layer.branch_kv(parts, metadata)
    keys = kv["cmp"][0], kv["sel"][0]
    options: dict[str, Any] = {"cu_seqlens": metadata.cu_seqlens}
    expected, _ = ops.selector_loss(parts.q, *keys, metadata.sampled, SPEC, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)

    trained = {"k.weight"} | {x for x, _ in layer.named_parameters() if "compress.key." in x}
    trained |= {"k.bias", "k_norm.weight"} if "qk_norm" in change else set()
    named = {"x": x, **dict(layer.named_parameters())}
    found, wanted = (
        dict(zip(named, torch.autograd.grad(y, [*named.values()], allow_unused=True), strict=True))
        for y in (loss, expected)
    )
    assert {part for part, gradient in found.items() if gradient is not None} == trained
    for part in trained:
        assert bool(found[part].any())
        torch.testing.assert_close(found[part], wanted[part], rtol=1e-9, atol=1e-15)
    assert not found["k.weight"][16:].any()  # rows of the other branches


def test_autocast_trains_the_same_keys() -> None:
    """Weights and hidden states stay float32, keys are bfloat16.

    Only of the first layer: bfloat16 may select other blocks there, and so changes the next input.
    """
    name = "blocks.0.attention.k.weight"

    def of_the_loss() -> Tensor:
        with_loss, without = (step(build_of(weight), IDS)[1][name] for weight in (1.0, 0.0))
        assert with_loss.dtype == torch.float32
        return with_loss - without

    expected = of_the_loss()
    with torch.autocast("cpu", torch.bfloat16):
        mine = of_the_loss()
    assert not mine[ROWS:].any(), "rows of other branches"
    assert float((mine - expected).norm()) < 0.05 * float(expected.norm())


@pytest.mark.parametrize(
    ("frozen", "mode"),
    [
        *(("nothing", mode) for mode in ACTIVATION_CHECKPOINTING if mode != "none"),
        *product(["the embedding", "all but keys"], ["reentrant", "selective"]),
    ],
)
def test_checkpointing_and_frozen_weights_change_no_gradient(frozen: str, mode: str) -> None:
    ids = tokens(128, batch=2)
    expected, model = step(build_of(1.0), ids)[1], build_of(1.0, mode)
    if frozen == "the embedding":
        model.embed.weight.requires_grad_(False)
        del expected["embed.weight"]
    elif frozen == "all but keys":
        for name, weight in model.named_parameters():
            weight.requires_grad_(name.endswith("attention.k.weight"))
        expected = {name: x for name, x in expected.items() if name.endswith("attention.k.weight")}
    mine = step(model, ids)[1]
    torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def test_evaluation_and_inference_do_not_compute_the_selector_loss() -> None:
    model = build_of(1.0)
    model.eval()(IDS, labels=IDS)
    with torch.no_grad():
        model.train()(IDS, labels=IDS)
    assert all(layer.take_selector_loss() is None for layer in model.sparse_layers().values())


def test_a_layer_returns_its_selector_loss_once_per_forward_pass() -> None:
    layer, seen = NSAttention(32, 4, kv_heads=2, spec=SPEC, selector_loss=0.5), list[Any]()
    layer.observer = lambda *received: seen.append(received[3])
    layer(torch.randn(2, 128, 32))
    loss = layer.take_selector_loss()
    assert loss.requires_grad
    assert torch.equal(seen[0], loss)
    assert not seen[0].requires_grad
    assert 0 < loss.item() < 10
    assert layer.take_selector_loss() is None


def test_a_layer_of_ones_own_samples_other_queries_in_each_pass() -> None:
    torch.manual_seed(0)
    layer = NSAttention(32, 4, kv_heads=2, spec=SPEC, selector_loss=0.5)
    first = set()
    for _ in range(8):
        layer(torch.zeros(1, 320, 32))
        layer.take_selector_loss()
        queries, target = layer.selector_target
        assert target.shape[2] == len(queries) == 32
        first.add(int(queries[0]))
    assert first <= set(range(10))  # 32 queries of 320, 10 apart
    assert len(first) > 3


def test_a_layer_whose_loss_is_never_taken_warns() -> None:
    layer = NSAttention(32, 4, kv_heads=2, spec=SPEC, selector_loss=0.5)
    layer(torch.randn(2, 128, 32))
    with pytest.warns(UserWarning, match="add selector_loss \\* layer.take_selector_loss"):
        layer.eval()(torch.randn(2, 128, 32))
    assert layer.take_selector_loss() is None, "of an earlier pass"


@pytest.mark.filterwarnings("error")
def test_a_layer_whose_index_nothing_trains_warns_in_training() -> None:
    spec = replace(SPEC, window=NSASpec.window)
    layer = NSAttention(32, 4, kv_heads=2, spec=spec, branches="sel")
    with pytest.warns(UserWarning, match="selector_loss = 0: nothing else trains the index"):
        layer(torch.randn(2, 128, 32))
    layer.eval()(torch.randn(2, 128, 32))


@pytest.mark.filterwarnings("error")
def test_a_model_takes_the_loss_of_each_layer() -> None:
    model = build_of(1.0)
    for _ in range(2):
        model(IDS, labels=IDS).backward()


def test_a_model_samples_other_queries_for_other_tokens_or_embeddings() -> None:
    model = build_of(1.0)
    layer = layers_of(model)[0]
    first, of_embeddings = set(), set()
    for seed in range(8):
        ids = tokens(320, seed=seed)
        model(ids, labels=ids)
        first.add(int(layer.selector_target[0][0]))
        of_embeddings.add(int(model.loss_offset(model.embed(ids) / 1_000) % 10))
    assert min(len(first), len(of_embeddings)) > 3
