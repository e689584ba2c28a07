"""Settings and DeepSpeed's JSON: any text is accepted, or refused in one line."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import strategies as st

from nsa.engine.config import RunConfig, walk
from nsa.engine.recipe import Recipe, build_parser, resolve_request
from tests.fuzz.hostile import VALUES, damaged, files, mutated, run, time_limit, values
from tests.ranks import ROOT

TREE = asdict(RunConfig())
NAMES = [name for name, _ in walk(TREE)]
YAML = yaml.safe_dump(TREE).encode()
TAGS = ("!!python/object/apply:os.system [touch {}]", "!!python/name:os.system ", "!!binary x")
TRICKS = (
    *("&a [*a, *a]", "*a", "{<<: {a: 1}}", "? [1]\n: 2", "2001-99-99", "1:2:3", "0x" + "f" * 5_000),
    *("[" * 3_000, "{" * 3_000, "- " * 3_000, "!!int x", "!!float []", "!!timestamp 3", "=", "- !"),
    *("!!set {a, a}", "!!omap [1]", "!!pairs [[1]]", "%YAML 9.9\n---\n1", "--- 1\n--- 2", "\t- a"),
)


RECIPE = Recipe("m7c", "", {"demo": runpy.run_path(str(ROOT / "recipes/m7c.py"))["demo"]})


def resolve(folder: Path, *flags: str) -> None:
    """What a recipe does before it builds the model; `main` prints a ValueError and exits."""
    command = ["--profile=demo", f"--run-dir={folder / 'run'}", *flags]
    with time_limit(), contextlib.suppress(ValueError):
        resolve_request(RECIPE, build_parser(RECIPE).parse_args(command))
    assert not (folder / "ran").exists()


def test_any_set_flag_is_accepted_or_refused(fuzz: Callable[..., None], tmp_path: Path) -> None:
    tags = [tag.format(tmp_path / "ran") for tag in TAGS]
    texts = st.one_of(
        st.sampled_from((*TRICKS, *tags)),
        st.text(),
        values().map(lambda value: json.dumps(value)),
        st.integers(1, 5_000).map(lambda digits: "1" + "0" * digits),
    )
    names = st.sampled_from((*NAMES, "attention", "attention.kind", "")) | st.text(max_size=12)

    def check(name: str, text: str) -> None:
        resolve(tmp_path, f"--set={name}={text}")

    fuzz(check, 30, name=names, text=texts)


def test_any_config_file_is_accepted_or_refused(
    fuzz_file: Callable[..., None], tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    tags = [tag.format(tmp_path / "ran") for tag in TAGS]
    snippets = st.tuples(st.sampled_from(NAMES), st.sampled_from((*TRICKS, *tags)))
    contents = st.one_of(
        mutated(TREE).map(lambda tree: json.dumps(tree).encode()),
        damaged(YAML),
        snippets.map(lambda pair: f"{pair[0].replace('.', ': {')}: {pair[1]}".encode()),
        st.sampled_from((*TRICKS, *tags)).map(lambda text: f"train: {text}".encode()),
    )

    fuzz_file(file, 15, contents, partial(resolve, tmp_path, f"--config={file}"))


def test_yaml_aliases_are_refused(tmp_path: Path) -> None:
    """They could name a billion values in ten lines, in a list or in merged mappings."""
    lists = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))
    maps = "\n".join(
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 12)
    )
    for text in (f"a0: &a0 [1]\n{lists}", f"a0: &a0 {{b: 1}}\n{maps}"):
        (tmp_path / "config.yaml").write_text(text)
        flags = build_parser(RECIPE).parse_args([f"--config={tmp_path / 'config.yaml'}"])
        with pytest.raises(ValueError, match=r"is an alias; write the value itself"):
            resolve_request(RECIPE, flags)


@pytest.mark.parametrize("name", ["zero1_pcie.json", "zero3.json"])
def test_any_deepspeed_json_is_accepted_or_refused_in_one_line(
    fuzz_file: Callable[..., None], name: str, tmp_path: Path
) -> None:
    tree, file = json.loads((ROOT / "ds_configs" / name).read_text()), tmp_path / "ds.json"
    fuzz_file(file, 13, files(tree), partial(run, "check", file))


def test_any_value_of_a_numeric_flag_is_accepted_or_refused(
    fuzz: Callable[..., None], tmp_path: Path
) -> None:
    flags = st.sampled_from(("--until", "--time-limit", "--profile-steps"))
    texts = st.text() | st.sampled_from([str(value) for value in VALUES[:16]])
    texts |= st.from_regex(re.compile(r"[0-9hms.\-]{1,12}"), fullmatch=True)

    def check(flag: str, text: str) -> None:
        resolve(tmp_path, f"{flag}={text}")

    fuzz(check, 15, flag=flags, text=texts)
