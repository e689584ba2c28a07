"""Resuming: the tokens of a step, and the profile that names the run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file

from nsa.checkpoint.commit import commit, new_draft, write_part
from nsa.checkpoint.state_file import ANY_RANKS, Checkpoint, Topology, layout_of, read_state_file
from nsa.engine import recipe as recipes
from nsa.engine import resume
from nsa.engine.config import RunConfig, TrainConfig, to_yaml
from nsa.engine.process_group import Ranks
from nsa.engine.recipe import Recipe, with_model_of_start
from nsa.engine.run_dir import CONFIG_FILES, find_saved, record_run
from nsa.engine.run_request import RunRequest
from nsa.model import AttentionConfig, ModelConfig
from tests.engine.runs import ds_config
from tests.engine.small import gpus, small, small_request

RECIPE = Recipe("small", "", {"demo": small, "production": small})


def resumed(run: Path, *flags: str) -> RunRequest:
    arguments = [f"--run-dir={run}", "--resume", *flags]
    return recipes.resolve_request(RECIPE, recipes.build_parser(RECIPE).parse_args(arguments))


def save(run: Path, step: int, settings: dict[str, str]) -> Path:
    """Save a checkpoint of no weights, of two ranks."""
    draft = new_draft(run / "checkpoints", step)
    state = Checkpoint(draft, {"step": step}, Topology(layout_of(1), "bf16", 2))
    files = settings | {"state.json": state.to_json(), "rng_rank0.pt": ""}
    for name, text in files.items():
        (draft / name).write_text(text)
    write_part(draft, 0, files)
    return commit(run / "checkpoints", step, 1, {})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a demo run on two ranks with a checkpoint of no weights."""
    run = tmp_path / "run"
    request = small_request(f"--run-dir={run}", "--set=train.micro_batch=4", "--set=data.seq_len=8")
    save(run, 3, request.config_files())
    (run / "env.json").write_text(json.dumps({"profile": "demo"}))
    return run


def test_what_a_resumed_run_continues_with_is_logged(saved: Path) -> None:
    newest = saved / "checkpoints/step00000003"
    assert find_saved(saved) == (newest, newest, [])
    bare = save(saved, 4, {"config.yaml": ""})  # as of an earlier version
    assert find_saved(saved) == (bare, None, [])
    (saved / "config.yaml").touch()
    assert find_saved(saved) == (bare, saved, [])
    shutil.rmtree(bare)
    (saved / "checkpoints/step00000005").mkdir()
    checkpoint, settings, (skipped, last) = find_saved(saved)
    assert (checkpoint, settings, last) == (newest, newest, "resuming from step00000003")
    assert skipped.startswith("skipped: step00000005: ")
    (newest / "state.json").write_text("{}")
    checkpoint, settings, notes = find_saved(saved)
    assert (checkpoint, settings) == (None, saved)
    assert notes[2:] == ["--resume: none of 2 checkpoints is valid; starting at step 0"]
    shutil.rmtree(saved / "checkpoints")
    assert find_saved(saved)[2] == ["--resume: no checkpoint was saved; starting at step 0"]


def test_ranks_that_find_different_checkpoints_are_refused(saved: Path) -> None:
    def agree(found: Path | None) -> tuple[Path, list[tuple[str, int]]]:
        other = (Path("run-2"), found, ("b", 7))
        ranks: Any = SimpleNamespace(gather=lambda value, kind: [value, other])
        return resume.agree_on_run(ranks, saved, saved / "checkpoints/step00000003")

    folder, processes = agree(saved / "checkpoints/step00000003")
    assert (folder, processes[1]) == (saved, ("b", 7))
    with pytest.raises(ValueError, match=r"step00000003 and rank 1 found None; put --run-dir on"):
        agree(None)


def test_a_run_records_its_ranks_their_hosts_and_the_kernel_check(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa.monitor.environment.environment", dict)
    (request := resumed(saved)).notes[:] = ["a note"]
    record_run(request, ["node1", "node2"], [{"operation": "swiglu"}])
    facts = {"recipe": "small", "profile": "demo", "notes": ["a note"], "world_size": 2}
    facts |= {"hosts": ["node1", "node2"], "kernel_check": [{"operation": "swiglu"}]}
    assert json.loads((saved / "env.json").read_text()) == facts
    assert {name: (saved / name).read_text() for name in CONFIG_FILES} == request.config_files()


@pytest.mark.parametrize("error", [None, ValueError("a part is missing")])
def test_rank_0_converts_a_checkpoint_and_all_ranks_get_it_or_the_error(
    error: ValueError | None, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = read_state_file(saved / "checkpoints/step00000003")
    universal = replace(state, topology=replace(state.topology, ranks=ANY_RANKS))
    convert = Mock(return_value=universal, side_effect=error)
    monkeypatch.setattr("nsa.engine.resume.to_universal", convert)
    errors = []

    def gather(value: Checkpoint, kind: Any) -> list[Checkpoint]:
        travelled = TypeAdapter(kind).dump_python(value, mode="json")
        assert TypeAdapter(kind).validate_python(travelled) == value
        return [universal, value]

    ranks: Any = SimpleNamespace(barrier=errors.append, gather=gather)
    for rank in range(4):
        converted = resume.convert_to_universal(ranks, state, Ranks(rank, rank, world_size=4))
        assert converted == universal
    assert errors == [error, None, None, None]
    assert resume.convert_to_universal(ranks, state, Ranks(0, 0, world_size=2)) == state
    convert.assert_called_once_with(state)


def test_a_state_with_a_value_of_another_type_is_refused(saved: Path) -> None:
    state = read_state_file(saved / "checkpoints/step00000003")
    assert resume.read_state(state).step == 3
    for name, value in (("tokens", "9"), ("other", 1)):
        wrong = replace(state, train_state={"step": 3, name: value})
        with pytest.raises(ValueError, match=rf"step00000003: {name} = {value!r} is not valid"):
            resume.read_state(wrong)


@pytest.mark.parametrize(
    ("before", "after", "step", "fix"),
    [
        (55, 55, 110, None),
        (55, 80, 30, None),
        (55, 30, 30, None),
        (55, 20, 30, "set it to 30 or more"),
        (55, 150, 110, "set it to 55, as before"),
        (55, 20, 110, "set it to 55, as before"),
        (0, 5, 3, "set it to 0, as before"),
    ],
)
@pytest.mark.parametrize("name", ["dense_steps", "selector_steps"])
def test_a_run_switches_to_sparse_attention_once(
    name: str, before: int, after: int, step: int, fix: str | None
) -> None:
    model = ModelConfig(attention=AttentionConfig(branches="sel"))
    configs = [RunConfig(model, train=TrainConfig(**{name: n})) for n in (before, after)]
    if fix is None:
        resume.check_schedule(*configs, step)
    else:
        with pytest.raises(ValueError, match=rf"train\.{name} = {after}: .*{fix}"):
            resume.check_schedule(*configs, step)


@pytest.mark.parametrize(
    ("before", "after", "kept"), [(0.5, 0.25, True), (0.5, 1.0, False), (1.0, 0.5, False)]
)
def test_values_keep_or_lack_a_rate_of_their_own(before: float, after: float, kept: bool) -> None:
    """They are a group of the optimizer, whose state a checkpoint holds."""
    configs = [RunConfig(train=TrainConfig(value_rate=rate)) for rate in (before, after)]
    if kept:
        resume.check_groups(*configs)
    else:
        with pytest.raises(ValueError, match=rf"value_rate = {after}: the run began with {before}"):
            resume.check_groups(*configs)


@pytest.mark.parametrize("name", ["dense_steps", "selector_steps"])
def test_the_dense_steps_of_three_branches_are_not_continued(name: str) -> None:
    config = RunConfig(train=TrainConfig(**{name: 5}))
    resume.check_schedule(config, config, 5)
    with pytest.raises(ValueError, match=rf"train\.{name} = 5: needs an index; three branches"):
        resume.check_schedule(config, config, 4)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--set=train.dense_steps=5"], "dense in 0 of its 3 steps; set it to 0, as before"),
        (["--set=model.layers=3"], r"model\.layers = 3: .* was created with 2"),
        ([ds_config("zero1_bf16acc"), "--set=train.precision=fp32"], r"train\.precision=bf16"),
        ([ds_config("zero3")], "ZeRO stage 1 or 2"),
    ],
)
def test_unresumable_changes_are_refused(saved: Path, flags: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        resume.read_checkpoint(resumed(saved, *flags), world_size=2)


@pytest.mark.parametrize(
    ("changes", "ranks", "line"),
    [
        (["micro_batch=2"], 2, "128 tokens (world size 2) instead of 256 (world size 2)"),
        (["accumulation=8"], 2, "512 tokens (world size 2) instead of 256 (world size 2)"),
        ([], 1, "128 tokens (world size 1) instead of 256 (world size 2)"),
        (["micro_batch=2"], 1, "64 tokens (world size 1) instead of 256 (world size 2)"),
        (["micro_batch=2", "accumulation=8"], 2, None),
        (["micro_batch=auto"], 2, None),
        (["accumulation=8"], 1, None),
    ],
)
def test_a_resumed_run_whose_steps_have_other_tokens_logs_both_numbers(
    saved: Path, changes: list[str], ranks: int, line: str | None
) -> None:
    request = resumed(saved, "--universal", *(f"--set=train.{change}" for change in changes))
    _, notes = resume.read_checkpoint(request, ranks)
    expected = [f"a step has {line}; train.accumulation can restore that"] if line else []
    assert [note for note in notes if "tokens" in note] == expected


@pytest.mark.parametrize(
    ("profile", "on_gpu"), [("demo", True), ("production", False), (None, False)]
)
def test_a_run_resumed_on_another_kind_of_machine_keeps_its_profile(
    saved: Path, profile: str | None, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one in env.json it has that of this machine."""
    (saved / "env.json").write_text(json.dumps({"profile": profile}))
    if on_gpu:
        monkeypatch.setattr(recipes, "get_accelerator", gpus)
    request = resumed(saved)
    assert request.profile == (profile or "demo")
    assert not any("ACCELERATOR" in note for note in request.notes)


def test_a_resumed_run_keeps_deepspeeds_config_of_its_checkpoint(saved: Path) -> None:
    save(saved, 4, resumed(saved, ds_config("zero2_pcie")).config_files())
    assert resumed(saved).zero_stage == 2
    assert resumed(saved, ds_config("zero1_pcie")).zero_stage == 1


def test_what_this_version_does_not_have_of_a_resumed_runs_settings_is_logged(saved: Path) -> None:
    newest = saved / "checkpoints/step00000003"
    settings = {name: (newest / name).read_text() for name in CONFIG_FILES}
    text = settings["config.yaml"].replace("  precision:", "  bad_steps: 7\n  precision:")
    save(saved, 4, settings | {"config.yaml": text})
    line = "train.bad_steps = 7: withdrawn in this version, which has 20"
    assert line in resumed(saved).notes


@pytest.mark.parametrize(("on_gpu", "profile"), [(True, "production"), (False, "demo")])
def test_a_new_run_is_that_of_production_on_an_accelerator(
    on_gpu: bool, profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if on_gpu:
        monkeypatch.setattr(recipes, "get_accelerator", gpus)
    flags = recipes.build_parser(RECIPE).parse_args(["--run-dir=~/run"])
    request = recipes.resolve_request(RECIPE, flags)
    assert (request.profile, request.run_dir) == (profile, tmp_path / "run")
    assert any("NO ACCELERATOR FOUND" in note for note in request.notes) != on_gpu


def test_another_profile_for_a_resumed_run_is_ignored_and_logged(saved: Path) -> None:
    request = resumed(saved, "--profile=production")
    assert request.profile == "demo"
    assert f"--profile production: {saved} keeps its own, demo" in request.notes
    assert not any("keeps its own" in note for note in resumed(saved, "--profile=demo").notes)


def test_a_run_that_another_recipe_resumes_keeps_its_recipes_name_and_settings(saved: Path) -> None:
    (saved / "env.json").write_text(json.dumps({"recipe": "large", "profile": "demo"}))
    request = resumed(saved)
    assert (request.recipe, request.profile) == ("large", "demo")
    assert f"small: {saved} keeps the settings of its own recipe, large" in request.notes
    (saved / "env.json").write_text(json.dumps({"recipe": "small"}))
    assert not any("its own recipe" in note for note in resumed(saved).notes)


def test_a_teacher_is_the_newest_checkpoint_that_its_run_has_now(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a resumed run could have another."""
    newest = saved / "checkpoints/step00000003"
    monkeypatch.setenv("HOME", str(saved.parent))  # no shell expands a ~ after --set
    request = small_request("--set=train.teacher=~/run", "--set=data.cache=~/tokens")
    assert request.config.train.teacher == str(newest)
    assert request.config.data.cache == str(saved.parent / "tokens")
    assert small_request("--set=train.teacher=/none").config.train.teacher == "/none"


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ("train.seed=7", True),
        ("data.source=synthetic", True),
        ("data.seq_len=16", True),
        ("data.held_out=0.3", True),
        ("data.packing=documents", False),
        ("data.timeout=9", False),
        ("data.on_error=skip", False),
        ("data.cache=tokens", False),
        ("train.clip=0.5", False),
        ("model.activation_checkpointing=none", False),
        ("attention.backend=blockwise", False),
    ],
)
def test_a_resumed_run_restarts_reordered_data(saved: Path, change: str, again: bool) -> None:
    assert resumed(saved, f"--set={change}").data_changed == again


def test_a_converted_model_brings_its_shape_its_tokenizer_and_its_length(tmp_path: Path) -> None:
    start, base = small("none"), RunConfig()
    start.data.tokenizer, start.data.seq_len = "hf:other", 64
    (tmp_path / "config.yaml").write_text(to_yaml(start))
    (tmp_path / "model.safetensors").touch()
    base.model.attention.selector_loss, base.model.activation_checkpointing = 0.5, "reentrant"
    attention = replace(start.model.attention, selector_loss=0.5)
    model = replace(start.model, attention=attention, activation_checkpointing="reentrant")
    for seq_len in (32, 128):
        base.data.seq_len = seq_len
        config = with_model_of_start(base, None, [f"train.start_from={tmp_path}"])
        assert config.model == model
        assert config.data == replace(base.data, tokenizer="hf:other", seq_len=min(seq_len, 64))
    with pytest.raises(ValueError, match=r"start_from = null: this recipe needs a model; set it"):
        with_model_of_start(base, None, [])
    start.model.attention.kind = "dense"
    (tmp_path / "config.yaml").write_text(to_yaml(start))
    with pytest.raises(ValueError, match="has dense attention; convert it: nsa import"):
        with_model_of_start(base, None, [f"train.start_from={tmp_path}"])


def test_a_run_starts_from_another_architecture_only_after_its_import(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    nowhere = RunConfig(train=TrainConfig(start_from="nowhere"))
    with pytest.raises(ValueError, match=r"start_from = 'nowhere': there is no such .*=null for"):
        resume.find_initial_weights(nowhere)
    config = RunConfig(train=TrainConfig(start_from=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"model_type = 'llama'\); convert it: nsa import"):
        resume.find_initial_weights(config)
    (tmp_path / "config.yaml").write_text("")  # as of an import
    assert resume.find_initial_weights(config) == tmp_path
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "nsa"}')
    assert resume.find_initial_weights(config) == tmp_path
