"""Language model: causality, packed documents, loss, gradients and initialization."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from nsa.model import AttentionConfig, LanguageModel
from nsa.model.count import parameter_count
from nsa.monitor.health import HealthRecorder
from nsa.ops import fallback_counts, reset_fallback_counts
from nsa.spec import NSASpec
from tests.model.models import ATTENTIONS, NAMED, SPEC, build, packed, tiny, tokens
from tests.ops.cases import Calls

attentions = pytest.mark.parametrize("attention", ATTENTIONS)


# Operations of each layer's attention, beside RoPE; `pool` runs for keys and for values.
OF_A_LAYER = {
    "dense": {},
    "index": {"pool": 1, "select_blocks": 1, "selected_attention": 1, "selector_loss": 1},
    "index, mean": {"select_blocks": 1, "selected_attention": 1, "selector_loss": 1},
    "mean": {"nsa_attention": 1},
    "pool": {"pool": 2, "nsa_attention": 1},
    "mlp": {"nsa_attention": 1},
}


@attentions
def test_the_blocks_dispatch_each_operation_that_has_a_kernel(attention: str) -> None:
    """On a CPU `auto` counts a fallback of each, and a backend by name none."""
    reset_fallback_counts()
    build(tiny(replace(ATTENTIONS[attention], backend="blockwise")))(tokens(23)).sum().backward()
    assert fallback_counts() == {}
    build(tiny(attention))(tokens(23)).sum().backward()
    counts = {operation: count for (operation, _, _), count in fallback_counts().items()}
    of_layers = {"rotary_pool": 1, "swiglu": 1} | OF_A_LAYER[attention]
    assert counts == {name: 2 * n for name, n in of_layers.items()} | {"add_rms_norm": 2 * 2 + 1}
    reset_fallback_counts()


@attentions
@pytest.mark.parametrize("length", [1, 23])
def test_a_later_token_changes_no_earlier_logit(attention: str, length: int) -> None:
    model, ids = build(tiny(attention)), tokens(length)
    logits = model(ids)
    for t in range(0, length, 3):
        changed = ids.clone()
        changed[0, t] = (ids[0, t] + 1) % 61
        other = model(changed)
        torch.testing.assert_close(other[:, :t], logits[:, :t], rtol=0, atol=1e-12)
        assert not torch.equal(other[:, t], logits[:, t])


@pytest.mark.parametrize("attention", NAMED)
def test_packed_documents_get_the_logits_that_they_get_alone(attention: str) -> None:
    model, ids, lengths = build(tiny(attention)), tokens(44), (3, 1, 20, 0, 13, 7)
    together = model(ids, cu_seqlens=packed(*lengths))
    documents = [part for part in ids.split(lengths, 1) if part.shape[1]]
    alone = torch.cat([model(document) for document in documents], 1)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
    states = model.hidden(ids, packed(*lengths))
    assert torch.equal(F.linear(states, model.head_weight), together)


@pytest.mark.parametrize("attention", NAMED)
@pytest.mark.parametrize(
    ("length", "documents"), [(1, "one"), (1, "packed"), (32, "packed"), (200, "packed")]
)
def test_every_parameter_gets_a_gradient_whatever_the_length(
    attention: str, length: int, documents: str
) -> None:
    """A rank with a missing gradient would make the others wait for it forever."""
    config = tiny(attention)
    # An index learns from three blocks to rank or more, in both documents of 200 tokens.
    config.attention.spec = NSASpec(select_len=32, local_blocks=1)
    model = build(config, torch.float32)
    cu_seqlens = None
    if documents == "packed":
        first = (length + 1) // 3
        cu_seqlens = packed(first, 0, length - first)
    ids = tokens(length)
    model(ids, labels=ids, cu_seqlens=cu_seqlens).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        if length == 200:
            assert bool((parameter.grad != 0).any()), name


@attentions
def test_loss_and_gradients_are_those_through_the_logits(attention: str) -> None:
    """The mean excludes ignored labels. The tied embedding accumulates both of its gradients.

    An index only has its own loss's.
    """
    model, ids = build(tiny(attention)), tokens(20, batch=2)
    labels = ids.roll(-1, 1)
    labels[0, 5:] = -100
    plain = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    weights = [x for name, x in model.named_parameters() if ".index." not in name]
    losses = model(ids, labels=labels), plain
    gradients = [(loss, *torch.autograd.grad(loss, weights)) for loss in losses]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_the_model_compiles_as_one_graph_with_the_same_results() -> None:
    config = tiny("mean", layers=1, activation_checkpointing="selective")
    model, ids, cu_seqlens = build(config, torch.float32), tokens(40), packed(9, 0, 2, 29)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    recorder = HealthRecorder(model.sparse_layers(), config.attention.spec)
    losses = [model(ids, labels=ids.roll(-1, 1), cu_seqlens=cu_seqlens)]
    recorder.arm()
    losses.append(compiled(ids, labels=ids.roll(-1, 1), cu_seqlens=cu_seqlens))
    assert recorder.read() == [], "compiled layers are not observed"
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@attentions
def test_a_batch_with_all_labels_ignored_has_zero_loss_and_gradients(attention: str) -> None:
    model, ids = build(tiny(attention)), tokens(20)
    loss = model(ids, labels=torch.full_like(ids, -100))
    loss.backward()
    assert loss.shape == ()
    assert loss.item() == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert ".index." in name or not bool(parameter.grad.any())  # its loss needs no labels


@attentions
def test_an_untrained_model_has_the_uniform_loss(attention: str) -> None:
    """ln(vocabulary): the initial weights prefer no token."""
    torch.manual_seed(0)
    model = LanguageModel(tiny(attention, vocab_size=500, width=96, mlp_width=256))
    ids = torch.randint(500, (4, 100))
    loss = model(ids, labels=torch.randint(500, (4, 100)))
    assert loss.item() == pytest.approx(math.log(500), abs=0.04)


def test_gates_start_at_exactly_one_half_and_have_a_gradient_at_the_first_step() -> None:
    """In every layer: o is ½ · (compressed + selected + window)."""
    torch.manual_seed(0)
    model, ids, seen = LanguageModel(tiny("mlp")), tokens(40), []
    for layer in model.sparse_layers().values():
        layer.observer = lambda gates, *_: seen.append(gates)
    model(ids, labels=ids).backward()
    assert [gates.shape for gates in seen] == [(1, 40, 4, 3)] * 2
    assert all(bool((gates == 0.5).all()) for gates in seen)
    for layer in model.sparse_layers().values():
        assert bool((layer.gates.weight.grad.unflatten(0, (4, 3)) != 0).any(-1).all())


def test_residual_projections_are_initialized_smaller_by_the_root_of_their_number() -> None:
    torch.manual_seed(0)
    sizes = {"layers": 8, "width": 64, "mlp_width": 128, "head_dim": 16, "value_dim": 16}
    model = LanguageModel(tiny("mlp", qkv_bias=True, **sizes))
    block = model.blocks[3]
    for back in (block.attention.o, block.mlp.down):
        assert back.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    for other in (model.embed, block.attention.q, block.attention.k, block.mlp.up):
        assert other.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert block.attention.compress.key.position.std().item() == pytest.approx(0.02, rel=0.3)
    assert not block.attention.q.bias.any()


@pytest.mark.parametrize("attention", ["dense", "index"])
def test_each_norm_has_the_epsilon_of_the_settings(attention: str) -> None:
    model = LanguageModel(tiny(attention, qk_norm=True, norm_eps=1e-3))
    norms = [module for module in model.modules() if isinstance(module, torch.nn.RMSNorm)]
    assert len(norms) == 2 * (6 if attention == "index" else 4) + 1
    assert {norm.eps for norm in norms} == {1e-3}


@attentions
def test_every_parameter_but_embedding_and_last_norm_is_in_exactly_one_block(
    attention: str,
) -> None:
    model = build(tiny(attention))
    inside = [id(p) for block in model.blocks for p in block.parameters()]
    outside = {name for name, p in model.named_parameters() if id(p) not in inside}
    assert len(inside) == len(set(inside))
    assert outside == {"embed.weight", "norm.weight"}


def test_an_untied_head_is_another_matrix_with_the_gradient_of_the_logits_alone() -> None:
    config, ids = tiny(tied_head=False), tokens(30, batch=2)
    model, labels = build(config), ids.roll(-1, 1)
    assert model.head_weight is model.head.weight
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    expected = torch.autograd.grad(loss, [model.head.weight, model.embed.weight])
    torch.testing.assert_close(model(ids, labels), loss, rtol=0, atol=1e-12)
    model(ids, labels).backward()
    torch.testing.assert_close(model.head.weight.grad, expected[0])
    torch.testing.assert_close(model.embed.weight.grad, expected[1])
    assert parameter_count(config) - parameter_count(tiny()) == 61 * 24


def test_only_layers_that_can_rank_are_observed() -> None:
    names = list(build(tiny("mean")).sparse_layers())
    assert names == ["blocks.0.attention", "blocks.1.attention"]
    subset = AttentionConfig(spec=SPEC, branches="cmp+sel")
    for attention in ("dense", subset):
        assert build(tiny(attention)).sparse_layers() == {}


@pytest.mark.parametrize(
    ("attention", "dense"), [("mean", False), ("index", False), ("index", True)]
)
def test_observers_receive_the_documents_of_each_pass(attention: str, dense: bool) -> None:
    """Also while an index learns beside dense attention."""
    model, documents, seen = build(tiny(attention)), packed(20, 3), []
    model.set_dense(dense)
    for layer in model.sparse_layers().values():
        layer.observer = lambda *received: seen.append(received[2])
    model(tokens(23), cu_seqlens=documents)
    assert [given is documents for given in seen] == [True, True]


@attentions
def test_bf16_weights_train_too(attention: str) -> None:
    model, ids = build(tiny(attention), torch.bfloat16), tokens(40)
    with Calls() as recorded:
        loss = model(ids, labels=ids)
    assert "nsa::linear_cross_entropy" in recorded.names, "which never holds all logits"
    loss.backward()
    assert loss.dtype == torch.float32
    exact = build(tiny(attention))(ids, labels=ids)
    assert loss.item() == pytest.approx(exact.item(), rel=2e-2)
    for parameter in model.parameters():
        assert parameter.grad.dtype == torch.bfloat16
        assert bool(parameter.grad.isfinite().all())


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([torch.zeros(5).long()], r"input_ids has shape \(5,\); it must be \[B, T\]"),
        ([torch.zeros(1, 0).long()], r"input_ids has shape \(1, 0\)"),
        ([torch.full((1, 5), 61)], "input_ids contains 61; ids are 0 to 60 with this"),
        ([torch.full((1, 5), -1)], "input_ids contains -1; ids are 0 to 60"),
        ([torch.zeros(1, 5)], r"input_ids has dtype torch.float32; it must be int64"),
        ([tokens(5), torch.full((1, 5), 99)], "labels contains 99; .*, or -100"),
        ([tokens(7), tokens(6)], r"labels has shape \(1, 6\) and input_ids \(1, 7\)"),
        ([tokens(7), None, packed(2, 4)], r"cu_seqlens goes from 0 to 6; .* T = 7"),
        ([tokens(7), None, packed(2, 5).to("meta")], r"cu_seqlens is on meta and input_ids on cpu"),
    ],
)
def test_inputs_that_a_model_cannot_read_are_refused_by_name(given: list[Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        build(tiny())(*given)
