"""`nsa plan`: build the planner's inputs from a recipe and DeepSpeed's JSON, and run it."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

from nsa.engine import recipe as recipes
from nsa.engine.config import RunConfig, resolve_config
from nsa.engine.micro_batch import batch_of, model_of, resolve_auto, zero_of
from nsa.engine.recipe import DEFAULT_DS_CONFIG, with_model_of_start
from nsa.planner.command import assumptions, describe, hardware, json_row, table
from nsa.planner.forecast import Candidate, compare, fits, forecast
from nsa.planner.inputs import Zero
from nsa.resources import resource_path

DEFAULT_RECIPE = resource_path("recipes/m7c.py")


def run(flags: argparse.Namespace) -> int:
    """Print the plan; return exit code 1 if nothing fits."""
    target = hardware(flags)
    recipe = flags.recipe or DEFAULT_RECIPE
    config, assumed = _resolve(recipe, flags)
    source, steps = flags.deepspeed_config or DEFAULT_DS_CONFIG, config.train.steps
    zero = zero_of(source, config, flags.gpus)
    resolved, notes, mode_notes = resolve_auto(config, zero, flags.gpus, target.memory)
    model, batch = model_of(resolved), batch_of(resolved)
    zeros: dict[str, Zero] = {}
    if flags.compare:
        for file in sorted(source.parent.glob("*.json")):
            try:
                zeros[file.stem] = zero_of(file, resolved, flags.gpus)
            except ValueError as error:
                print(f"left out: {error}", file=sys.stderr)
        given = replace(batch, checkpointing=config.model.activation_checkpointing)
        candidates = compare(model, zeros, given, target, flags.gpus)  # each with a mode of its own
    else:
        notes += mode_notes
        zeros[source.stem] = zero
        step = forecast(model, zero, batch, target, flags.gpus)
        candidates = [Candidate(source.stem, batch, step)]
    fitting = [fits(candidate.forecast.memory, target) for candidate in candidates]
    assumed = assumptions(flags, target, zeros) + assumed
    if flags.json:
        plans = [
            json_row(one, steps) | {"fits": fit}
            for one, fit in zip(candidates, fitting, strict=True)
        ]
        tree = {"parameters": model.parameters, "steps": steps, "plans": plans}
        print(json.dumps(tree | {"assumptions": [*assumed, *notes]}, indent=2))
    elif flags.compare:
        print(*table(candidates, steps), *assumed, sep="\n")
    else:
        title, *lines = describe(source.stem, model, batch, step, target, steps)
        print(title, *assumed, *lines, *notes, sep="\n")
        if not any(fitting):
            memory = f"{target.memory / 1e9:g} GB"
            print(f"  does not fit into {memory}: CUDA, NCCL and fragmentation add 2 GB and 10%")
    return 0 if any(fitting) else 1


def _resolve(file: Path, flags: argparse.Namespace) -> tuple[RunConfig, list[str]]:
    """Return a run's config, and a note if it has not the model that a run would start from."""
    recipe, notes = load_recipe(file, flags.profile), list[str]()
    base = recipe.profiles[flags.profile]()
    if recipe.model_of_start:
        try:
            base = with_model_of_start(base, flags.config, flags.set)
        except ValueError as error:
            notes = [f"the model is the recipe's own, as a run is refused: {error}"]
    return resolve_config(base, flags.config, flags.set), notes


def load_profile(file: Path, profile: str) -> RunConfig:
    """Return the config of a recipe file's profile."""
    return load_recipe(file, profile).profiles[profile]()


def load_recipe(file: Path, profile: str) -> recipes.Recipe:
    """Execute a recipe file with `main` replaced; return its Recipe, which has the profile."""
    if not file.is_file():
        raise ValueError(f"--recipe {file}: no such file")
    caught: list[recipes.Recipe] = []
    start = recipes.main
    recipes.main = lambda recipe, arguments=None: caught.append(recipe)
    sys.path.insert(0, str(file.resolve().parent))
    try:
        runpy.run_path(str(file), run_name="__main__")
    finally:
        recipes.main = start
        del sys.path[0]
    if not caught:
        raise ValueError(f"--recipe {file}: passes no Recipe to main(); see recipes/m7c.py")
    profiles = caught[0].profiles
    if profile not in profiles:
        raise ValueError(f"--profile {profile}: {file} has {', '.join(sorted(profiles))}")
    return caught[0]
