"""Building model and optimizer: what decays, what Muon updates, where first values come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nsa.engine.build import build_model, build_muon, parameter_groups
from nsa.model import LanguageModel
from tests.engine.runs import ds_config
from tests.engine.small import small, small_request
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


def test_the_seed_determines_the_first_weights() -> None:
    config = small()
    first, again = (build_model(config, CPU).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    config.train.seed += 1
    assert not torch.equal(build_model(config, CPU).embed.weight, first["embed.weight"])


def test_values_learn_at_a_rate_of_their_own_with_weight_decay() -> None:
    model = LanguageModel(tiny("index"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    *others, values = parameter_groups(model, 0.3, value_rate=0.5)
    assert (values["lr_factor"], values["weight_decay"], values["decay"]) == (0.5, 0.3, 0.3)
    learned = {names[id(parameter)] for parameter in values["params"]}
    assert learned == {f"blocks.{i}.attention.v.weight" for i in range(model.config.layers)}
    assert learned | {names[id(p)] for x in others for p in x["params"]} == set(names.values())
    assert not any("lr_factor" in group for group in others)


PARAMS = {"lr": 1e-3, "muon_lr": 0.02, "betas": [0.9, 0.95], "eps": 1e-8, "momentum": 0.9}
HIDDEN = {"attention.q", "attention.k", "attention.v", "attention.o"}
HIDDEN |= {"mlp.gate", "mlp.up", "mlp.down"}


def test_muon_updates_the_hidden_matrices_and_adamw_all_else() -> None:
    config = small()
    config.model.attention.compressor = "mlp"
    model = LanguageModel(config.model)
    optimizer = build_muon(model, PARAMS, parameter_groups(model, weight_decay=0.1))
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {
        names[id(p)]: (group["use_muon"], group["weight_decay"], group["lr"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert set(groups) == set(names.values())
    expected = {f"blocks.{i}.{x}.weight" for i in range(config.model.layers) for x in HIDDEN}
    assert {name for name, (muon, _, _) in groups.items() if muon} == expected
    assert {groups[name] for name in expected} == {(True, 0.1, 0.02)}
    assert groups["embed.weight"] == groups["blocks.0.attention.gates.weight"] == (False, 0.1, 1e-3)
    assert groups["blocks.0.attention.compress.key.up.weight"] == (False, 0.1, 1e-3)
    assert groups["norm.weight"] == (False, 0.0, 1e-3)
    (factor,) = {group["lr_factor"] for group in optimizer.param_groups if group["use_muon"]}
    assert factor == pytest.approx(20.0)


def test_the_log_explains_the_silence_of_the_first_step(tmp_path: Path) -> None:
    for name, lines in (("zero1_muon", 1), ("zero1_pcie", 0)):
        notes = small_request(f"--run-dir={tmp_path}", ds_config(name)).notes
        assert sum("compiles its update" in note for note in notes) == lines
