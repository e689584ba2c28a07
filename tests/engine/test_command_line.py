"""A recipe's flags: what they resolve to, what is logged about it, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa.engine import recipe as recipes
from nsa.engine.config import RunConfig, TrainConfig, resolve_config
from nsa.engine.loop import Run, executed_flops, set_phase
from nsa.engine.process_group import Ranks
from nsa.engine.run_dir import FolderLock
from nsa.engine.run_request import TrainState
from nsa.engine.trainer import _check_node, _check_steps_left, _heading, prepare
from nsa.model import AttentionConfig, ModelConfig, flops_per_token
from nsa.spec import NSASpec
from tests.disks import files_no_longer_than
from tests.engine.small import gpus, small_request

SPEC = NSASpec(select_top=8, local_blocks=4)
SELECTOR = AttentionConfig(branches="sel", selector_loss=1.0, spec=SPEC)


def test_weights_that_no_machine_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_SIZE", "4")
    huge = ("model.width=16384", "model.mlp_width=65536", "model.layers=512")
    with pytest.raises(ValueError, match=r"the weights alone take .* GB on 4 ranks") as refused:
        small_request(*(f"--set={setting}" for setting in huge))
    gigabytes = float(str(refused.value).split("take ")[1].split()[0].replace(",", ""))
    one_rank = 4 * 512 * 16_384 * (3 * 65_536 + 6 * 8 + 4 * 2 * 8) / 1e9  # MLP, q, o, k and v
    assert gigabytes == pytest.approx(4 * one_rank, rel=0.01)


def test_activations_are_offloaded_to_the_cpu_from_a_gpu_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    json_file = tmp_path / "offload.json"
    block = {"activation_checkpointing": {"cpu_checkpointing": True}}
    json_file.write_text(json.dumps({"zero_optimization": {"stage": 1}, **block}))
    flags = f"--deepspeed_config={json_file}", "--set=model.activation_checkpointing=deepspeed"
    with pytest.raises(ValueError, match="cpu_checkpointing = true: needs a GPU; remove it"):
        small_request(*flags)
    monkeypatch.setattr(recipes, "get_accelerator", gpus)
    assert small_request(*flags).ds_config["activation_checkpointing"]["cpu_checkpointing"]


def test_the_disk_must_hold_the_checkpoints_until_the_run_stops(tmp_path: Path) -> None:
    flags = "--steps=20", "--until=10", "--set=checkpoint.every=2"
    request = small_request(*flags, f"--run-dir={tmp_path}")
    (disk,) = (check for check in _check_node(request, steps_done=4) if check.name == "disk")
    assert "3 checkpoints of " in disk.detail


def test_one_rank_of_each_node_checks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.engine.trainer._check_node", lambda *_: ["checked"])
    monkeypatch.setattr("nsa.engine.trainer.open_data", lambda *_: None)
    run = Run(small_request(f"--run-dir={tmp_path / 'run'}"), None)
    for local_rank, checks in enumerate((["checked"], [])):
        run.ranks = Ranks(rank=2 + local_rank, local_rank=local_rank, world_size=4)
        prepare(run)
        assert run.node_checks == checks


def test_a_disk_that_takes_no_checkpoint_is_refused_before_data_is_opened(tmp_path: Path) -> None:
    request = small_request(f"--run-dir={tmp_path / 'run'}")
    run = Run(request, FolderLock(request.run_dir))
    with files_no_longer_than(1), pytest.raises(ValueError, match=r"saved there: .*File too large"):
        prepare(run)
    assert [path.name for path in request.run_dir.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("flags", "step", "problem"),
    [
        ([], 7, None),
        ([], 8, None),  # its last gate or report may be missing
        (["--until=5"], 4, None),
        (["--until=5"], 5, "already at step 5, not below the requested stop at 5; raise --until"),
        (["--until=preflight"], 5, None),
        (["--set=data.seq_len=32"], 7, None),
        (["--set=data.seq_len=32"], 8, "already at its last step, 8, so changing .*; raise --step"),
        (["--set=model.layers=1"], 8, "already at its last step, 8, so changing .*; raise --step"),
    ],
)
def test_a_resumed_run_has_steps_left(flags: list[str], step: int, problem: str | None) -> None:
    before = small_request("--steps=8").config
    request = replace(small_request("--steps=8", *flags), resumed_config=before)
    if problem is None:
        _check_steps_left(request, step)
    else:
        with pytest.raises(ValueError, match=problem):
            _check_steps_left(request, step)


def test_the_heading_names_parameters_steps_and_ranks() -> None:
    request: Any = SimpleNamespace(recipe="m7c", profile="demo", run_dir="run", stop_step=9)
    run: Any = SimpleNamespace(request=request, config=RunConfig(), state=TrainState(step=4))
    run.ranks = Ranks(rank=0, local_rank=0, world_size=2)
    assert _heading(run) == "m7c (demo): 125.7M parameters, steps 5 to 9 on 2 ranks, in run"


@pytest.mark.parametrize(
    ("train", "attention", "dense_steps"),
    [
        (TrainConfig(steps=101), SELECTOR, 50),
        (TrainConfig(steps=100), SELECTOR, 50),
        (TrainConfig(steps=99), SELECTOR, 0),
        (TrainConfig(steps=1_000, selector_steps=5), SELECTOR, 0),
        (TrainConfig(steps=1_000, start_from="runs/other"), SELECTOR, 0),
        (TrainConfig(steps=1_000), AttentionConfig(selector_loss=1.0), 0),
        (TrainConfig(steps=1_000), AttentionConfig(kind="dense"), 0),
    ],
)
def test_auto_begins_dense_for_half_the_steps_where_that_trains_the_selector(
    train: TrainConfig, attention: AttentionConfig, dense_steps: int
) -> None:
    config = RunConfig(ModelConfig(attention=attention), train=replace(train, dense_steps="auto"))
    assert resolve_config(config).train.dense_steps == dense_steps
    given = RunConfig(ModelConfig(attention=attention), train=replace(train, dense_steps=7))
    assert given.resolved().train.dense_steps == 7


def test_the_flops_of_a_step_are_those_of_its_phase() -> None:
    config = RunConfig(ModelConfig(layers=2, attention=SELECTOR))
    config.data.seq_len = 8_192
    sparse, dense = (
        flops_per_token(config.model, 8_192, dense_equivalent=dense) for dense in (False, True)
    )
    config.train = TrainConfig(steps=10, selector_steps=4)
    assert [executed_flops(config, step) for step in (0, 3, 4, 9)] == [dense / 3] * 2 + [sparse] * 2
    config.train = TrainConfig(steps=10, dense_steps=4)
    assert [executed_flops(config, step) for step in (0, 3, 4, 9)] == [dense] * 2 + [sparse] * 2


@pytest.mark.parametrize(
    ("train", "phases"),
    [  # of steps 1 and 2: whether only the selector learns, attention is dense; weight decays
        (TrainConfig(selector_steps=2), [(True, True, [0.0, 0.0]), (False, False, [0.1, 0.0])]),
        (TrainConfig(dense_steps=2), [(False, True, [0.1, 0.0]), (False, False, [0.1, 0.0])]),
    ],
)
def test_weights_decay_in_the_steps_in_which_they_learn(
    train: TrainConfig, phases: list[tuple[bool, bool, list[float]]]
) -> None:
    groups, dense = [{"decay": 0.1}, {"decay": 0.0}], list[bool]()
    model = SimpleNamespace(set_dense=dense.append)
    engine = SimpleNamespace(module=model, optimizer=SimpleNamespace(param_groups=groups))
    for step, phase in enumerate(phases, 1):
        selector_only = set_phase(engine, RunConfig(train=train), step)
        assert (selector_only, dense[-1], [x["weight_decay"] for x in groups]) == phase


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"selector_steps": 10}, r"selector_steps = 10: not below train.steps = 10"),
        ({"dense_steps": 10}, r"dense_steps = 10: not below train.steps = 10"),
        ({"dense_steps": 3, "selector_steps": 2}, "selector_steps = 2: not with train.dense"),
        ({"dense_steps": 3, "start_from": "x"}, r"dense_steps = 3: needs new weights"),
        ({"min_learning_rate": 1.0}, r"min_learning_rate = 1.0: is above train.learning_rate"),
        ({"micro_batch": "many"}, r"micro_batch = 'many': must be a whole number or auto"),
        ({"micro_batch": 65_537}, r"micro_batch = 65537: must be 65,536 or less"),
        ({"dense_steps": "half"}, r"dense_steps = 'half': must be a whole number or auto"),
    ],
)
def test_schedules_that_cannot_train_are_refused(changes: dict[str, object], problem: str) -> None:
    config = RunConfig(ModelConfig(attention=SELECTOR), train=TrainConfig(steps=10))
    config.validate()
    config.train = replace(config.train, **changes)
    with pytest.raises(ValueError, match=problem):
        config.validate()


@pytest.mark.parametrize("attention", ["kind=dense", "branches=sel+win", "branches=cmp+sel+win"])
@pytest.mark.parametrize("name", ["dense_steps", "selector_steps"])
def test_a_new_run_without_an_index_cannot_begin_dense(attention: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"train\.{name} = 5: needs an index; three branches no"):
        small_request(f"--set=attention.{attention}", f"--set=train.{name}=5")
