"""`auto`: micro-batch and activation checkpointing are planned, and kept by resumed runs."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nsa.engine import recipe as recipes
from nsa.engine.config import RunConfig, TrainConfig, resolve_config
from nsa.engine.ds_config import resolve_ds_config
from nsa.engine.micro_batch import batch_of, model_of, resolved_zero, zero_of
from nsa.engine.run_request import RunRequest
from nsa.planner.forecast import MODES, memory, required
from nsa.planner.inputs import Zero
from tests.engine.runs import load_profile
from tests.engine.small import gpus, small, small_request

GB = 1e9
pytestmark = pytest.mark.usefixtures("counted_once")
Production = Callable[..., RunRequest]  # the fixture `production`


@pytest.fixture
def production(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Production:
    """Request the production run of m7c.py on two GPUs of this many bytes, or without a GPU."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    profile = load_profile("m7c", "production")

    def request(gpu_memory: float | None, *flags: str) -> RunRequest:
        if gpu_memory is not None:
            monkeypatch.setattr(recipes, "get_accelerator", lambda: gpus(gpu_memory))
        return small_request(f"--run-dir={tmp_path / 'run'}", *flags, profile=lambda: profile)

    return request


def batch(one: RunRequest) -> str:
    """Micro-batch × accumulation, alike in both config files of a run."""
    train = yaml.safe_load(one.config_files()["config.yaml"])["train"]
    names = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    assert [one.ds_config[name] for name in names] == [train["micro_batch"], train["accumulation"]]
    assert one.ds_config["train_batch_size"] == 2 * train["micro_batch"] * train["accumulation"]
    return f"{train['micro_batch']}×{train['accumulation']}"


@pytest.mark.parametrize(
    ("memory", "flags", "expected"),
    [
        (80 * GB, [], "32×1"),
        (24 * GB, [], "16×2"),
        (1 * GB, [], "1×32"),
        (None, [], "1×32"),
        (24 * GB, ["--set=model.activation_checkpointing=reentrant"], "32×1"),
        (24 * GB, ["--set=train.accumulation=12"], "12×1"),
        (24 * GB, ["--set=train.micro_batch=4"], "4×8"),
        (24 * GB, ["--set=train.micro_batch=4", "--set=train.accumulation=3"], "4×3"),
    ],
)
def test_the_largest_that_fits_keeps_the_sequences_of_a_step(
    memory: float | None, flags: list[str], expected: str, production: Production
) -> None:
    one = production(memory, *flags)
    assert batch(one) == expected
    rows, _, accumulation = expected.partition("×")
    chosen = [note for note in one.notes if note.startswith("micro-batch: ")]
    assert len(chosen) == ("--set=train.micro_batch=4" not in flags), "a note on each choice"
    if chosen and memory:
        sequences = "1 sequence" if rows == "1" else f"{rows} sequences"
        assert f": {sequences}, accumulation {accumulation} (needs about " in chosen[0]
        assert ("so it does not fit" in chosen[0]) == (memory == GB)


@pytest.mark.parametrize(
    ("recipe", "settings", "expected"),
    [
        ((8, 4), ["micro_batch=auto"], ("auto", 32)),
        ((8, 4), ["micro_batch=auto", "accumulation=6"], ("auto", 6)),
        ((8, 4), ["accumulation=6", "micro_batch=auto"], ("auto", 6)),
        ((8, 4), ["micro_batch=2"], (2, 4)),
        ((8, 4), ["micro_batch=auto", "steps=9"], ("auto", 32)),
        (("auto", 32), ["micro_batch=32"], (32, 1)),
        (("auto", 32), ["micro_batch=32", "accumulation=32"], (32, 32)),
    ],
)
def test_changing_to_or_from_auto_keeps_a_step(
    recipe: tuple[int | str, int], settings: list[str], expected: tuple[int | str, int]
) -> None:
    train = TrainConfig(micro_batch=recipe[0], accumulation=recipe[1])
    changes = [f"train.{setting}" for setting in settings]
    resolved = resolve_config(RunConfig(train=train), None, changes).train
    assert (resolved.micro_batch, resolved.accumulation) == expected


def test_auto_over_a_file_keeps_the_files_step(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("train: {micro_batch: 3, accumulation: 5}")
    recipe = RunConfig(train=TrainConfig(micro_batch="auto", accumulation=32))
    train = resolve_config(recipe, file, ["train.micro_batch=auto"]).train
    assert (train.micro_batch, train.accumulation) == ("auto", 15)
    train = resolve_config(recipe, file).train
    assert (train.micro_batch, train.accumulation) == (3, 5)


@pytest.mark.parametrize(
    ("key", "number", "cause"),
    [
        ("train_micro_batch_size_per_gpu", 8, "train.micro_batch = auto"),
        ("gradient_accumulation_steps", 4, "train.accumulation = 32"),
        ("train_batch_size", 16, "train.micro_batch × train.accumulation × ranks = 1 × 32 × 2"),
    ],
)
def test_a_number_in_deepspeeds_json_does_not_go_with_auto(
    key: str, number: int, cause: str, tmp_path: Path, production: Production
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, key: number}))
    with pytest.raises(ValueError, match=r".") as caught:
        production(24 * GB, f"--deepspeed_config={file}")
    assert str(caught.value).startswith(f"{file}: {key} = {number}, but {cause}")


@pytest.mark.parametrize("value", [5, 64])
def test_a_micro_batch_that_does_not_divide_a_step_is_refused(value: int) -> None:
    recipe = RunConfig(train=TrainConfig(micro_batch="auto", accumulation=32))
    message = f"train.micro_batch = {value}: does not divide the recipe's 32 sequences"
    with pytest.raises(ValueError, match=message):
        resolve_config(recipe, None, [f"train.micro_batch={value}"])


def test_stage_3_gathers_weights_that_cannot_stay_twice_and_shards_no_small_ones() -> None:
    config = small()
    sizes = model_of(config).sizes

    def planned(**zero: int) -> Zero:
        raw = {"zero_optimization": {"stage": 3} | {f"stage3_{key}": n for key, n in zero.items()}}
        return resolved_zero(resolve_ds_config(raw, config, world_size=2), config)

    default = planned()
    assert (default.persistent, default.persistent_tensors) == (sum(sizes), len(sizes))
    assert (default.gathers, default.prefetch) == (1, 5e7)  # DeepSpeed's default
    largest = max(sizes)
    assert planned(param_persistence_threshold=largest).persistent == sum(sizes)
    some = planned(param_persistence_threshold=largest - 1)
    assert some.persistent == sum(size for size in sizes if size < largest)
    assert planned(max_live_parameters=sum(sizes)).gathers == 1
    assert planned(max_live_parameters=sum(sizes) - 1).gathers == 2
    assert planned(max_reuse_distance=3 * sum(sizes) - 1).gathers == 2


def test_gradients_are_planned_in_the_dtype_in_which_they_are_reduced() -> None:
    for more, reduce_bytes in (({}, 2), ({"communication_data_type": "fp32"}, 4)):
        raw = {"zero_optimization": {"stage": 0, "reduce_bucket_size": 9}} | more
        zero = resolved_zero(resolve_ds_config(raw, small(), world_size=2), small())
        assert (zero.reduce_bytes, zero.accumulate_bytes, zero.bucket) == (reduce_bytes, 2, 0)
    assert model_of(small()).weight_bytes == 2
    assert model_of(RunConfig(train=TrainConfig(precision="fp32"))).weight_bytes == 4


def mode_and_note(one: RunRequest) -> tuple[str, str]:
    """The mode in the run folder's config.yaml, and the lines of the log that name it."""
    written = yaml.safe_load(one.config_files()["config.yaml"])
    mode = written["model"]["activation_checkpointing"]
    assert mode == one.config.model.activation_checkpointing
    return mode, "\n".join(x for x in one.notes if x.startswith("activation checkpointing"))


def needed(mode: str) -> float:
    """Bytes of GPU memory that the production run needs in this mode, on two ranks."""
    config = load_profile("m7c", "production")
    zero = zero_of(recipes.DEFAULT_DS_CONFIG, config, 2)
    batch = replace(batch_of(config), checkpointing=mode)
    return required(memory(model_of(config), zero, batch, 2))


def test_80_gb_need_no_recomputation() -> None:
    assert needed("reentrant") < needed("selective") < needed("none") < 80e9


@pytest.mark.parametrize(
    ("memory", "flags", "mode", "note"),
    [
        *((m, [], m, rf"{m} \(needs about .*; (?!.*lower)") for m in ("none", "selective")),
        ("reentrant", [], "reentrant", r"reentrant \(needs about .*; (?!.*lower)"),
        (3e9, [], "reentrant", r".*; does not fit: lower train\.micro_batch\)$"),
        (None, [], "none", r"none \(there is no GPU\)$"),
        (80e9, ["--set=model.activation_checkpointing=reentrant"], "reentrant", None),
    ],
)
def test_production_takes_the_fastest_mode_that_fits_and_logs_why(
    memory: float | str | None,
    flags: list[str],
    mode: str,
    note: str | None,
    production: Production,
) -> None:
    """`memory` is in bytes, or as much as a mode needs; a mode that is set is kept."""
    if isinstance(memory, str):
        memory = 1.0001 * needed(memory)
    one = production(memory, *flags)
    taken, logged = mode_and_note(one)
    assert taken == mode
    if note is None:
        assert logged == ""
    else:
        assert re.match(f"activation checkpointing: {note}", logged), logged
    if memory and note:
        figures = re.findall(r"(?:needs about|(\w+) would need) ([\d.]+)", logged)
        assert [name or taken for name, _ in figures] == [taken, *(x for x in MODES if x != taken)]
        assert len({figure for _, figure in figures}) == 3


def test_a_resumed_run_keeps_its_mode_on_any_gpu(tmp_path: Path, production: Production) -> None:
    (tmp_path / "run").mkdir()
    for name, text in production(1.001 * needed("selective")).config_files().items():
        (tmp_path / "run" / name).write_text(text)
    assert mode_and_note(production(80e9, "--resume")) == ("selective", "")
