"""Checks of the commands in the docs, by each program's own parser and validation.

A command with deterministic output is run. Training commands are validated (flags, settings,
DeepSpeed JSON, run folder) without starting a rank. A command without a rule fails.
"""

import argparse
import contextlib
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

from deepspeed.accelerator import get_accelerator
from deepspeed.launcher import runner

from nsa import cli
from nsa.dtypes import DTYPES
from nsa.engine.recipe import Recipe, build_parser, resolve_request
from nsa.watchdog.command import split_command
from tests.bench.__main__ import main as bench_main
from tests.ranks import ROOT, spawn_ranks

# Programs that are neither run nor parsed, and why.
NOT_RUN = {
    "git": "needs the network",
    "cd": "has no effect on the commands after it",
    "pip": "installs packages; tests/launch/test_setup.py tests that",
    "uv": "installs packages; tests/launch/test_repository.py tests that",
    "source": "changes the current shell",
    "lm_eval": "is an optional extra; tests/evaluate/test_lm_eval.py runs its tasks",
    "sbatch": "needs Slurm; tests/launch/test_slurm.py runs the script",
}


def check(words: list[str]) -> str | None:
    """Raise if the command would fail; return its output if that is deterministic."""
    line = " ".join(words)
    if words[0] in NOT_RUN:
        return None
    if words[0] == "bash" and not (ROOT / words[1]).is_file():
        raise ValueError(f"{line!r}: no such script")
    for start, rule in RULES.items():
        if line == start or line.startswith(f"{start} "):
            with contextlib.suppress(_Parsed), _parsers_raise():
                return rule(words[len(start.split()) :])
            return None
    raise ValueError(f"{line!r}: no rule checks this command; fix: add one to RULES in {__name__}")


def launcher(arguments: list[str]) -> None:
    """DeepSpeed's launcher: its own flags, then a recipe."""
    flags = runner.parse_args(arguments)
    recipe(flags.user_script, flags.user_args, ranks=max(2, flags.num_gpus))


def recipe(script: str, arguments: list[str], ranks: int = 1) -> None:
    """Resolve a recipe's run, without `--resume` (its run does not exist) and for any device."""
    # The model that sparsify.py starts from does not exist.
    loaded = replace(_recipe_of(ROOT / script), model_of_start=False)
    flags = build_parser(loaded).parse_args(arguments)
    flags.resume = flags.universal = False
    any_dtype = {"supported_dtypes": lambda: list(DTYPES.values())}
    any_device = mock.patch.multiple(get_accelerator(), **any_dtype)
    with mock.patch.dict(os.environ, WORLD_SIZE=str(ranks)), any_device:
        resolve_request(loaded, flags)


def nsa(arguments: list[str]) -> str | None:
    """Run an `nsa` verb that only reads the repository; parse any other."""
    if cli._parser().parse_args(arguments).verb not in ("check", "plan"):
        return None
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = cli.main(arguments)
    if code:
        raise ValueError(f"nsa {' '.join(arguments)} failed with exit code {code}")
    return output.getvalue()


def watch(arguments: list[str]) -> None:
    """Parse the watchdog's flags, then check the command that it would start."""
    own, command = split_command(["watch", *arguments])
    cli._parser().parse_args(own)
    if command:
        check(command)


def train(arguments: list[str]) -> None:
    """`nsa train`: DeepSpeed's flags, a recipe's name, and the recipe's flags."""
    place = next(i for i, word in enumerate(arguments) if word.startswith("m7c"))
    launcher([*arguments[:place], f"recipes/{arguments[place]}.py", *arguments[place + 1 :]])


def m7c(arguments: list[str]) -> None:
    """Parse the script's `--restart`, then the recipe's flags."""
    own = 2 if arguments[:1] == ["--restart"] else 0
    watch([*arguments[:own], "runs"])
    recipe("recipes/m7c.py", arguments[own:], ranks=2)


def multinode(arguments: list[str]) -> None:
    """Parse the hostfile and the script's flags, then the recipe's."""
    own = argparse.ArgumentParser()
    own.add_argument("hostfile")
    own.add_argument("--no_ssh", action="store_true")
    for flag in ("--node_rank", "--master_port", "--restart"):
        own.add_argument(flag, type=int)
    own.add_argument("--master_addr")
    recipe("recipes/m7c.py", own.parse_known_args(arguments)[1], ranks=4)


def parsed(main: Callable[[list[str]], object], arguments: list[str]) -> None:
    """Parse a script's arguments and stop."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parse_args(self, *args, **kwargs)
        raise _Parsed

    patch = mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop)
    with patch:
        main(arguments)


def gpu(arguments: list[str]) -> None:
    """Dry-run the script and parse every benchmark command that it prints; build nothing."""
    script = ["bash", str(ROOT / "launch/gpu.sh"), "--dry-run", *arguments]
    done = subprocess.run(script, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr)
    if arguments[:1] in (["--build-wheels"], ["--build-cache"]):
        assert not Path(arguments[1]).exists(), "a dry run built something"
        Path(arguments[1]).mkdir(parents=True)  # the next command names it
    for line in done.stdout.splitlines():
        _, separator, flags = line.partition(" -m tests.bench ")
        if separator:
            with contextlib.suppress(_Parsed):
                parsed(bench_main, flags.split())


def tests(arguments: list[str]) -> None:
    """Check that pytest knows the flags and that the paths exist."""
    paths = [word for word in arguments if word.startswith("tests")]
    if missing := [path for path in paths if not (ROOT / path).exists()]:
        raise ValueError(f"{missing[0]}: no such path")
    _collect(*(word for word in arguments if word not in paths))


@cache
def _collect(*flags: str) -> None:
    """Collect one small file with these flags."""
    if not flags:
        return
    collect = ["--collect-only", "-q", *flags, "tests/test_spec.py"]
    run = spawn_ranks(Path(sys.executable).with_name("pytest"), *collect, folder=ROOT, ranks=0)
    codes = run.codes(120)
    run.end()
    if codes not in ([0], [5]):  # 5: valid flags that select no test
        raise ValueError(run.text("out") + run.text("err"))


def at_most(count: int, arguments: list[str]) -> None:
    """Refuse more arguments than a program takes."""
    if len(arguments) > count:
        raise ValueError(f"takes {count} arguments, got {arguments}")


# The first matching prefix applies.
RULES: dict[str, Callable[[list[str]], str | None]] = {
    "bash launch/m7c.sh": m7c,
    "bash launch/m7c_pcie.sh --check": partial(at_most, 0),
    "bash launch/m7c_pcie.sh": m7c,
    "bash launch/multinode.sh": multinode,
    "bash launch/tensorboard.sh": partial(at_most, 1),  # a run, or a folder of runs
    "bash launch/watch.sh": watch,
    "bash launch/gpu.sh": gpu,
    "bash launch/test.sh": tests,
    "bash launch/setup.sh": partial(at_most, 0),
    "bash launch/soak.sh": partial(at_most, 2),  # minutes and a seed
    "python -m tests.faults.table": partial(at_most, 0),
    "python -m build": partial(at_most, 0),
    "python docs/make_settings.py": partial(at_most, 0),
    # tests/docs/test_pages.py builds the site.
    "mkdocs build --strict -f docs/site/mkdocs.yml": partial(at_most, 0),
    "deepspeed": launcher,
    **{
        f"python recipes/{path.name}": partial(recipe, f"recipes/{path.name}")
        for path in (ROOT / "recipes").glob("*.py")
    },
    "python -m tests.bench": partial(parsed, bench_main),
    "nsa train": train,
    "nsa watch": watch,
    "nsa": nsa,
}


class _Parsed(Exception):
    """Raised once a program has parsed its arguments, to stop it there."""


@contextlib.contextmanager
def _parsers_raise() -> Iterator[None]:
    """Turn argparse's SystemExit into _Parsed (--help) or a ValueError."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            yield
    except SystemExit as stop:
        raise (ValueError(output.getvalue()) if stop.code else _Parsed) from None


def _recipe_of(script: Path) -> Recipe:
    """The Recipe that a recipe file passes to `main`."""
    path = [str(script.parent), *sys.path]
    with mock.patch("nsa.engine.recipe.main") as main, mock.patch.object(sys, "path", path):
        runpy.run_path(str(script), run_name="__main__")
    return main.call_args.args[0]
