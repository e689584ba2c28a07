"""Building model and optimizer: what decays, where first values come from."""

from __future__ import annotations

import torch

from nsa.engine.build import build_model, parameter_groups
from nsa.model import LanguageModel
from tests.engine.small import small
from tests.model.models import tiny

CPU = torch.device("cpu")


def test_the_seed_determines_the_first_weights() -> None:
    config = small()
    weight = build_model(config, CPU).embed.weight
    assert torch.equal(build_model(config, CPU).embed.weight, weight)
    config.train.seed += 1
    assert not torch.equal(build_model(config, CPU).embed.weight, weight)
    assert build_model(config, torch.device("meta")).embed.weight.is_meta


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


def test_values_learn_at_a_rate_of_their_own_with_weight_decay() -> None:
    model = LanguageModel(tiny("index"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    *others, values = parameter_groups(model, 0.3, value_rate=0.5)
    assert (values["lr_factor"], values["weight_decay"], values["decay"]) == (0.5, 0.3, 0.3)
    learned = {names[id(parameter)] for parameter in values["params"]}
    assert learned == {f"blocks.{i}.attention.v.weight" for i in range(model.config.layers)}
    assert learned | {names[id(p)] for x in others for p in x["params"]} == set(names.values())
    assert not any("lr_factor" in group for group in others)
