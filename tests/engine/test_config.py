"""Config resolution: recipe < --config < --set, an error for every mistake; the schedule."""

import math
import re
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nsa.engine.config import RunConfig, TrainConfig, learning_rate, resolve_config, to_yaml, walk
from nsa.spec import NSASpec
from tests.engine.runs import load_profile


def test_set_overrides_the_file_and_the_file_overrides_the_recipe(tmp_path: Path) -> None:
    recipe = RunConfig()
    recipe.train.steps, recipe.train.seed, recipe.train.clip = 10, 11, 0.5
    file = tmp_path / "more.yaml"
    file.write_text("train:\n  seed: 21\n  steps: 20\n")
    config = resolve_config(recipe, file, ["train.steps=29", "train.steps=30", "data.pattern=a=b"])
    assert (config.train.steps, config.train.seed, config.train.clip) == (30, 21, 0.5)
    assert config.data.pattern == "a=b"
    assert recipe.train.steps == 10, "the recipe is not modified"


def test_attention_is_short_for_model_attention(tmp_path: Path) -> None:
    file = tmp_path / "dense.yaml"
    file.write_text("attention:\n  kind: dense\n")
    assert resolve_config(RunConfig(), file).model.attention.kind == "dense"
    config = resolve_config(RunConfig(), None, ["attention.spec.window=128", "model.layers=2"])
    assert config.model.attention.spec.window == 128
    assert config.model.layers == 2


def test_a_mixture_is_one_value_with_free_keys_and_is_saved_as_one(tmp_path: Path) -> None:
    changes = ["data.source={/data/a.b: 3, hf:c: 1}", "train.learning_rate=3e-4"]
    config = resolve_config(RunConfig(), None, changes)
    assert config.data.sources() == {"/data/a.b": 0.75, "hf:c": 0.25}
    assert config.train.learning_rate == 3e-4
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert resolve_config(RunConfig(), file) == config
    overridden = resolve_config(config, None, ["data.source={embedded: 1}"])
    assert overridden.data.sources() == {"embedded": 1.0}, "a mixture is overridden as a whole"
    llama = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config.model.rope_type = "llama3"
    config.model.rope_extension = llama | {"original_max_position_embeddings": 16.0}
    changes = ["model.rope_type=linear", "model.rope_extension={factor: 2}"]
    assert resolve_config(config, None, changes).model.rope_extension == {"factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ("kind: dense", ("pool", 0.0)),
        ("branches: cmp+win", ("pool", 0.0)),
        ("branches: sel", ("pool", 1.0)),
        ("branches: sel+win", ("mean", 0.0)),
        ("branches: win", ("mean", 0.0)),
        ("selector_loss: 0.5", ("pool", 0.5)),
        ("kind: nsa", ("pool", 1.0)),
        ("branches: cmp+sel+win", ("pool", 1.0)),
        ("branches: cmp+sel", ("pool", 0.0)),
    ],
)
def test_other_branches_do_without_what_the_recipe_has_for_all_three(
    tmp_path: Path, changes: str, expected: tuple[str, float]
) -> None:
    recipe = load_profile("m7c", "demo")
    file = tmp_path / "changes.yaml"
    file.write_text(f"attention:\n  {changes}\n")
    for config in (
        resolve_config(recipe, None, [f"attention={{{changes}}}"]),
        resolve_config(recipe, file),
        resolve_config(recipe, file, ["train.steps=5"]),
    ):
        attention = config.model.attention
        assert (attention.compressor, attention.selector_loss) == expected
        one_set = attention.kind == "dense" or attention.has_index
        assert config.train.value_rate == (0.5 if one_set else 1.0)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("kind: dense", "selector_loss: 1"), r"selector_loss = 1\.0: needs kind nsa"),
        (("branches: cmp+win", "selector_loss: 0.5"), r"selector_loss = 0\.5: needs kind nsa"),
        (("branches: win", "compressor: pool"), r"compressor = 'pool': gets no gradient"),
        (("branches: sel", "compressor: mlp"), r"compressor = 'mlp': compresses keys with values"),
        (("branches: sel", "selector_loss: 0"), r"selector_loss = 0: nothing else trains the"),
        (("branches: sel", "spec: {window: 128}"), r"window = 128: .* set local_blocks"),
        (("branches: sel", "spec: {select_top: 5}"), r"select_top = 5: leaves the index nothing"),
        (
            ("kind: nsa", "spec: {select_top: 2}"),
            r"^model\.attention\.spec\.select_top = 2 is less than",
        ),
    ],
)
def test_what_is_given_beside_other_branches_is_refused(
    tmp_path: Path, given: tuple[str, str], problem: str
) -> None:
    recipe = load_profile("m7c", "demo")
    file = tmp_path / "changes.yaml"
    file.write_text(f"attention:\n  {given[0]}\n  {given[1]}\n")
    with pytest.raises(ValueError, match=problem):
        resolve_config(recipe, file)
    with pytest.raises(ValueError, match=problem):
        resolve_config(recipe, None, [f"attention={{{part}}}" for part in given])


def test_an_index_is_trained_unless_that_is_set_otherwise() -> None:
    """Of a config without the selector loss, as the library's default is."""
    attention = resolve_config(RunConfig(), None, ["attention.branches=sel"]).model.attention
    assert (attention.selector_loss, attention.compressor) == (1.0, "mean")


def test_a_window_beside_an_index_is_refused_even_if_it_is_the_default() -> None:
    """A config that was saved has one, and is read back."""
    recipe = load_profile("m7c", "demo")
    config = resolve_config(recipe, None, ["attention.branches=sel"])
    assert config.model.attention.spec.window == NSASpec.window
    with pytest.raises(ValueError, match=r"spec\.window = 512: branches=sel has no window"):
        resolve_config(recipe, None, ["attention.branches=sel", "attention.spec.window=512"])


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("train.lerning_rate=1", ["train.lerning_rate", "did you mean train.learning_rate?"]),
        ("trian.steps=1", ["trian", "train"]),
        ("attention.window=64", ["did you mean model.attention.spec.window?"]),
        ("zzz=64", ["choose one of model, data, train, monitor, checkpoint, attention"]),
        ("train.seqlen=3", ["did you mean data.seq_len?"]),
        ("learning_rate=1", ["did you mean train.learning_rate?"]),
        ("train.steps", ["path.to.key=value"]),
        ("train=3", ["train", "section"]),
        ("train.steps=2.5", ["train.steps", "2.5", "a whole number"]),
        ("train.steps=1e3", ["train.steps = '1e3'", "a whole number; write 1000"]),
        ("train.steps=true", ["train.steps", "True"]),
        (f"train.seed={2**62 + 1}", ["train.seed", f"is too large; make it at most {2**62}"]),
        ("train.learning_rate=fast", ["train.learning_rate", "'fast'", "a number"]),
        ("train.learning_rate=-1", ["train.learning_rate", "-1"]),
        ("train.clip=true", ["train.clip = True: must be a number"]),
        ("train.value_rate=0", ["train.value_rate = 0", "above 0"]),
        ("train.precision=fp8", ["train.precision", "fp8", "bf16"]),
        ("train.accumulation=010", ["--set train.accumulation=010: ", "'010' is 8 in YAML 1.1"]),
        ("train.steps=0o17", ["train.steps = '0o17': must be a whole number"]),
        ("data.timeout=1e10", ["data.timeout = 10000000000.0: must be 604,800 or less"]),
        ("monitor.csv=1", ["monitor.csv", "1", "true or false"]),
        ("data.source={a: 1", ["--set data.source={a: 1", "not YAML"]),
        ("data.source={a:0.7, b:0.3}", ["data.source", "a space after each colon"]),
        ("data.source={a: 0}", ["data.source", "'a' weighs 0"]),
        ("data.source={a: 2, b: -1}", ["data.source", "'b' weighs -1"]),
        ("data.source=", ["data.source", "text or names with weights"]),
        ("data.source={}", ["data.source = {}: name one, such as embedded"]),
        ("data.seq_len=16777217", ["data.seq_len = 16777217: must be 16,777,216 or less"]),
        ("data.tokenizer=gpt2", ["data.tokenizer", "'gpt2'", "hf:gpt2"]),
        ("data.held_out=1", ["data.held_out", "1", "between 0 and 1"]),
        ("data.held_out=0", ["data.held_out = 0.0", "between 0 and 1"]),
        ("data.timeout=0", ["data.timeout = 0.0: must be above 0"]),
        ("data.packing=none", ["data.packing = 'none': choose one of documents, concat"]),
        ("data.on_error=warn", ["data.on_error = 'warn': choose one of stop, skip"]),
        ("monitor.watch.on_collapse=end", ["on_collapse = 'end': choose one of ignore, warn"]),
        ("data.tokenizer='hf: '", ["data.tokenizer = 'hf: ': choose byte, or hf:<name"]),
        ('data.source="a\\0b"', ["data.source = 'a\\x00b': has a NUL character"]),
        ("model.value_dim=x", ["model.value_dim", "null"]),
        ("train.weight_decay=1" + "0" * 400, ["train.weight_decay", "a finite number"]),
        ("train.steps=1" + "0" * 30, ["train.steps", "too large"]),
        ("train.steps=1" + "0" * 5000, ["--set train.steps", "not YAML"]),
        ("train.accumulation=1000000000000", ["train.accumulation", "65,536 or less"]),
        ("data.files=a.parquet", ["data.files is withdrawn in this version; set data.pattern"]),
        ("model.layers=1000000000", ["model.layers", "1,024 or less"]),
        ("train=" + "[" * 1500, ["--set train=", "nested too deeply"]),
        ("train={seed: 1, steps: 5, steps: 6}", ["'steps' is written twice"]),
    ],
)
def test_an_error_names_setting_value_and_fix(assignment: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        resolve_config(RunConfig(), None, [assignment])
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 800, "of the longest values, the beginning"


LEAST = {
    "train": {"steps": 1, "accumulation": 1, "eval_samples": 1}
    | {"micro_batch": 1, "dense_steps": 0, "warmup_steps": 0, "eval_every": 0, "clip": 0}
    | {"weight_decay": 0, "min_learning_rate": 0, "seed": 0, "selector_steps": 0},
    "data": {"seq_len": 1},
    "checkpoint": {"every": 0, "keep": 0},
    "monitor": {"log_every": 1, "memory_every": 0},
    "monitor.watch": {"setup": 0, "compute": 0, "save": 0, "silence": 0},
    "monitor.ladder": {"min_tokens_per_s": 0, "max_memory_gb": 0, "min_recall": 0},
}


@pytest.mark.parametrize(
    ("name", "least"),
    [(f"{section}.{name}", least) for section in LEAST for name, least in LEAST[section].items()],
)
def test_a_number_below_the_least_of_its_setting_is_refused(name: str, least: int) -> None:
    refusal = rf"^{re.escape(name)} = -?\d(\.0)?: must be {least} or more$"
    with pytest.raises(ValueError, match=refusal):
        resolve_config(RunConfig(), None, [f"{name}={least - 1}"])
    section, _, setting = name.rpartition(".")
    config: Any = RunConfig()
    for part in section.split("."):
        config = getattr(config, part)
    setattr(config, setting, least)
    config.validate()


def test_a_setting_may_be_its_limit_and_is_never_nan_nor_a_number_of_another_kind() -> None:
    for value in (2.0, True, "2"):
        config = RunConfig()
        config.model.layers = value  # type: ignore[assignment]
        with pytest.raises(ValueError, match=rf"model\.layers = {value!r}: must be a whole number"):
            config.validate()
    assert resolve_config(RunConfig(), None, ["data.timeout=604800"]).data.timeout == 604_800
    assert resolve_config(RunConfig(), None, [f"train.seed={2**62}"]).train.seed == 2**62
    for name, least in (("clip", "0 or more"), ("value_rate", "above 0")):
        config = RunConfig()  # built in Python
        setattr(config.train, name, math.nan)
        with pytest.raises(ValueError, match=rf"train\.{name} = nan: must be {least}"):
            config.validate()


@pytest.mark.parametrize(("smoke", "extended"), [(1, 9), (9, 9), (9, 8)])
def test_gates_that_do_not_follow_each_other_are_refused(smoke: int, extended: int) -> None:
    ladder = [f"monitor.ladder.smoke={smoke}", f"monitor.ladder.extended={extended}"]
    with pytest.raises(ValueError, match=rf"smoke = {smoke}, extended = {extended}: each must be"):
        resolve_config(RunConfig(), None, ladder)


def test_an_unreadable_config_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        resolve_config(RunConfig(), tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("# nothing is set\n")
    assert resolve_config(RunConfig(), broken) == RunConfig()
    broken.write_text("[1, 2]\n")
    with pytest.raises(ValueError, match=r"broken\.yaml: holds \[1, 2\]; write sections with keys"):
        resolve_config(RunConfig(), broken)
    broken.write_text("train: [1\n")
    with pytest.raises(ValueError, match="not YAML"):
        resolve_config(RunConfig(), broken)
    broken.write_text("train: {warmup_steps: 1:30}\n")
    with pytest.raises(ValueError, match=r"broken\.yaml: not YAML: '1:30' is 90 in .* line 1"):
        resolve_config(RunConfig(), broken)
    broken.write_text("train: {micro_batch: auto, accumulation: many}\n")
    with pytest.raises(ValueError, match=r"train\.accumulation = 'many': must be a whole number"):
        resolve_config(RunConfig(), broken, ["train.micro_batch=4"])
    with pytest.raises(ValueError, match=r"Is a directory.*; give a YAML file"):
        resolve_config(RunConfig(), tmp_path)


def test_every_number_of_the_tree_must_be_finite() -> None:
    numbers = [
        name
        for name, value in walk(asdict(RunConfig()))
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    assert len(numbers) > 40
    for name in numbers:
        for value in (".inf", "-.inf", ".nan"):
            with pytest.raises(ValueError, match=rf"{re.escape(name)} = .* number"):
                resolve_config(RunConfig(), None, [f"{name}={value}"])


@pytest.mark.parametrize(
    ("changes", "warmup"),
    [
        (["train.steps=10"], 1),
        (["train.steps=40"], 2),
        (["train.steps=3125"], 125),
        (["train.steps=50000"], 2_000),
        (["train.steps=100", "train.warmup_steps=30"], 30),
        (["train.seed=3"], 2_000),
    ],
)
def test_the_warmup_keeps_its_part_unless_it_is_set(changes: list[str], warmup: int) -> None:
    recipe = RunConfig()
    assert (recipe.train.steps, recipe.train.warmup_steps) == (50_000, 2_000)
    assert resolve_config(recipe, None, changes).train.warmup_steps == warmup
    recipe.train.warmup_steps = 0
    assert resolve_config(recipe, None, ["train.steps=20"]).train.warmup_steps == 0


TRAIN = TrainConfig(steps=1_000, warmup_steps=100, learning_rate=1.0, min_learning_rate=0.1)


def test_warmup_is_linear_and_starts_above_0() -> None:
    rates = [learning_rate(step, TRAIN) for step in range(100)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[99] == pytest.approx(1.0)
    assert all(b - a == pytest.approx(0.01) for a, b in pairwise(rates))


def test_the_cosine_falls_from_the_peak_to_the_minimum() -> None:
    rates = [learning_rate(step, TRAIN) for step in range(99, 1_000)]
    assert all(b <= a for a, b in pairwise(rates))
    assert learning_rate(550, TRAIN) == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[-1] == pytest.approx(0.1, abs=1e-4)
    constant = replace(TRAIN, min_learning_rate=TRAIN.learning_rate)
    constant.validate()
    assert {learning_rate(step, constant) for step in range(100, 1_000)} == {1.0}


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("steps", [1, 2, 7, 8])
def test_no_step_has_a_rate_of_0(warmup: int, steps: int) -> None:
    train = TrainConfig(steps=steps, warmup_steps=warmup, min_learning_rate=0.0)
    rates = [learning_rate(step, train) for step in range(steps)]
    assert min(rates) > 0
    assert all(math.isfinite(rate) for rate in rates)


def test_the_schedule_begins_after_the_selectors_steps() -> None:
    later = replace(TRAIN, steps=1_005, selector_steps=5, selector_rate=3e-3)
    assert [learning_rate(step, later) for step in range(5)] == [3e-3] * 5
    for step in range(1_000):
        assert learning_rate(step + 5, later) == learning_rate(step, TRAIN)
