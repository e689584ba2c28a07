"""Building the model: which parameters decay, and where their first values come from."""

from __future__ import annotations

import torch

from nsa.engine.build import build_model, parameter_groups
from nsa.model import LanguageModel
from tests.engine.small import small
from tests.model.models import tiny

CPU = torch.device("cpu")


def test_matrices_decay_and_norms_and_position_embeddings_do_not() -> None:
    model = LanguageModel(tiny("mlp"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others = parameter_groups(model, 0.3)
    assert (decayed["weight_decay"], decayed["decay"]) == (0.3, 0.3)
    assert (others["weight_decay"], others["decay"]) == (0.0, 0.0)
    with_decay, without = ({names[id(p)] for p in x["params"]} for x in (decayed, others))
    assert with_decay | without == set(names.values())
    assert {"embed.weight", "blocks.0.attention.q.weight"} <= with_decay
    assert all("norm" in name or name.endswith((".position", ".bias")) for name in without)
    assert any("norm" in name for name in without)
    assert any(name.endswith(".position") for name in without)


def test_a_group_without_parameters_is_left_out() -> None:
    model = LanguageModel(tiny())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    (group,) = parameter_groups(model, 0.3)
    assert group["weight_decay"] == 0.0


def test_the_seed_determines_the_first_weights() -> None:
    config = small()
    first, again = (build_model(config, CPU).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    config.train.seed += 1
    assert not torch.equal(build_model(config, CPU).embed.weight, first["embed.weight"])


def test_a_run_with_dense_steps_begins_with_the_other_branches_values_at_0() -> None:
    config = small()
    config.train.dense_steps = 5
    model = build_model(config, CPU)
    plain = build_model(small(), CPU)
    x = torch.arange(64)[None]
    model.attend_densely(True)
    assert not torch.equal(model(x), plain(x))
