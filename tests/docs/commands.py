"""Checks of the commands on the pages, by each program's own parser and validation.

A command with deterministic output runs and returns it. Training is validated (flags, settings,
DeepSpeed JSON, run folder) without starting a rank. A command in neither table fails: add a rule.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

from deepspeed.launcher import runner

from nsa import cli
from nsa.bench.__main__ import main as bench_main
from nsa.engine.command_line import build_parser, resolve_request
from nsa.engine.recipe import Recipe
from nsa.watchdog.command import split_command
from tests.ranks import ROOT, start_ranks

# Programs that are not run, and why.
NOT_RUN = {
    "git": "needs the network and a folder of its own",
    "cd": "goes to where these tests are",
    "pip": "installs packages; launch/setup.sh and its tests do that",
    "source": "changes the reader's shell",
    "lm_eval": "comes with an extra; tests/evaluate/test_lm_eval.py has the command's tasks",
    "sbatch": "needs Slurm; tests/launch/test_slurm.py has the script",
}


def check(words: list[str]) -> str | None:
    """Raise if a command would not work; return its output if that is deterministic."""
    line = " ".join(words)
    if words[0] in NOT_RUN:
        return None
    if words[0] == "bash" and not (ROOT / words[1]).is_file():
        raise ValueError(f"{line!r}: there is no such script")
    for start, rule in RULES.items():
        if line == start or line.startswith(f"{start} "):
            with contextlib.suppress(_Parsed), _parsers_raise():
                return rule(words[len(start.split()) :])
            return None
    raise ValueError(f"{line!r}: no rule in {__name__} says how to check such a command")


def launcher(arguments: list[str]) -> None:
    """DeepSpeed's launcher: its own flags, then a recipe."""
    flags = runner.parse_args(arguments)
    recipe(flags.user_script, flags.user_args, ranks=max(2, flags.num_gpus))


def recipe(script: str, arguments: list[str], ranks: int = 1) -> None:
    """Plan a recipe's run. The run that `--resume` goes on with, and the reader's device, are not
    here: they are left out."""
    found = _recipe_of(ROOT / script)
    flags = build_parser(found).parse_args(arguments)
    flags.resume = flags.universal = False
    any_device = mock.patch("nsa.engine.command_line._check_precision")
    with mock.patch.dict(os.environ, WORLD_SIZE=str(ranks)), any_device:
        resolve_request(found, flags)


def nsa(arguments: list[str]) -> str | None:
    """`nsa <verb>`: verbs that only read the repository run, the others are parsed."""
    if cli._parser().parse_args(arguments).verb not in ("info", "check", "plan"):
        return None
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = cli.main(arguments)
    if code:
        raise ValueError(f"nsa {' '.join(arguments)} ends with exit code {code}")
    return output.getvalue()


def watch(arguments: list[str]) -> None:
    """The watchdog's own flags, then the command it would start."""
    own, command = split_command(["watch", *arguments])
    cli._parser().parse_args(own)
    if command:
        check(command)


def m7c(arguments: list[str]) -> None:
    """The script's own flag, then the recipe's."""
    own = 2 if arguments[:1] == ["--restart"] else 0
    watch([*arguments[:own], "runs"])
    recipe("recipes/m7c.py", arguments[own:], ranks=2)


def pcie(arguments: list[str]) -> None:
    """The arguments of launch/m7c.sh, or --check alone."""
    if arguments != ["--check"]:
        m7c(arguments)


def multinode(arguments: list[str]) -> None:
    """A hostfile and the script's flags, then the recipe's."""
    own = argparse.ArgumentParser()
    own.add_argument("hostfile")
    own.add_argument("--no_ssh", action="store_true")
    for flag in ("--node_rank", "--master_port", "--restart"):
        own.add_argument(flag, type=int)
    own.add_argument("--master_addr")
    recipe("recipes/m7c.py", own.parse_known_args(arguments)[1], ranks=4)


def bench(arguments: list[str]) -> None:
    """Parse a benchmark's arguments and stop."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parse_args(self, *args, **kwargs)
        raise _Parsed

    patch = mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop)
    with patch:
        bench_main(arguments)


def gpu(arguments: list[str]) -> None:
    """Dry-run the script; each benchmark that it would start must accept its flags."""
    script = ["bash", str(ROOT / "launch/gpu.sh"), "--dry-run", *arguments]
    done = subprocess.run(script, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr)
    for line in done.stdout.splitlines():
        _, found, flags = line.partition(" -m nsa.bench ")
        if found:
            with contextlib.suppress(_Parsed):
                bench(flags.split())


def tests(arguments: list[str]) -> None:
    """pytest's arguments: paths exist and flags are known."""
    named = [word for word in arguments if word.startswith("tests")]
    if missing := [word for word in named if not (ROOT / word).exists()]:
        raise ValueError(f"there is no {missing[0]}")
    _pytest_takes(*(word for word in arguments if word not in named))


@cache
def _pytest_takes(*flags: str) -> None:
    """Collect one small file with these flags."""
    if not flags:
        return
    collect = ["--collect-only", "-q", *flags, "tests/test_spec.py"]
    run = start_ranks(Path(sys.executable).with_name("pytest"), *collect, folder=ROOT, ranks=0)
    codes = run.codes(120)
    run.end()
    if codes not in ([0], [5]):  # 5: valid flags that select no test
        raise ValueError(run.text("out") + run.text("err"))


def no_arguments(arguments: list[str]) -> None:
    """A script without arguments."""
    if arguments:
        raise ValueError(f"takes no arguments, and got {arguments}")


def soak(arguments: list[str]) -> None:
    """Minutes and a seed."""
    if len(arguments) > 2 or not all(word.isdecimal() for word in arguments):
        raise ValueError(f"launch/soak.sh takes [MINUTES] [SEED], and got {arguments}")


def tensorboard(arguments: list[str]) -> None:
    """It is installed in this environment."""
    if not shutil.which("tensorboard", path=str(Path(sys.executable).parent)):
        raise ValueError("tensorboard is not installed")


def site(arguments: list[str]) -> None:
    """tests/docs/test_site.py builds the site from this file."""
    if arguments[-2:] != ["-f", "docs/site/mkdocs.yml"]:
        raise ValueError("mkdocs takes -f docs/site/mkdocs.yml")


def screenshots(arguments: list[str]) -> None:
    """A folder of runs; the script needs a browser."""
    if len(arguments) != 1:
        raise ValueError(f"docs/make_screenshots.py takes RUNS, and got {arguments}")


# The first matching prefix applies.
RULES: dict[str, Callable[[list[str]], str | None]] = {
    "bash launch/m7c.sh": m7c,
    "bash launch/m7c_pcie.sh": pcie,
    "bash launch/multinode.sh": multinode,
    "bash launch/tensorboard.sh": tensorboard,
    "bash launch/watch.sh": watch,
    "bash launch/gpu.sh": gpu,
    "bash launch/test.sh": tests,
    "bash launch/setup.sh": no_arguments,
    "bash launch/soak.sh": soak,
    "python -m tests.faults.table": no_arguments,
    "python -m build": no_arguments,
    "python docs/make_screenshots.py": screenshots,
    "python docs/make_settings.py": no_arguments,
    "mkdocs": site,
    "deepspeed": launcher,
    "python recipes/m7c.py": partial(recipe, "recipes/m7c.py"),
    "python recipes/m7c_classic.py": partial(recipe, "recipes/m7c_classic.py"),
    "python recipes/m7c_dense.py": partial(recipe, "recipes/m7c_dense.py"),
    "nsa bench": bench,
    "python -m nsa.bench": bench,
    "python -m nsa bench": bench,
    "nsa watch": watch,
    "nsa": nsa,
    "python -m nsa": nsa,
    "tensorboard": tensorboard,
}


class _Parsed(Exception):
    """A program has parsed its arguments."""


@contextlib.contextmanager
def _parsers_raise() -> Iterator[None]:
    """Turn argparse's SystemExit into _Parsed (--help) or a ValueError."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            yield
    except SystemExit as ended:
        raise (ValueError(output.getvalue()) if ended.code else _Parsed) from None


def _recipe_of(script: Path) -> Recipe:
    """The Recipe that a recipe file passes to `main`."""
    path = [str(script.parent), *sys.path]
    with mock.patch("nsa.engine.recipe.main") as main, mock.patch.object(sys, "path", path):
        runpy.run_path(str(script), run_name="__main__")
    return main.call_args.args[0]
