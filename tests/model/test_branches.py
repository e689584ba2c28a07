"""Branch subsets against the same weights in a model with all three branches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nsa.constants import BRANCHES
from nsa.model import LanguageModel
from nsa.model.attention import NSAttention
from nsa.model.attention_metadata import AttentionMetadata
from tests.model.models import ATTENTIONS, SUBSETS_OF_BRANCHES, build, packed, tiny, tokens

LENGTH = 37


def randomize_gates(model: LanguageModel) -> list[NSAttention]:
    layers = [block.attention for block in model.blocks]
    for layer in layers:
        torch.nn.init.normal_(layer.gates.weight, std=0.3)
    return layers


@pytest.mark.parametrize("branches", SUBSETS_OF_BRANCHES)
@torch.no_grad()
def test_a_subset_equals_all_branches_with_the_others_gated_to_zero(branches: str) -> None:
    subset = build(tiny(SUBSETS_OF_BRANCHES[branches]))
    layer, names = randomize_gates(subset)[0], branches.split("+")
    full = build(tiny("mean")).blocks[0].attention
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


@pytest.mark.parametrize("branches", SUBSETS_OF_BRANCHES)
def test_every_parameter_of_a_subset_has_a_gradient_at_any_length(branches: str) -> None:
    compressors = ["mean", "mlp"] if "cmp" in branches else ["mean"]
    for compressor in compressors:
        for length in (1, LENGTH):
            model = build(tiny(replace(SUBSETS_OF_BRANCHES[branches], compressor=compressor)))
            randomize_gates(model)
            model(tokens(length), labels=tokens(length, seed=1)).backward()
            missing = [name for name, p in model.named_parameters() if p.grad is None]
            assert not missing, (compressor, length)


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
        replace(ATTENTIONS["mlp"], branches=branches).validate()
