"""What every recipe does with its values: flags, checks, a run folder, training."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from nsa.atomic_io import atomic_write_text
from nsa.checkpoint.weights import has_safetensors
from nsa.engine.config import RunConfig
from nsa.engine.ds_config import leave_to_recipe, load_ds_config, resolve_ds_config
from nsa.engine.resolve import resolve_config, to_yaml
from nsa.engine.shutdown import parse_time
from nsa.flags import reject_unknown_flags
from nsa.gates.ladder import until
from nsa.monitor.profile import parse_steps
from nsa.resources import resource_path

SECONDS_FOR_RANK_0 = 10
DEFAULT_DS_CONFIG = resource_path("ds_configs/zero1_pcie.json")


@dataclass(frozen=True)
class Recipe:
    """A name, and the values of each profile; `production` and `demo` are always among them."""

    name: str
    description: str
    profiles: Mapping[str, Callable[[], RunConfig]]


@dataclass(frozen=True)
class Plan:
    """One run, decided and checked before anything expensive starts."""

    recipe: Recipe
    profile: str
    config: RunConfig
    ds_config: dict[str, Any]
    run_dir: Path
    resume: bool
    new_data: bool  # a resumed run was asked for other text, or another order of it
    stop: int
    notes: list[str]
    time_limit: float | None = None  # seconds
    profile_steps: tuple[int, int] | None = None  # first and last step to be traced
    universal: bool = False  # a checkpoint of another number of ranks is converted


def main(recipe: Recipe, arguments: Sequence[str] | None = None) -> None:
    """Run `recipe` as the command line says.

    Exit codes: 0 finished or preempted, 1 a crash, 2 a mistake said in one line, 3 No-Go.
    """
    parser = _parser(recipe)
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        reject_unknown_flags(parser, unknown)
    try:
        plan = make_plan(recipe, flags)
    except ValueError as error:
        _refuse(recipe, error, 2)
    from nsa.engine.loss_guard import RunAborted
    from nsa.engine.process_group import crash

    if flags.dry_run:
        from nsa.engine.dry_run import dry_run as begin
    else:
        from nsa.engine.run import start as begin

    try:
        begin(plan)
    except RunAborted as error:
        _refuse(recipe, error, 3)
    except ValueError as error:
        _refuse(recipe, error, 2)
    except BaseException as error:
        crash(error)


def _refuse(recipe: Recipe, error: Exception, code: int) -> NoReturn:
    """One line for all ranks: rank 0's, after whose end the launcher ends the others.

    A rank that ended first would have rank 0 ended before it could speak; one that is still there
    after a while is alone with its error and says it itself. All end with `code`, and leave behind
    whatever threads the process group has.
    """
    from nsa.engine.process_group import end_process

    if int(os.environ.get("RANK", 0)) != 0:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))  # the launcher's
        time.sleep(SECONDS_FOR_RANK_0)
    print(f"{recipe.name}: {error}", file=sys.stderr, flush=True)
    end_process(code)


def make_plan(recipe: Recipe, flags: argparse.Namespace) -> Plan:
    """Decide everything that can be decided without a process group, and refuse what is wrong."""
    profile, notes = _profile(flags.profile)
    run_dir = _run_dir(flags.run_dir, f"{recipe.name}-{profile}", flags.resume)
    base = recipe.profiles[profile]()
    continues = flags.resume and (run_dir / "config.yaml").exists()
    if continues:
        base = resolve_config(base, run_dir / "config.yaml")  # a run goes on as it began
    steps = [] if flags.steps is None else [f"train.steps={flags.steps}"]
    config = resolve_config(base, flags.config, [*flags.set, *steps])
    if continues:
        _check_same_model(base, config, run_dir)
        _check_same_sharing(base, config, run_dir)
    new_data = continues and _text(base) != _text(config)
    if config.train.warmup_steps >= config.train.steps:
        notes.append(
            f"train.warmup_steps = {config.train.warmup_steps} leaves no step of train.steps = "
            f"{config.train.steps} after the warm-up: the learning rate never falls"
        )
    _check_precision(config.train.precision)
    source = flags.deepspeed_config or DEFAULT_DS_CONFIG
    if continues and not flags.deepspeed_config:
        source = run_dir / "ds_config.json"
    raw = load_ds_config(source)
    if continues and not flags.deepspeed_config:
        raw = leave_to_recipe(raw)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    _check_ranks(config.train.sequence_parallel, world_size)
    ds_config = resolve_ds_config(
        raw, config, world_size=world_size, run_dir=run_dir, source=str(source)
    )
    stop = config.train.steps
    if flags.until is not None:
        stop = until(flags.until, config.monitor.ladder, config.train.steps)
    if flags.universal and not flags.resume:
        raise ValueError(
            "--universal: it converts the checkpoint that --resume goes on from; add it"
        )
    return Plan(
        recipe=recipe,
        profile=profile,
        config=config,
        ds_config=ds_config,
        run_dir=run_dir,
        resume=flags.resume,
        new_data=new_data,
        stop=stop,
        notes=notes,
        time_limit=None if flags.time_limit is None else parse_time(flags.time_limit),
        profile_steps=None if flags.profile_steps is None else parse_steps(flags.profile_steps),
        universal=flags.universal,
    )


def run_files(plan: Plan) -> dict[str, str]:
    """What was run, by file name, in a form that a run can be started from."""
    ds_config = {key: value for key, value in plan.ds_config.items() if key != "tensorboard"}
    return {
        "config.yaml": to_yaml(plan.config),
        "ds_config.json": json.dumps(ds_config, indent=2) + "\n",
    }


def write_run_folder(plan: Plan, hosts: list[str]) -> None:
    """Leave behind what was run, and where; `hosts` of the ranks, in their order."""
    from nsa.monitor.run_folder import write_env

    for name, text in run_files(plan).items():
        atomic_write_text(plan.run_dir / name, text)
    write_env(
        plan.run_dir,
        recipe=plan.recipe.name,
        profile=plan.profile,
        notes=plan.notes,
        world_size=len(hosts),
        hosts=hosts,
    )


def with_run_dir(plan: Plan, run_dir: Path) -> Plan:
    """The same plan in another folder: rank 0 decides which, the others follow."""
    ds_config = dict(plan.ds_config)
    if "tensorboard" in ds_config:
        ds_config["tensorboard"] = {
            **ds_config["tensorboard"],
            "output_path": str(run_dir / "tensorboard"),
        }
    return replace(plan, run_dir=run_dir, ds_config=ds_config)


def _profile(asked: str | None) -> tuple[str, list[str]]:
    """The profile to run, and what the user must be told about it."""
    if asked is not None:
        return asked, []
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        return "production", []
    return "demo", [
        "NO ACCELERATOR FOUND: this is the `demo` profile, a small model and short sequences, "
        "not the 125M production run. --profile production forces that one."
    ]


def _text(config: RunConfig) -> dict[str, Any]:
    """The settings that decide which tokens a run sees, and in which order."""
    text = asdict(config.data) | {"seed": config.train.seed}
    for free in ("packing", "workers", "prefetch", "timeout"):
        del text[free]
    return text


def _check_same_model(saved: RunConfig, asked: RunConfig, run_dir: Path) -> None:
    """A checkpoint's weights fit the model that they were saved from and no other."""
    before, after = asdict(saved.model), asdict(asked.model)
    for free in ("activation_checkpointing", "attention.backend"):
        *parents, name = free.split(".")
        for tree in (before, after):
            for parent in parents:
                tree = tree[parent]
            tree.pop(name)
    if before != after:
        changed = next(name for name in before if before[name] != after[name])
        raise ValueError(
            f"model.{changed} = {after[changed]!r}, but {run_dir} was begun with "
            f"{before[changed]!r}: its checkpoints fit no other model; leave the change out, or "
            "start a new run without --resume"
        )


def _check_same_sharing(saved: RunConfig, asked: RunConfig, run_dir: Path) -> None:
    """Which text a rank reads, and where it stands in it, is saved for each rank."""
    before, after = saved.train.sequence_parallel, asked.train.sequence_parallel
    if before != after:
        raise ValueError(
            f"train.sequence_parallel = {after}, but {run_dir} was begun with {before}; leave the "
            f"change out, or start a new run with train.start_from={run_dir}"
        )


def _check_ranks(shared_by: int, world_size: int) -> None:
    """Ranks that share sequences come in whole groups."""
    if world_size % shared_by:
        raise ValueError(
            f"train.sequence_parallel = {shared_by} does not divide the {world_size} "
            f"rank{'s' if world_size > 1 else ''} of this run; start a multiple of it, as with "
            f"deepspeed --num_gpus {shared_by}, or set train.sequence_parallel=1"
        )


def _check_precision(precision: str) -> None:
    """DeepSpeed asks the device what it can compute in; a processor may lack fp16."""
    import torch
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    able = [name for name, dtype in dtypes.items() if dtype in accelerator.supported_dtypes()]
    if precision not in able:
        raise ValueError(
            f"train.precision = {precision!r}: DeepSpeed does not support it on this machine's "
            f"{accelerator.device_name()}; set train.precision to {' or '.join(able)}"
        )


def _run_dir(asked: Path | None, name: str, resume: bool) -> Path:
    """Where the run lives. A new run never writes into the folder of an old one."""
    if asked is not None:
        if asked.exists() and not asked.is_dir():
            raise ValueError(f"--run-dir {asked}: there is a file of that name; name a folder")
        if has_safetensors(asked):
            raise ValueError(
                f"--run-dir {asked} holds weights to begin with and no run; begin one with "
                f"--set train.start_from={asked} in another folder"
            )
        if _holds_run(asked) and not resume:
            raise ValueError(
                f"--run-dir {asked} already holds a run; add --resume to continue it, "
                "or choose another folder"
            )
        if resume and not _holds_run(asked):
            raise ValueError(
                f"--run-dir {asked} holds no run to continue; leave out --resume to start one"
            )
        return asked
    runs = Path("runs")
    taken = [runs / name, *(runs / f"{name}-{number}" for number in range(2, 10_000))]
    free = next(path for path in taken if not _holds_run(path))
    if not resume:
        return free
    number = taken.index(free)
    if number == 0:
        raise ValueError(
            f"--resume: there is no run in {runs / name}; leave it out to start one, or say which "
            "with --run-dir"
        )
    return taken[number - 1]


def _holds_run(folder: Path) -> bool:
    return (folder / "config.yaml").exists() or (folder / "checkpoints").exists()


def _parser(recipe: Recipe) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{recipe.name}.py",
        description=recipe.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Values: recipe < --config < --set. DeepSpeed's own are in --deepspeed_config.",
    )
    parser.add_argument(
        "--profile",
        choices=sorted(recipe.profiles),
        help="which values (default: production on an accelerator, demo without one)",
    )
    parser.add_argument("--steps", type=int, help="length of the run and of its schedule")
    parser.add_argument(
        "--until",
        metavar="STEP|GATE",
        help="stop after this step, or behind this gate: preflight, sanity, smoke, extended, "
        "production; the schedule stays",
    )
    parser.add_argument(
        "--time-limit", metavar="TIME", help="save and end after 45m, 2h30m or so many seconds"
    )
    parser.add_argument(
        "--run-dir", type=Path, help="folder of the run (default: runs/<recipe>-<profile>)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint of the run folder"
    )
    parser.add_argument(
        "--universal",
        action="store_true",
        help="with --resume: convert a checkpoint of another number of ranks",
    )
    parser.add_argument("--config", type=Path, help="YAML that overrules the recipe")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="overrule one value, such as train.learning_rate=3e-4; may be repeated",
    )
    parser.add_argument(
        "--deepspeed_config",
        type=Path,
        help="DeepSpeed JSON (default: ds_configs/zero1_pcie.json)",
    )
    parser.add_argument(
        "--profile-steps", metavar="10-12", help="trace these steps into <run>/profile"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build everything, take one step on random tokens, say what it is, and stop",
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser
