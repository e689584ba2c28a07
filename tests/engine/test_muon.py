"""Muon: which parameters it updates, and what the log says; its step is in test_switching.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa.engine.build import build_muon, parameter_groups
from nsa.model import LanguageModel
from tests.engine.small import small, small_request
from tests.ranks import ROOT

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
        config = f"--deepspeed_config={ROOT}/ds_configs/{name}.json"
        notes = small_request(f"--run-dir={tmp_path}", config).notes
        assert sum("compiles its update" in note for note in notes) == lines
