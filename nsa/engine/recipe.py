"""Entry point of every recipe: its flags, how they resolve to a RunRequest, and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from deepspeed.accelerator import get_accelerator

from nsa.checkpoint.weights import find_weights
from nsa.constants import SHORT_RUN
from nsa.data.source import absolute_source
from nsa.data.writer import WorkerDied
from nsa.dtypes import DTYPES
from nsa.engine.config import (
    AUTO,
    RunConfig,
    read_saved_config,
    resolve_config,
    scaled_warmup,
    walk,
)
from nsa.engine.ds_config import block_of, leave_to_recipe, load_ds_config, resolve_ds_config
from nsa.engine.load_run import dataset_vocabulary, read_config
from nsa.engine.micro_batch import resolve_auto, resolved_zero
from nsa.engine.process_group import AllRanksCrash, RunAborted, crash, end_process
from nsa.engine.resume import find_initial_weights
from nsa.engine.run_dir import FolderLock, choose_run_dir, find_saved
from nsa.engine.run_request import RunRequest
from nsa.engine.shutdown import parse_time
from nsa.gates.results import until_step
from nsa.model.count import parameter_count
from nsa.monitor.artifacts import read_json
from nsa.monitor.throughput import parse_steps
from nsa.system import available_memory, existing_or_resource, resource_path, user_path
from nsa.text import as_one_line, printable
from nsa.validation import Parser, reject_unknown_flags

CRASHED, REFUSED, ABORTED = 1, 2, 3  # exit codes
RANK_0_REPORT_SECONDS = 10  # for rank 0 to report an error before another rank does
DEFAULT_DS_CONFIG = resource_path("ds_configs/zero1_pcie.json")


@dataclass(frozen=True)
class Recipe:
    """A name and its profiles, always including `production` and `demo`."""

    name: str
    description: str
    profiles: Mapping[str, Callable[[], RunConfig]]
    model_of_start: bool = False  # take shape and tokenizer from train.start_from


def main(recipe: Recipe, arguments: Sequence[str] | None = None) -> None:
    """Run `recipe` with the flags in `arguments` (default: sys.argv).

    Exit codes: 0 finished or preempted, 1 crashed, 2 refused with a one-line error, 3 No-Go.
    """
    gc.freeze()  # garbage collection skips imported modules: a run starts a second sooner
    parser = build_parser(recipe)
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        reject_unknown_flags(parser, unknown)
    lock = None
    try:
        request = resolve_request(recipe, flags)
        if int(os.environ.get("RANK", 0)) == 0:
            lock = FolderLock(request.run_dir)
    except (ValueError, OSError) as error:
        refusal = as_one_line(error) if isinstance(error, OSError) else error
        _exit_with_error(recipe, refusal, REFUSED)
    try:
        from nsa.engine.trainer import dry_run, start

        if flags.dry_run:
            if lock is not None:
                lock.undo()
            dry_run(request)
        else:
            start(request, lock)
    except RunAborted as error:
        _exit_with_error(recipe, error, ABORTED)
    except (AllRanksCrash, WorkerDied) as error:
        _exit_with_error(recipe, error, CRASHED)
    except ValueError as error:
        _exit_with_error(recipe, error, REFUSED)
    except BaseException as error:
        crash(error)


def _exit_with_error(recipe: Recipe, error: Exception, code: int) -> NoReturn:
    """Print one line for all ranks and exit with `code`.

    Rank 0 prints it and exits; the launcher then ends the other ranks. They wait for that, because
    the launcher would end rank 0 if they exited first. After RANK_0_REPORT_SECONDS a rank assumes
    that it alone has an error, and prints it.
    """
    if int(os.environ.get("RANK", 0)) != 0:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))  # sent by the launcher
        time.sleep(RANK_0_REPORT_SECONDS)
    text = printable(str(error), keep="\n")
    print(f"{recipe.name}: {text}", file=sys.stderr, flush=True)
    end_process(code)


def build_parser(recipe: Recipe) -> Parser:
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
    add("--run-dir", type=user_path, help="output folder (default: runs/<recipe>-<profile>)")
    add("--resume", action="store_true", help="resume from the newest checkpoint in the run folder")
    about = "with --resume: convert a checkpoint saved by another number of ranks"
    add("--universal", action="store_true", help=about)
    add("--config", type=user_path, help="YAML file that overrides the recipe")
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
    """Resolve and validate the flags, without a process group; raise ValueError on a mistake.

    What the user may not expect is added to the notes.
    """
    if flags.universal and not flags.resume:
        raise ValueError("--universal: requires --resume; add it")
    notes: list[str] = []
    name, profile, run_dir, checkpoint, saved = _resolve_folder(recipe, flags, notes)
    base, config = _resolve_settings(recipe, flags, profile, saved, notes)
    _resolve_data(config, None if saved is None else base)
    data_changed = saved is not None and _check_changes(base, config, run_dir, saved.name, notes)
    notes += _warnings(base, config)
    config, ds_config = _resolve_deepspeed(config, flags, saved, notes)
    stop_step = config.train.steps
    if flags.until is not None:
        stop_step = until_step(flags.until, config.monitor.ladder, config.train.steps)
        if flags.until.strip().isdecimal() and int(flags.until) > stop_step:
            notes.append(f"--until {flags.until}: the run ends earlier, at step {stop_step:,}")
    return RunRequest(
        recipe=name,
        profile=profile,
        config=config,
        ds_config=ds_config,
        run_dir=run_dir,
        checkpoint=checkpoint,
        resumed_config=None if saved is None else base,
        data_changed=data_changed,
        stop_step=stop_step,
        notes=notes,
        time_limit=None if flags.time_limit is None else parse_time(flags.time_limit),
        profile_steps=None if flags.profile_steps is None else parse_steps(flags.profile_steps),
        universal=flags.universal,
    )


def _resolve_folder(
    recipe: Recipe, flags: argparse.Namespace, notes: list[str]
) -> tuple[str, str, Path, Path | None, Path | None]:
    """Return recipe, profile, run folder, checkpoint to resume from, folder of saved settings."""
    on_accelerator = get_accelerator().device_name() != "cpu"
    profile = flags.profile or ("production" if on_accelerator else "demo")
    run_dir = choose_run_dir(flags.run_dir, f"{recipe.name}-{profile}", flags.resume)
    checkpoint, saved, log_lines = find_saved(run_dir) if flags.resume else (None, None, [])
    own = {"recipe": recipe.name, "profile": profile}  # a resumed run keeps its own
    if saved is not None:
        env = read_json(run_dir / "env.json")
        own |= {name: env[name] for name in own if isinstance(env.get(name), str)}
        if own["recipe"] != recipe.name:
            notes.append(
                f"{recipe.name}: {run_dir} keeps the settings of its own recipe, {own['recipe']}"
            )
        if flags.profile not in (None, own["profile"]):
            notes.append(f"--profile {flags.profile}: {run_dir} keeps its own, {own['profile']}")
    elif flags.profile is None and not on_accelerator:
        notes.append(
            "NO ACCELERATOR FOUND: running the `demo` profile, few steps on short sequences, "
            "instead of `production`; --profile production overrides this"
        )
    notes += log_lines
    return own["recipe"], own["profile"], run_dir, checkpoint, saved


def _resolve_settings(
    recipe: Recipe, flags: argparse.Namespace, profile: str, saved: Path | None, notes: list[str]
) -> tuple[RunConfig, RunConfig]:
    """Return (base, config): of the recipe or the saved run, and with the flags' changes."""
    overrides = flags.set + ([] if flags.steps is None else [f"train.steps={flags.steps}"])
    if saved is not None:
        base, withdrawn = read_saved_config(saved / "config.yaml")
        notes += withdrawn
        return base, resolve_config(base, flags.config, overrides)
    base = recipe.profiles[profile]()
    if recipe.model_of_start:
        base = with_model_of_start(base, flags.config, flags.set)
    config = resolve_config(base, flags.config, overrides)
    vocab_size = dataset_vocabulary(config.data)
    if vocab_size and config.train.start_from is None:
        before = config.model.vocab_size
        base = replace(base, model=replace(base.model, vocab_size=vocab_size))
        config = resolve_config(base, flags.config, overrides)  # flags may set another
        if config.model.vocab_size != before:
            notes.append(
                f"model.vocab_size = {vocab_size} instead of {before}: the ids of "
                f"{', '.join(config.data.sources())}, rounded up to a multiple of 64"
            )
    config.check_phases()
    return base, config


def _resolve_data(config: RunConfig, saved: RunConfig | None) -> None:
    """Make paths absolute, so that the run resumes from any folder, and pin the teacher."""
    source = absolute_source(config.data.source)
    # A path that the saved config only spells differently is no change of the data.
    if saved is not None and source == absolute_source(saved.data.source):
        source = saved.data.source
    config.data.source = source
    if config.data.cache is not None:
        config.data.cache = str(user_path(config.data.cache).absolute())
    if config.train.teacher is not None:  # pin its newest checkpoint: a resumed run has the same
        teacher = user_path(config.train.teacher).absolute()
        with contextlib.suppress(ValueError):  # `find_teacher` reports it later
            teacher = find_weights(teacher)
        config.train.teacher = str(teacher)


def _resolve_deepspeed(
    config: RunConfig, flags: argparse.Namespace, saved: Path | None, notes: list[str]
) -> tuple[RunConfig, dict[str, Any]]:
    """Replace each "auto"; return the config and DeepSpeed's.

    Without --deepspeed_config a resumed run keeps DeepSpeed's config of its checkpoint.
    """
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    _check_hardware(config)
    path = flags.deepspeed_config or DEFAULT_DS_CONFIG
    if flags.deepspeed_config is None and saved is not None:
        path = saved / "ds_config.json"
        raw = leave_to_recipe(load_ds_config(path))
    else:
        raw = load_ds_config(path)
    resolve = partial(resolve_ds_config, raw, world_size=ranks, source=str(path))
    ds_config = resolve(config)
    accelerator, gpu_memory = get_accelerator(), None
    offloads = block_of(ds_config, "activation_checkpointing").get("cpu_checkpointing")
    if offloads and accelerator.device_name() == "cpu":
        raise ValueError(
            f"{path}: activation_checkpointing.cpu_checkpointing = true: needs a GPU; remove it"
        )
    if AUTO in (config.train.micro_batch, config.model.activation_checkpointing):
        if accelerator.device_name() != "cpu":  # this node's smallest GPU, so that its ranks agree
            gpu_memory = min(map(accelerator.total_memory, range(accelerator.device_count())))
        zero = resolved_zero(ds_config, config)
        config, auto_notes = resolve_auto(config, zero, ranks, gpu_memory)
        ds_config = resolve(config)
        notes += auto_notes
    return config, ds_config


def with_model_of_start(base: RunConfig, file: Path | None, assignments: list[str]) -> RunConfig:
    """Return the recipe's config with shape, tokenizer and length of train.start_from."""
    config = resolve_config(base, file, assignments)
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
    seq_len = min(base.data.seq_len, start.data.seq_len)
    data = replace(base.data, tokenizer=start.data.tokenizer, seq_len=seq_len)
    return replace(base, model=start.model, data=data)


def _warnings(base: RunConfig, config: RunConfig) -> Iterator[str]:
    """Yield a line for each setting of `config` that is probably a mistake or a surprise.

    `base` is the config before the flags changed it.
    """
    train = config.train
    warmup = scaled_warmup(base.train.warmup_steps, base.train.steps, train.steps)
    if train.warmup_steps == warmup and warmup != base.train.warmup_steps:
        yield (
            f"train.warmup_steps = {warmup}, scaled with train.steps: "
            f"{base.train.warmup_steps:,} of {base.train.steps:,}"
        )
    if train.warmup_steps >= train.steps:
        yield (
            f"train.warmup_steps = {train.warmup_steps}: not below train.steps = {train.steps}, so "
            "the learning rate never decays; lower train.warmup_steps"
        )
    if note := config.selects_all_note():
        yield note
    if not config.monitor.csv:
        yield (
            "monitor.csv = false: without metrics.csv no gate judges the loss or the speed, and "
            "the watchdog notices no collapse of the speed"
        )
    if train.switch_step:
        yield (
            f"attention is dense in the first {train.switch_step:,} of {train.steps:,} steps "
            "(train.dense_steps); nothing is selected in them, so selection.csv begins after them"
        )
    elif train.selector_steps:
        yield (
            f"attention is dense in the first {train.selector_steps:,} of {train.steps:,} steps, "
            "in which only the index learns (train.selector_steps)"
        )
    elif base.train.dense_steps == AUTO and config.model.attention.kind == "nsa":
        yield (
            "attention is sparse from the first step: train.dense_steps=auto needs an index, new "
            f"weights and {SHORT_RUN} steps; this run has {train.steps:,}"
        )


def _check_changes(
    base: RunConfig, config: RunConfig, run_dir: Path, checkpoint: str, notes: list[str]
) -> bool:
    """Refuse or log the changes of a resumed run; return whether they change its samples."""
    names = ("activation_checkpointing", "attention.backend", "attention.selector_loss")
    changeable = [f"model.{name}" for name in names]
    keep_order = ("data.packing", "data.timeout", "data.on_error", "data.cache")

    def values(tree: RunConfig) -> dict[str, Any]:
        return {name: x for name, x in walk(asdict(tree)) if not isinstance(x, dict)}

    before, after = values(base), values(config)
    data_changed = False
    for name in sorted(before | after):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if name.startswith("model.") and name not in changeable:
            raise ValueError(
                f"{name} = {new!r}: {run_dir} was created with {old!r}; drop the change, or start "
                "a fresh run in another folder"
            )
        notes.append(f"changed since {checkpoint}: {name}: {old} -> {new}")
        if name == "train.seed" or (name.startswith("data.") and name not in keep_order):
            data_changed = True
    return data_changed


def _check_hardware(config: RunConfig) -> None:
    """Refuse a precision that the accelerator lacks, and weights that exceed the host's memory."""
    accelerator, train, model = get_accelerator(), config.train, config.model
    supported = [name for name, dtype in DTYPES.items() if dtype in accelerator.supported_dtypes()]
    if train.precision not in supported:
        raise ValueError(
            f"train.precision = {train.precision!r}: DeepSpeed does not support it on "
            f"{accelerator.device_name()} here; set train.precision to {' or '.join(supported)}"
        )
    # Every rank builds the weights in the host's memory, in float32.
    local_ranks, available = int(os.environ.get("LOCAL_SIZE", 1)), available_memory()
    needed = 4 * parameter_count(model) * local_ranks
    if needed > available:
        raise ValueError(
            f"model.width = {model.width}, model.layers = {model.layers}: the weights alone take "
            f"{needed / 1e9:,.1f} GB on {local_ranks} ranks of this machine, which has "
            f"{available / 1e9:,.1f} GB available; make the model smaller"
        )
