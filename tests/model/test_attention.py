"""Attention layers and RoPE against the definitions, computed by hand from the layers' weights."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nsa
from nsa.model import ModelConfig
from nsa.model import attention as layers
from nsa.model.attention import Attention, NSAttention
from nsa.model.attention_metadata import AttentionMetadata, Rotary, apply_rotary
from nsa.spec import NSASpec
from tests.model.models import ATTENTIONS, IMPORTED, NAMED, SPEC, build, packed, tiny
from tests.ops import naive
from tests.ops.cases import Calls

LENGTH, SCALE = 21, 6**-0.5
X = 3 * torch.randn(1, LENGTH, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
INDEXED = [name for name, config in ATTENTIONS.items() if config.has_index]
BRANCHES = [name for name in NAMED if name not in (*INDEXED, "dense")]


def first_layer(name: str) -> tuple[Attention, Tensor]:
    """The first layer of a model, and its output on X."""
    model = build(tiny(name))
    attention = model.blocks[0].attention
    metadata = AttentionMetadata.build(model.config, LENGTH, None, torch.device("cpu"))
    return attention, attention(X, metadata=metadata)


def project(linear: nn.Linear, size: int = 6) -> Tensor:
    """[B, T, heads, size] of X."""
    return (X @ linear.weight.T).unflatten(-1, (-1, size))


def rotated(x: Tensor) -> Tensor:
    """[B, T, H, D] rotated by hand."""
    return torch.stack([by_hand(x[:, i], i) for i in range(x.shape[1])], 1)


def check(attention: Attention, actual: Tensor, o: np.ndarray) -> None:
    expected = torch.from_numpy(o).flatten(2) @ attention.o.weight.T
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def compressed(attention: NSAttention, k: Tensor, v: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """One key and value for each block of the first document, block by block."""
    blocks = naive.compressed_blocks(LENGTH, attention.spec)
    if kind == "mean":
        k = rotated(k)
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


@pytest.mark.parametrize("name", BRANCHES)
@torch.no_grad()
def test_nsa_is_the_gated_sum_of_its_branches(name: str) -> None:
    attention, actual = first_layer(name)
    q, spec, names = rotated(project(attention.q)).numpy(), attention.spec, attention.branches
    # Independent keys lie one branch after the other: compressed, selected, window.
    k = dict(zip(names, project(attention.k).split(2, 2), strict=True))
    v = dict(zip(names, project(attention.v, 5).split(2, 2), strict=True))
    outputs = {}
    if names != ("win",):
        # Without a compressed branch blocks are selected by the means of the selected one's keys.
        source = "cmp" if "cmp" in names else "sel"
        pooled = compressed(attention, k[source], v[source], NAMED[name].compressor)
        keys, values = (y.numpy() for y in pooled)
        outputs["cmp"] = naive.compressed_attention(q, keys, values, spec, SCALE)[0]
        index = naive.select_blocks(naive.importance(q, keys, spec, SCALE), spec)
    pairs = {branch: (rotated(k[branch]).numpy(), v[branch].numpy()) for branch in names}
    if "sel" in names:
        outputs["sel"] = naive.selected_attention(q, *pairs["sel"], index, spec, SCALE)
    if "win" in names:
        outputs["win"] = naive.window_attention(q, *pairs["win"], spec.window, SCALE)
    gates = torch.sigmoid(project(attention.gates, len(names))).numpy()
    branches = np.stack([outputs[branch] for branch in names])
    check(attention, actual, np.einsum("bthc,cbthd->bthd", gates, branches))


@pytest.mark.parametrize("name", INDEXED)
@torch.no_grad()
def test_with_an_index_one_softmax_attends_to_the_blocks_that_it_selects(name: str) -> None:
    attention, actual = first_layer(name)
    q, k = (rotated(project(linear)).numpy() for linear in (attention.q, attention.k))
    queries, raw = rotated(project(attention.index.q)).numpy(), project(attention.index.k)
    spec, phi, keys = attention.spec, attention.index.pool, []
    for block in naive.compressed_blocks(LENGTH, spec):
        inside = raw[:, list(block)]
        pooled = inside.mean(1) if phi is None else weighted_mean(phi, inside)
        keys.append(by_hand(pooled, block[-1]))
    importance = naive.importance(queries, torch.stack(keys, 1).numpy(), spec, SCALE)
    index = naive.select_blocks(importance, spec)
    v = project(attention.v, 5).numpy()
    check(attention, actual, naive.selected_attention(q, k, v, index, spec, SCALE))


@torch.no_grad()
def test_dense_is_plain_causal_attention() -> None:
    attention, actual = first_layer("dense")
    q, k = (rotated(project(linear)).numpy() for linear in (attention.q, attention.k))
    v = project(attention.v, 5).numpy()
    check(attention, actual, naive.window_attention(q, k, v, LENGTH, SCALE))


def test_flash_attn_takes_heads_in_half_precision_that_its_kernels_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def heads(size: int = 64, dtype: torch.dtype = torch.bfloat16, is_cuda: bool = True) -> Any:
        return SimpleNamespace(shape=(1, 9, 2, size), dtype=dtype, is_cuda=is_cuda)

    monkeypatch.setattr(layers, "HAS_FLASH_ATTN", True)
    for taken in (heads(), heads(256), heads(8), heads(dtype=torch.float16)):
        assert layers.flash_attn_supports(taken, taken)
    for left in (heads(264), heads(60), heads(dtype=torch.float32), heads(is_cuda=False)):
        assert not layers.flash_attn_supports(left, left)
    assert not layers.flash_attn_supports(heads(64), heads(32))
    monkeypatch.setattr(layers, "HAS_FLASH_ATTN", False)
    assert not layers.flash_attn_supports(heads(), heads())


def test_flash_attn_is_called_with_the_documents_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, *limits: Any, **options: bool) -> Tensor:
        offsets, of_keys, *longest = limits
        assert options == {"causal": True, "deterministic": True}  # a run's bits are the same
        assert (longest, offsets.dtype, offsets.tolist()) == ([9, 9], torch.int32, [0, 4, 9])
        assert of_keys is offsets
        assert all(map(torch.equal, (q, k, v), given[:, 0]))
        return packed_expected[0]

    given = torch.randn(3, 1, 9, 2, 8)
    cu_seqlens = torch.tensor([0, 4, 9])
    packed_expected = layers.causal_attention(*given, cu_seqlens)
    with Calls() as recorded:
        expected = layers.causal_attention(*given, None)
    assert not torch.equal(packed_expected, expected)
    assert "cat" not in recorded.names, "a copy"
    module = SimpleNamespace(flash_attn_varlen_func=attend)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(layers, "flash_attn_supports", lambda q, v: True)
    flash = layers.causal_attention(*given, cu_seqlens)
    assert flash.data_ptr() == packed_expected.data_ptr()
    assert torch.equal(layers.causal_attention(*given, None), expected), "one document: PyTorch's"


def by_hand(x: Tensor, position: int, theta: float = 10_000.0) -> Tensor:
    """RoPE with complex numbers: pair i rotates by position · θ^(−2i/D)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-2 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
    rotated = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * position * frequency)
    return torch.cat([rotated.real, rotated.imag], -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_pairs_rotate_by_their_position_in_any_dtype_with_one_rounding(dtype: torch.dtype) -> None:
    x = torch.randn(2, 40, 3, 6, dtype=torch.float64).to(dtype)
    rotated = apply_rotary(x, Rotary.at(torch.arange(40), ModelConfig(head_dim=6)))
    exact = torch.stack([by_hand(x[:, t].double(), t) for t in range(40)], 1)
    assert rotated.dtype == dtype
    assert torch.equal(rotated[:, 0], x[:, 0])
    half_a_step = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(rotated.double(), exact, rtol=half_a_step + 1e-6, atol=1e-6)


def test_yarn_scales_both_tables_by_its_attention_factor() -> None:
    tables = Rotary.at(torch.arange(9), tiny("dense", **IMPORTED))
    norm = (tables.cos**2 + tables.sin**2).sqrt()
    torch.testing.assert_close(norm, torch.full_like(norm, 0.1 * math.log(4) + 1))


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
        ((24, 0, {}), "heads = 0: must be a whole number, 1 or more"),
        (("64", 4, {}), "hidden_size = '64': must be a whole number, 1 or more"),
        ((24, 4, {"kv_heads": 3}), "not a multiple of"),
        ((24, 4, {"branches": "all"}), "attention.branches = 'all'"),
        ((24, 4, {"spec": {"window": 16}}), r"is a dict; give NSASpec\(window=16\)"),
        ((24, 4, {"windw": 3}), "no setting 'windw'; choose one of compressor, .* belong in spec"),
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
        ([hidden(20, 2), torch.ones(2, 20).bool()], "cu_seqlens is torch.bool .* mask is refused"),
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


def test_quantized_weights_take_an_input_of_any_dtype() -> None:
    for weight in (torch.zeros(24, 24, dtype=torch.int8), None):
        for dtype in (torch.bfloat16, torch.float64):
            layers.check_hidden_states(hidden(20).to(dtype), 24, weight, None)


def test_an_attention_mask_is_refused_with_what_to_give_instead() -> None:
    mask = torch.ones(2, 20, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"attention_mask is given: .* reads no mask; omit it"):
        layer()(hidden(20, batch=2), attention_mask=mask)
    x = hidden(20)
    assert torch.equal((attention := layer())(x, attention_mask=None), attention(x))


@pytest.mark.parametrize("offsets", [[0, 15, 9, 20], [0, 15, 30], [3, 20]])
def test_a_gpus_offsets_are_checked_with_the_steps_only_synchronisation(offsets: list[int]) -> None:
    """On a GPU `check_documents` reads no values; the count of blocks is read anyway."""
    attention, cu_seqlens = layer(), torch.tensor(offsets, dtype=torch.int32)
    device = torch.device("cpu")
    with pytest.raises(ValueError, match="cu_seqlens does not ascend from 0 to T = 20"):
        AttentionMetadata.build(attention.config, 20, cu_seqlens, device)
    with Calls() as recorded:
        AttentionMetadata.build(attention.config, 20, packed(5, 15), device, torch.tensor(3))
    assert recorded.host_syncs == {"_local_scalar_dense"}
    assert recorded.names.count("_local_scalar_dense") == 1
