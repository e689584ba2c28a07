"""`nsa <verb>`: help, exit codes and one-line errors."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

import nsa
from nsa import cli
from nsa.cli import main
from tests.engine.runs import BIN
from tests.ranks import ROOT

VERBS = "check compare data doctor eval export generate import plan report serve train watch"
DS_CONFIG = ROOT / "ds_configs/zero1_pcie.json"


def test_help_lists_the_verbs() -> None:
    output = subprocess.check_output([BIN / "nsa", "--help"], text=True)
    for verb in VERBS.split():
        assert re.search(rf"\n    {verb}\s", output)


def test_the_version_is_the_packages_and_a_clone_that_is_not_installed_has_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nsa.__version__ == metadata.version("nsa-m7c")

    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "nsa (not installed)\n"
    assert nsa.__version__ == "unknown: not installed"


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import nsa", {"torch", "transformers", "numpy", "importlib_resources"}),
        ("main(['--help'])", {"torch"}),
        ("main(['data', 'prepare', '--help'])", {"torch", "numpy"}),
        (f"main(['check', {str(DS_CONFIG)!r}, '--quiet'])", {"transformers", "datasets"}),
    ],
    ids=["import", "help", "help of data", "check"],
)
def test_no_verb_imports_slow_packages(statement: str, unwanted: set[str]) -> None:
    """Every data worker and every command imports the package."""
    code = (
        "import contextlib, sys\n"
        "from nsa.cli import main\n"
        f"with contextlib.suppress(SystemExit): {statement}\n"
        f"sys.exit(str({unwanted} & {{*sys.modules}}))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.splitlines()[-1:] == ["set()"]


def test_a_wrong_value_is_one_line_and_exit_code_2(
    tmp_path: Path, refusal: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """But for several keys of a DeepSpeed JSON, which have a line each."""
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"zero_optimisation": {"stage": 1}}')
    for arguments, word in (
        (["compare", str(tmp_path), "--out", str(tmp_path / "x.png")], "metrics.csv"),
        (["report", str(tmp_path / "runs")], "no such folder"),
        (["check", str(wrong)], "zero_optimisation"),
        (["check", str(tmp_path / "nowhere.json")], "nowhere.json"),
        (["check", str(DS_CONFIG), "--ranks", "0"], "--ranks 0"),
        (["doctor", "--ranks", "0"], "--ranks 0: must be 1 or more"),
        (["check", str(DS_CONFIG), "--set", "a.b"], "write it as path.to.key=value"),
    ):
        assert word in refusal(*arguments)
    wrong.write_text('{"zero_optimisation": {}, "fp61": {}}')
    assert main(["check", str(wrong)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"nsa: {wrong}: 2 keys to change:"
    assert [line.split()[0] for line in lines[1:]] == ["zero_optimisation", "fp61"]


@pytest.mark.parametrize(
    ("verb", "flags"),
    [
        *((verb, "") for verb in ("check", "report", "compare", "eval", "serve", "data check")),
        ("generate", "--prompt=x"),
        ("export", "--to=~/out"),
        ("import", "--to=~/out"),
    ],
)
def test_a_path_may_begin_in_the_home_folder_or_an_unknown_users(
    verb: str, flags: str, tmp_path: Path, refusal: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))
    for path, shown in (("~/run", f"{tmp_path}/run"), ("~unknown-user/run", "~unknown-user/run")):
        assert shown in refusal(*verb.split(), path, *flags.split())
    if "--to" in flags:
        (tmp_path / "out").write_text("")
        assert f"--to {tmp_path}/out: already exists" in refusal(verb, "~/run", flags)


def test_ctrl_c_ends_any_verb_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Tests of the watchdog leave their own handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(cli, "_check", lambda args: signal.raise_signal(signal.SIGINT))
    try:
        assert main(["check", str(DS_CONFIG)]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == ""


def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    """`nsa report | true`: output is buffered until the end."""
    (tmp_path / "config.yaml").touch()
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "nsa", "report", str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=env)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "report.md").exists()


def test_check_prints_the_resolved_json_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(DS_CONFIG), "--ranks", "2"]) == 0
    output = capsys.readouterr()
    resolved = json.loads(output.out)
    assert "auto" not in output.out
    assert resolved["train_batch_size"] == 64  # 8 sequences, 4 micro-batches, 2 ranks
    assert resolved["zero_optimization"]["stage"] == 1
    summary = "ok: ZeRO-1, bf16, gradients accumulated in fp32, 64 sequences per step on 2 ranks\n"
    assert output.err == summary
    assert main(["check", str(DS_CONFIG), "--set", "train.micro_batch=4"]) == 0
    assert ", 32 sequences" in capsys.readouterr().err
    assert main(["check", str(DS_CONFIG.with_name("zero2_overlap.json")), "--ranks", "1"]) == 0
    buckets = (
        "accumulated in bf16, buckets of 16,777,216 elements, overlapped, 32 sequences per step"
    )
    assert capsys.readouterr().err == f"ok: ZeRO-2, bf16, gradients {buckets} on 1 rank\n"


def options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Those of its verbs, too."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from options(verb)


def test_a_number_that_a_help_states_is_the_default() -> None:
    stated = [
        (float(match[1].replace(",", "")), option.default)
        for option in options(cli._parser())
        if option.default is not None
        and (match := re.search(r"\((?:default:? )?([\d.,]*\d)[,:)]", option.help or ""))
    ]
    assert len(stated) >= 13
    assert all(number == default for number, default in stated), stated


@pytest.mark.parametrize(
    ("words", "usage", "error"),
    [
        ([], "", "the following arguments are required: verb"),
        (["check"], "check", "the following arguments are required: ds_config"),
        (["report"], "report", "the following arguments are required: runs"),
        (["import", "model"], "import", "the following arguments are required: --to"),
        (["plan", "--devise", "a100"], "plan", "--devise (did you mean --device?), a100"),
        (["generate", "a", "--temprature=1"], "generate", "--temprature=1 (did you mean --temp"),
        (["plan", "recipes/m7c.py"], "plan", "unrecognized arguments: recipes/m7c.py"),
        (["plan", "train.steps=5"], "plan", "train.steps=5 (did you mean --set train.steps=5?)"),
        (
            ["data", "prepare", "--source=x", "--tokenizer=byte", "--out=y", "--held_out=0.1"],
            "data prepare",
            "--held_out=0.1 (did you mean --held-out?)",
        ),
        (["export", "a", "--too", "b"], "export", "--to; --too (did you mean --to?)"),
        (["data", "preprae"], "data", "preprae (did you mean prepare?)"),
        (["tarin", "m7c"], "", "tarin (did you mean train?)"),
    ],
)
def test_a_wrong_call_shows_its_verbs_usage_and_names_the_nearest_flag_or_verb(
    words: list[str], usage: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"usage: nsa {usage}")
    assert error in shown


def test_the_json_of_a_plan_has_stable_keys() -> None:
    """In a process of its own, as DeepSpeed's import logs on stdout."""
    mode = "--set=model.activation_checkpointing=none"
    command = [sys.executable, "-m", "nsa", "plan", "--json", mode]
    plan = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert plan.keys() == {"parameters", "steps", "plans", "assumptions"}
    (row,) = plan["plans"]
    assert row.keys() == {
        *("config", "seq_len", "micro_batch", "accumulation", "checkpointing", "fits", "days"),
        *("memory", "bytes_sent", "tokens", "tokens_per_second"),
        *("compute", "communication", "exposed", "seconds"),
    }


def test_train_starts_the_installed_recipe_with_deepspeeds_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: calls.append([program, *words]))
    main(["train", "--num_gpus", "2", "m7c", "--profile", "demo", "--set", "train.steps=3"])
    program, python, *words = calls[0]
    assert program == python == sys.executable
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    flags = ["--profile", "demo", "--set", "train.steps=3"]
    assert words == [*launcher, str(ROOT / "recipes/m7c.py"), *flags]
    main(["train", "m7c", "--help"])
    assert calls[1][-2:] == [str(ROOT / "recipes/m7c.py"), "--help"], "which the recipe prints"
    capsys.readouterr()
    assert main(["train", "--num_gpus", "2", "m7b"]) == 2
    assert "names no recipe; write nsa train" in capsys.readouterr().err
    for words in (["--help"], ["-h", "m7c"]):
        assert main(["train", *words]) == 0
        assert "RECIPE [its flags], RECIPE one of m7c, " in capsys.readouterr().out
