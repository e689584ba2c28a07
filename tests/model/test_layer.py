"""`nsa.NSAttention` and `nsa.ops.compress_mean` as a user calls them: tensors in, tensors out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nsa
from nsa.model.attention_metadata import AttentionMetadata
from nsa.spec import NSASpec
from tests.model.models import ATTENTIONS, SPEC, build, packed, tiny
from tests.ops import naive

NSA = [name for name in ATTENTIONS if name != "dense"]


def layer(**settings: object) -> nsa.NSAttention:
    """A float64 layer whose gates differ from ½."""
    torch.manual_seed(0)
    built = nsa.NSAttention(24, 4, 2, settings.pop("spec", SPEC), **settings)
    return built.double()


def hidden(length: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, length, 24, dtype=torch.float64)


@pytest.mark.parametrize("name", NSA)
@pytest.mark.parametrize("cu_seqlens", [None, packed(5, 1, 15)], ids=["one", "packed"])
def test_a_layer_continues_from_the_weights_of_a_model(
    name: str, cu_seqlens: Tensor | None
) -> None:
    rope = {"rope_theta": 500.0, "rope_type": "linear", "rope_extension": {"factor": 2.0}}
    model, settings, x = build(tiny(name, **rope)), ATTENTIONS[name], hidden(21)
    attention = model.blocks[1].attention
    metadata = AttentionMetadata.build(model.config, 21, cu_seqlens, x.device)
    parts = {"branches": settings.branches, "compressor": settings.compressor}
    drop_in = layer(head_dim=6, value_dim=5, spec=settings.spec, **parts, **rope)
    drop_in.load_state_dict(attention.state_dict())
    assert torch.equal(drop_in(x, cu_seqlens), attention(x, metadata=metadata))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 4, {}), "heads = 4: does not divide hidden_size = 10; give head_dim"),
        ((24, 0, {}), "heads = 0: does not divide hidden_size = 24"),
        ((24, 4, {"kv_heads": 3}), "not a multiple of"),
        ((24, 4, {"branches": "all"}), "attention.branches = 'all'"),
        ((24, 4, {"windw": 3}), "no setting 'windw'; choose one of compressor, "),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments: tuple, message: str) -> None:
    hidden_size, heads, settings = arguments
    with pytest.raises(ValueError, match=message):
        nsa.NSAttention(hidden_size, heads, **settings)


def test_by_default_each_query_head_has_its_own_keys_in_the_papers_pattern() -> None:
    built = nsa.NSAttention(24, 4)
    assert (built.kv_heads, built.key_dim, built.value_dim) == (4, 6, 6)
    assert built.spec == NSASpec()


@pytest.mark.parametrize("documents", [(21,), (3, 1, 17), (2, 1), (1,)])
def test_compress_mean_is_the_mean_of_each_block(documents: tuple[int, ...]) -> None:
    length, cu_seqlens = sum(documents), packed(*documents)
    k = torch.randn(1, length, 2, 3, dtype=torch.float64, requires_grad=True)
    means = [
        k[:, start + block.start : start + block.stop].mean(1)
        for start, stop in naive.spans(length, cu_seqlens.tolist())
        for block in naive.compressed_blocks(stop - start, SPEC)
    ]
    expected = torch.stack(means, 1) if means else k[:, :0]
    (gradient,) = torch.autograd.grad((expected**2).sum(), k)
    for offsets in [cu_seqlens, None][: 2 if len(documents) == 1 else 1]:
        pooled = nsa.ops.compress_mean(k, SPEC, offsets)
        torch.testing.assert_close(pooled, expected)
        torch.testing.assert_close(torch.autograd.grad((pooled**2).sum(), k)[0], gradient)


def test_a_mean_in_bf16_is_rounded_once() -> None:
    k = torch.randn(2, 40, 2, 8)
    expected = nsa.ops.compress_mean(k.bfloat16().float(), SPEC).bfloat16()
    assert torch.equal(nsa.ops.compress_mean(k.bfloat16(), SPEC), expected)


def test_a_llama_trains_with_its_attention_replaced() -> None:
    """Transformers' model, a client not written here; the layer adapts in two lines."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nsa = nsa.NSAttention(32, 4, kv_heads=2, spec=SPEC)

        def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
            return self.nsa(hidden_states), None

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM(config)
    for decoder in model.model.layers:
        decoder.self_attn = SelfAttention()
    ids = torch.randint(61, (2, 30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'NSAtention'"):
        _ = nsa.NSAtention


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([torch.ones(1, 20, 24)], "x has dtype torch.float32 and the layer torch.float64; convert"),
        ([torch.ones(1, 20, 24).long()], r"x has dtype torch.int64 and the layer"),
        ([hidden(20)[0]], r"x has shape \(20, 24\); it must be \[B, T, 24\]"),
        ([hidden(0)], r"x has shape \(1, 0, 24\); it must be"),
        ([hidden(20)[..., :16]], r"x has shape \(1, 20, 16\); it must be"),
        ([hidden(20), packed(3, 4)], "must ascend from 0 to T = 20"),
        ([hidden(20), [0, 20]], "cu_seqlens is a list; it must be a tensor"),
        (
            [hidden(20), torch.tensor([0, 15, 9, 20], dtype=torch.int32)],
            r"cu_seqlens falls from 15 to 9 at \[2\]; it must ascend",
        ),
        ([hidden(20, 2), torch.ones(2, 20).bool()], "cu_seqlens is torch.bool .*, and no mask"),
    ],
)
def test_inputs_that_a_layer_cannot_read_are_refused_by_name(given: list, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        layer()(*given)


def test_under_autocast_input_and_layer_may_differ_in_dtype() -> None:
    attention = nsa.NSAttention(24, 4, kv_heads=2, spec=SPEC)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(torch.randn(1, 20, 24, dtype=torch.bfloat16)).dtype == torch.bfloat16
        for dtype in (torch.long, torch.float64):  # which autocast does not convert
            with pytest.raises(ValueError, match=rf"x has dtype {dtype} and the layer"):
                attention(torch.ones(1, 20, 24, dtype=dtype))


def test_an_attention_mask_is_refused_with_what_to_give_instead() -> None:
    mask = torch.ones(2, 20, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"attention_mask is given: .* reads no mask; omit it"):
        layer()(hidden(20, batch=2), attention_mask=mask)
    x = hidden(20)
    assert torch.equal((attention := layer())(x, attention_mask=None), attention(x))


def test_a_pattern_that_is_no_spec_is_refused_with_the_spec_to_write() -> None:
    with pytest.raises(ValueError, match=r"is a dict; give NSASpec\(window=16\)"):
        nsa.NSAttention(24, 4, spec={"window": 16})  # type: ignore[arg-type]


@pytest.mark.parametrize("offsets", [[0, 15, 9, 20], [0, 15, 30], [3, 20]])
def test_a_gpus_offsets_are_checked_with_the_steps_only_synchronisation(offsets: list[int]) -> None:
    """On a GPU `check_documents` reads no values; the count of blocks is read anyway."""
    attention, cu_seqlens = layer(), torch.tensor(offsets, dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens does not ascend from 0 to T = 20"):
        AttentionMetadata.build(attention.config, 20, cu_seqlens, torch.device("cpu"))
