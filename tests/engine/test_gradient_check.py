"""Gradient check: what crashed or hung under DDP (F1, F2 in docs/design/security.md) is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nsa.engine.build import check_length
from nsa.engine.config import RunConfig
from nsa.engine.ds_config import load_ds_config, resolve_ds_config
from nsa.engine.gradient_check import check_gradients, inspect_gradients
from nsa.engine.zero_mode import ZeroMode, zero_mode
from tests.engine.gradient_check_ranks import build
from tests.engine.small import small
from tests.ranks import ROOT, launch

Reports = dict[str, dict[str, list[str]]]  # by model
PROGRAM = Path(__file__).with_name("gradient_check_ranks.py")


@pytest.fixture(scope="module")
def reports() -> Reports:
    by_rank = []
    for text in launch(PROGRAM, "inspect"):
        rows = [json.loads(line) for line in text.splitlines() if line[:1] == "{"]
        by_rank.append({row.pop("model"): row for row in rows})
    assert by_rank[0] == by_rank[1], "the ranks must agree, or one would stop and the other hang"
    return by_rank[0]


def test_a_sound_model_passes(reports: Reports) -> None:
    assert reports["sound"] == {"twice": [], "missing": []}


def test_a_block_shared_by_two_reentrant_segments_is_named(
    reports: Reports,
) -> None:
    assert "blocks.0.mlp.down.weight" in reports["shared block"]["twice"]
    assert reports["shared block"]["missing"] == []


def test_a_tied_head_inside_a_reentrant_segment_is_named(
    reports: Reports,
) -> None:
    assert reports["head inside"]["twice"] == ["embed.weight"]


def test_a_parameter_that_one_rank_skips_is_named_on_both(
    reports: Reports,
) -> None:
    missing = reports["skips on one rank"]["missing"]
    assert missing
    assert all(name.startswith("blocks.1.") for name in missing)


def test_a_parameter_that_fires_twice_on_one_rank_is_named_on_both(reports: Reports) -> None:
    assert "blocks.0.mlp.down.weight" in reports["repeats on one rank"]["twice"]
    assert reports["repeats on one rank"]["missing"] == []


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("shared block", "Expected to mark a variable ready only once"),
        ("sound", "backward passed"),
    ],
)
def test_ddp_fails_as_the_earlier_runs_did_where_a_parameter_fires_twice(
    model: str, expected: str
) -> None:
    for text in launch(PROGRAM, "ddp", model):
        assert expected in text


@pytest.mark.parametrize(
    ("model", "zero", "problem", "fix"),
    [
        ("shared block", "zero2_pcie", "gets its gradient more than once", "zero1_pcie.json"),
        ("unused", "zero1_pcie", "gets no gradient on some rank", "zero0_debug.json"),
    ],
)
def test_a_broken_rule_is_refused_with_the_config_that_tolerates_it(
    model: str, zero: str, problem: str, fix: str
) -> None:
    def mode(name: str) -> ZeroMode:
        raw = load_ds_config(ROOT / f"ds_configs/{name}.json")
        return zero_mode(resolve_ds_config(raw, RunConfig(), world_size=1))

    tokens = torch.arange(40)[None]
    with pytest.raises(ValueError, match=problem) as refused:
        check_gradients(build(model), tokens, mode(zero))
    assert "(and " in str(refused.value), "others are counted"
    assert fix in str(refused.value)
    (note,) = check_gradients(build(model), tokens, mode("zero0_debug"))
    assert problem in note
    assert note.endswith("the DeepSpeed config tolerates it")
    assert check_gradients(build("sound"), tokens, mode(zero)) == []


def test_the_check_leaves_no_gradient_and_no_hook() -> None:
    model = build("sound")
    for _ in range(2):
        assert inspect_gradients(model, torch.arange(40)[None]) == ([], [])
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("seq_len", "ranks", "tokens"), [(96, 1, 96), (96, 2, 48), (10**6, 2, 256)]
)
def test_the_check_does_not_grow_with_the_sequence(seq_len: int, ranks: int, tokens: int) -> None:
    config = small()
    config.data.seq_len, config.train.sequence_parallel = seq_len, ranks
    assert check_length(config) == tokens
