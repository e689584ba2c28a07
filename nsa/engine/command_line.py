"""Command line of every recipe: its flags, and how they resolve to a RunRequest."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from nsa.checkpoint.weights import find_weights
from nsa.constants import SHORT_RUN
from nsa.data.builtin import embedded_note
from nsa.data.source import absolute_source
from nsa.dtypes import DTYPES
from nsa.engine.config import AUTO, RunConfig
from nsa.engine.ds_config import has_muon, leave_to_recipe, load_ds_config, resolve_ds_config
from nsa.engine.load_run import dataset_vocabulary, read_config
from nsa.engine.micro_batch import resolve_auto, resolved_zero
from nsa.engine.resolve import read_saved_config, resolve_config, scaled_warmup, walk
from nsa.engine.resume import find_initial_weights
from nsa.engine.run_dir import choose_run_dir, find_saved
from nsa.engine.run_request import Recipe, RunRequest
from nsa.engine.shutdown import parse_time
from nsa.gates.results import until_step
from nsa.model.config import ModelConfig
from nsa.model.count import parameter_count
from nsa.monitor.artifacts import read_json
from nsa.monitor.profile import parse_steps
from nsa.resources import existing_or_resource, resource_path
from nsa.system import available_memory
from nsa.validation import Parser

DEFAULT_DS_CONFIG = resource_path("ds_configs/zero1_pcie.json")


def build_parser(recipe: Recipe) -> Parser:
    """Return the parser of a recipe's flags."""
    parser = Parser(
        prog=f"{recipe.name}.py",
        allow_abbrev=False,
        description=recipe.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Precedence: recipe < --config < --set. DeepSpeed settings: --deepspeed_config.",
    )
    add = parser.add_argument
    about = "set of values (default: production on an accelerator, demo without one)"
    add("--profile", choices=sorted(recipe.profiles), help=about)
    add("--steps", type=int, help="number of training steps; also the length of the LR schedule")
    about = "stop after this step or go/no-go gate (preflight, sanity, smoke, extended, "
    about += "production); the LR schedule is unchanged"
    add("--until", metavar="STEP|GATE", help=about)
    add("--time-limit", metavar="TIME", help="save and exit after this time: 45m, 2h30m, seconds")
    add("--run-dir", type=Path, help="output folder (default: runs/<recipe>-<profile>)")
    add("--resume", action="store_true", help="resume from the newest checkpoint in the run folder")
    about = "with --resume: convert a checkpoint saved by another number of ranks"
    add("--universal", action="store_true", help=about)
    add("--config", type=Path, help="YAML file that overrides the recipe")
    about = "override one setting, e.g. train.learning_rate=3e-4; repeatable"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=about)
    about = "DeepSpeed JSON (default: ds_configs/zero1_pcie.json)"
    add("--deepspeed_config", type=existing_or_resource, help=about)
    add("--profile-steps", metavar="10-12", help="trace these steps into <run>/profile")
    about = "build everything, run one step on random tokens, print a summary and exit"
    add("--dry-run", action="store_true", help=about)
    add("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def resolve_request(recipe: Recipe, flags: argparse.Namespace) -> RunRequest:
    """Resolve and validate the flags, without a process group; raise ValueError on a mistake."""
    profile, notes = _choose_profile(flags.profile)
    run_dir = choose_run_dir(flags.run_dir, f"{recipe.name}-{profile}", flags.resume)
    checkpoint, saved, more = find_saved(run_dir) if flags.resume else (None, None, [])
    if saved is not None:
        base, withdrawn = read_saved_config(saved / "config.yaml")
        profile, notes = _saved_profile(run_dir, profile, flags.profile)
        notes += withdrawn
    else:
        base = recipe.profiles[profile]()
        if recipe.model_of_start:
            base = with_model_of_start(base, resolve_config(base, flags.config, flags.set))
    notes += more
    overrides = flags.set + ([] if flags.steps is None else [f"train.steps={flags.steps}"])
    config = resolve_config(base, flags.config, overrides)
    vocab_size, before = dataset_vocabulary(config.data), config.model.vocab_size
    if vocab_size and saved is None and config.train.start_from is None:
        base = replace(base, model=replace(base.model, vocab_size=vocab_size))
        config = resolve_config(base, flags.config, overrides)  # which --config and --set override
        if config.model.vocab_size != before:
            notes.append(
                f"model.vocab_size = {vocab_size} instead of {before}: the ids of "
                f"{config.data.source_names()}, rounded up to a multiple of 64"
            )
    # Absolute, so that the run resumes from any folder. A resumed run keeps the path as its config
    # spells it, because checkpoints store the cursors of streams under that.
    source = absolute_source(config.data.source)
    unchanged = saved is not None and source == absolute_source(base.data.source)
    config.data.source = base.data.source if unchanged else source
    if config.train.teacher is not None:
        config.train.teacher = _pinned(config.train.teacher)
    changes: dict[str, tuple[Any, Any]] = {}
    if saved is not None:
        changes = _changes(base, config)
        for name, (before, after) in changes.items():
            _check_change(name, before, after, run_dir)
            notes.append(f"changed since {saved.name}: {name}: {before} -> {after}")
    warmup = scaled_warmup(base.train.warmup_steps, base.train.steps, config.train.steps)
    if config.train.warmup_steps == warmup != base.train.warmup_steps:
        notes.append(
            f"train.warmup_steps = {warmup}, scaled with train.steps: "
            f"{base.train.warmup_steps:,} of {base.train.steps:,}"
        )
    notes += _warnings(config, auto=base.train.dense_steps == AUTO)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    _check_precision(config.train.precision)
    _check_memory(config.model)
    _check_world_size(config.train.sequence_parallel, world_size)
    gpu_memory, fits = _gpu_memory(), config.train.micro_batch == AUTO
    path, raw = _load_ds_config(flags.deepspeed_config, saved)
    config, ds_config, more = _resolve_auto(config, raw, path, world_size, gpu_memory)
    notes += more
    if has_muon(ds_config):
        notes.append("Muon: the first step compiles its update, a minute or more without output")
    if config.train.compile:
        _check_compile(config, ds_config["zero_optimization"])
    stop_step = config.train.steps
    if flags.until is not None:
        stop_step = until_step(flags.until, config.monitor.ladder, config.train.steps)
    if flags.universal and not flags.resume:
        raise ValueError("--universal: requires --resume; add it")
    return RunRequest(
        recipe=recipe.name,
        profile=profile,
        config=config,
        ds_config=ds_config,
        run_dir=run_dir,
        resume=flags.resume,
        checkpoint=checkpoint,
        resumed_config=None if saved is None else base,
        data_changed=any(map(_determines_data, changes)),
        stop_step=stop_step,
        notes=notes,
        time_limit=None if flags.time_limit is None else parse_time(flags.time_limit),
        profile_steps=None if flags.profile_steps is None else parse_steps(flags.profile_steps),
        fits_micro_batch=fits and gpu_memory is not None,
        universal=flags.universal,
    )


def _pinned(path: str) -> str:
    """Return the newest checkpoint of a run, so that a resumed run has the same teacher."""
    full = Path(path).expanduser().absolute()
    with contextlib.suppress(ValueError):  # `find_teacher` raises it, with the setting's name
        full = find_weights(full)
    return str(full)


def with_model_of_start(base: RunConfig, config: RunConfig) -> RunConfig:
    """Return the recipe's config with shape, tokenizer and length of `config.train.start_from`."""
    weights = find_initial_weights(config)
    if weights is None:
        raise ValueError("train.start_from = null: this recipe needs a model; set it to a folder")
    start = read_config(weights)
    if start.model.attention.kind != "nsa":
        raise ValueError(
            f"train.start_from = {str(weights)!r}: has dense attention; convert it: nsa import "
            f"{config.train.start_from} --to runs/nsa-start --attention nsa"
        )
    start.model.attention.selector_loss = base.model.attention.selector_loss
    start.model.activation_checkpointing = base.model.activation_checkpointing
    data = replace(
        base.data,
        tokenizer=start.data.tokenizer,
        seq_len=min(base.data.seq_len, start.data.seq_len),
    )
    return replace(base, model=start.model, data=data)


def _choose_profile(requested: str | None) -> tuple[str, list[str]]:
    """Return the profile, and a note if it is `demo` for lack of an accelerator."""
    if requested is not None:
        return requested, []
    if get_accelerator().device_name() != "cpu":
        return "production", []
    return "demo", [
        "NO ACCELERATOR FOUND: running the `demo` profile, few steps on short sequences, instead "
        "of `production`; --profile production overrides this"
    ]


def _saved_profile(run_dir: Path, chosen: str, requested: str | None) -> tuple[str, list[str]]:
    """Return the profile that a resumed run began with, and a note if another one is requested."""
    saved = read_json(run_dir / "env.json").get("profile")
    if not isinstance(saved, str):
        return chosen, []
    ignored = requested not in (None, saved)
    return saved, [f"--profile {requested}: {run_dir} keeps its own, {saved}"] * ignored


def _load_ds_config(given: Path | None, saved: Path | None) -> tuple[Path, dict[str, Any]]:
    """Return path and content of DeepSpeed's JSON; without a flag, a resumed run keeps its own."""
    if given is not None or saved is None:
        path = given or DEFAULT_DS_CONFIG
        return path, load_ds_config(path)
    path = saved / "ds_config.json"
    return path, leave_to_recipe(load_ds_config(path))


def _resolve_auto(
    config: RunConfig, raw: dict[str, Any], source: Path, ranks: int, gpu_memory: float | None
) -> tuple[RunConfig, dict[str, Any], list[str]]:
    """Replace each "auto"; return config, DeepSpeed's config and lines for the log."""
    resolve = partial(resolve_ds_config, raw, world_size=ranks, source=str(source))
    ds_config, notes = resolve(config), list[str]()
    if AUTO in (config.train.micro_batch, config.model.activation_checkpointing):
        zero = resolved_zero(ds_config, config)
        config, batch_notes, mode_notes = resolve_auto(config, zero, ranks, gpu_memory)
        ds_config, notes = resolve(config), [*batch_notes, *mode_notes]
    return config, ds_config, notes


def _gpu_memory() -> float | None:
    """Return the bytes of this node's smallest GPU, so that its ranks agree; None without one."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return None
    return min(accelerator.total_memory(i) for i in range(accelerator.device_count()))


def _warnings(config: RunConfig, auto: bool) -> Iterator[str]:
    """Yield a line for the log for each setting that is probably a mistake or a surprise.

    `auto`: the recipe's train.dense_steps is.
    """
    train = config.train
    if train.warmup_steps >= train.steps:
        yield (
            f"train.warmup_steps = {train.warmup_steps}: not below train.steps = {train.steps}, so "
            "the learning rate never decays; lower train.warmup_steps"
        )
    if note := config.selects_all_note():
        yield note
    if "embedded" in config.data.sources() and (note := embedded_note()):
        yield note
    if train.switch_step:
        yield (
            f"attention is dense in the first {train.switch_step:,} of {train.steps:,} steps "
            "(train.dense_steps); nothing is selected in them, so selection.csv and the gates' "
            "curves begin after them"
        )
        if not config.model.attention.selector_loss:
            yield (
                f"train.dense_steps = {train.switch_step}: without the selector loss compressed "
                "keys learn nothing in them; set model.attention.selector_loss=1"
            )
    elif auto and config.model.attention.kind == "nsa":
        yield (
            "attention is sparse from the first step: train.dense_steps=auto needs the selector "
            f"loss, new weights and {SHORT_RUN} steps"
        )


def _changes(saved: RunConfig, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the values before and after of each setting that differs, by name."""
    before, after = (
        {name: value for name, value in walk(asdict(one)) if not isinstance(value, dict)}
        for one in (saved, config)
    )
    pairs = {name: (before.get(name), after.get(name)) for name in sorted(before | after)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _check_change(name: str, before: Any, after: Any, run_dir: Path) -> None:
    """Refuse to resume with a change that does not fit the checkpoints."""
    fixed = name.startswith("model.") or name == "train.sequence_parallel"
    changeable = ("activation_checkpointing", "attention.backend", "attention.selector_loss")
    if fixed and name.removeprefix("model.") not in changeable:
        raise ValueError(
            f"{name} = {after!r}: {run_dir} was created with {before!r}; drop the change, or start "
            "a fresh run in another folder"
        )


def _determines_data(name: str) -> bool:
    """Return whether a setting determines the training tokens and their order."""
    irrelevant = ("data.packing", "data.timeout", "data.on_error")
    return name == "train.seed" or (name.startswith("data.") and name not in irrelevant)


def _check_compile(config: RunConfig, zero: dict[str, Any]) -> None:
    """Refuse settings with which compiled blocks fail, or compile again in each step."""
    model, ranks = config.model, config.train.sequence_parallel
    problems = {
        "model.activation_checkpointing = selective, which saves operators that compiling fuses": (
            model.activation_checkpointing == "selective",
            "set model.activation_checkpointing=reentrant or none",
        ),
        "dense attention over packed documents, which has new shapes in each step": (
            model.attention.kind == "dense" and config.data.packing == "documents",
            "set data.packing=concat",
        ),
        f"train.sequence_parallel = {ranks}, which exchanges tokens within a block": (
            ranks > 1,
            "set train.sequence_parallel=1",
        ),
        # Stage 3 gathers weights in hooks of every module. DeepSpeed before 0.19.5 reused a bucket
        # of overlap_comm too early under torch.compile.
        "ZeRO stage 3 or overlap_comm, which no test covers": (
            zero["stage"] > 2 or bool(zero.get("overlap_comm")),
            "use ds_configs/zero1_pcie.json or zero2_pcie.json",
        ),
    }
    for problem, (applies, fix) in problems.items():
        if applies:
            raise ValueError(f"train.compile = true: not with {problem}; {fix}")


def _check_precision(precision: str) -> None:
    accelerator = get_accelerator()
    supported = [name for name, dtype in DTYPES.items() if dtype in accelerator.supported_dtypes()]
    if precision not in supported:
        raise ValueError(
            f"train.precision = {precision!r}: DeepSpeed does not support it on "
            f"{accelerator.device_name()} here; set train.precision to {' or '.join(supported)}"
        )


def _check_memory(model: ModelConfig) -> None:
    """Refuse weights that do not fit: every rank builds them in the host's memory, in float32."""
    ranks, available = int(os.environ.get("LOCAL_SIZE", 1)), available_memory()
    needed = 4 * parameter_count(model) * ranks
    if needed > available:
        raise ValueError(
            f"model.width = {model.width}, model.layers = {model.layers}: the weights alone take "
            f"{needed / 1e9:,.1f} GB on {ranks} ranks of this machine, which has "
            f"{available / 1e9:,.1f} GB available; make the model smaller"
        )


def _check_world_size(sequence_parallel: int, world_size: int) -> None:
    if world_size % sequence_parallel:
        raise ValueError(
            f"train.sequence_parallel = {sequence_parallel}: does not divide the world size, "
            f"{world_size}; launch a multiple of it (deepspeed --num_gpus {sequence_parallel}), or "
            "set train.sequence_parallel=1"
        )
