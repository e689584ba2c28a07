"""Branch subsets against the same weights in a model with all three branches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nsa.constants import BRANCHES
from nsa.model import AttentionConfig, LanguageModel, flops_per_token
from nsa.model.attention import NSAttention
from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.config import SUBSETS
from tests.model.models import SPEC, build, packed, tiny, tokens
from tests.model.test_count import counted

INCOMPLETE = [subset for subset in SUBSETS if subset not in ("cmp+sel+win", "sel")]
LENGTH = 37


def subset_of(branches: str, **changes: object) -> AttentionConfig:
    return AttentionConfig(spec=SPEC, branches=branches, **changes)


def randomize_gates(model: LanguageModel) -> list[NSAttention]:
    layers = [block.attention for block in model.blocks]
    for layer in layers:
        torch.nn.init.normal_(layer.gates.weight, std=0.3)
    return layers


@pytest.mark.parametrize("branches", INCOMPLETE)
@torch.no_grad()
def test_a_subset_equals_all_branches_with_the_others_gated_to_zero(branches: str) -> None:
    subset = build(tiny(subset_of(branches)))
    layer, names = randomize_gates(subset)[0], branches.split("+")
    full = build(tiny(subset_of("cmp+sel+win"))).blocks[0].attention
    full.q, full.o = layer.q, layer.o
    # Without a compressed branch blocks are selected by the means of the selected branch's keys.
    source = [name if name in names else "sel" for name in BRANCHES]
    rows = [names.index(n) if n in names else 0 for n in source]
    for name in ("k", "v"):
        weight = getattr(layer, name).weight.unflatten(0, (len(names), -1))
        getattr(full, name).weight.copy_(weight[rows].flatten(0, 1))

    gate_logits: list[Tensor] = []

    def close_missing_gates(
        module: torch.nn.Module, inputs: tuple[Tensor], output: Tensor
    ) -> Tensor:
        logits = layer.gates(inputs[0]).unflatten(-1, (-1, len(names)))
        closed = torch.full_like(logits[..., 0], -torch.inf)  # sigmoid 0
        gate_logits.append(logits)
        each = [logits[..., names.index(n)] if n in names else closed for n in BRANCHES]
        return torch.stack(each, -1).flatten(-2)

    full.gates.register_forward_hook(close_missing_gates)
    for cu_seqlens in (None, packed(16, 1, 20)):
        model_of = {"layer": layer, "full": full}
        x = torch.randn(1, LENGTH, 24, dtype=torch.float64)
        metadata = AttentionMetadata.build(subset.config, LENGTH, cu_seqlens, x.device)
        out = {name: attention(x, metadata=metadata) for name, attention in model_of.items()}
        torch.testing.assert_close(out["layer"], out["full"], rtol=0, atol=1e-12)
    assert len(gate_logits) == 2


@pytest.mark.parametrize("branches", INCOMPLETE)
def test_every_parameter_of_a_subset_has_a_gradient_at_any_length(branches: str) -> None:
    compressors = ["mean", "mlp"] if "cmp" in branches else ["mean"]
    for compressor in compressors:
        for length in (1, LENGTH):
            model = build(tiny(subset_of(branches, compressor=compressor)))
            randomize_gates(model)
            model(tokens(length), labels=tokens(length, seed=1)).backward()
            missing = [name for name, p in model.named_parameters() if p.grad is None]
            assert not missing, (compressor, length)


@pytest.mark.parametrize("branches", INCOMPLETE)
def test_flops_of_a_subset_are_what_pytorch_counts(branches: str) -> None:
    """For three tokens no block is complete, so selected and window branches see all pairs.

    The reference also computes the pairs above the diagonal, which are subtracted.
    """
    config, length = tiny(subset_of(branches)), 3
    inside = len([name for name in branches.split("+") if name != "cmp"])
    masked = 3 * 2 * config.heads * (config.head_dim + 5) * inside * (length**2 - 6)
    expected = counted(config, length) - config.layers * masked
    assert flops_per_token(config, length) * length == pytest.approx(expected, rel=1e-12)
    full = replace(config, attention=subset_of("cmp+sel+win"))
    assert flops_per_token(config, LENGTH) < flops_per_token(full, LENGTH)


def test_selection_without_a_compressed_branch_still_costs_its_softmax() -> None:
    """Unmasked pairs only: scores and values of the compressed keys forward, scores once more."""
    config = tiny(subset_of("sel+win"))
    pairs = sum(map(SPEC.visible_compressed, range(LENGTH)))
    without = replace(config, attention=subset_of("win"))
    spec = config.attention.spec
    selected = sum(map(spec.visible_selected, range(LENGTH)))
    per_pair = 2 * config.heads * (config.head_dim + 5)
    selection = config.layers * pairs * (per_pair + 2 * config.heads * config.head_dim)
    columns = config.kv_heads * (config.head_dim + 5) + config.heads  # keys, values and gates
    projected = 6 * columns * config.width * LENGTH
    attended = config.layers * (3 * per_pair * selected + projected)
    difference = flops_per_token(config, LENGTH) - flops_per_token(without, LENGTH)
    assert difference * LENGTH == pytest.approx(selection + attended, rel=1e-12)


UNKNOWN = r"^model\.attention\.branches = .*: choose one of cmp"


@pytest.mark.parametrize(
    ("branches", "message"),
    [
        ("sel+cmp", UNKNOWN),
        ("", UNKNOWN),
        ("window", UNKNOWN),
        ("cmp+cmp", UNKNOWN),
        ("sel+win", r"branches = 'sel\+win'; add cmp, or set it to mean$"),
    ],
)
def test_branches_that_cannot_be_are_refused(branches: str, message: str) -> None:
    """And an mlp compressor that would get no gradient."""
    with pytest.raises(ValueError, match=message):
        tiny(subset_of(branches, compressor="mlp")).validate()
