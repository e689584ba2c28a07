"""The ablations command trains with the recipe, keeps finished runs and reports the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nsa.bench import ablations, recipe
from nsa.bench.__main__ import main, parser
from nsa.bench.recipe import recipe_config
from nsa.engine.resolve import resolve_config
from nsa.monitor.csv_files import read_metrics
from tests.engine.runs import TINY
from tests.ranks import FORKING, ROOT

TINY_RECIPE = """
import sys
sys.path.insert(0, {recipes!r})
import m7c
from nsa.bench.recipe import recipe_config
from nsa.engine.resolve import resolve_config
from nsa.engine.recipe import Recipe, main

def demo():
    return resolve_config(m7c.demo(), assignments={settings!r})

if __name__ == "__main__":
    main(Recipe("m7c", "", {{"production": demo, "demo": demo}}))
"""
VARIANT = "attention.branches=cmp,attention.compressor=mlp"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A tiny demo with one seed, a variant and one of the command: the folder, and the command."""
    folder = tmp_path_factory.mktemp("ablations")
    settings = [flag.removeprefix("--set=") for flag in TINY]
    text = TINY_RECIPE.format(recipes=str(ROOT / "recipes"), settings=settings)
    (folder / "tiny.py").write_text(text)
    command = ["ablations", "--variants=win,win", f"--variant={VARIANT}", "--set=data.held_out=0.1"]
    command += ["--seeds=7", "--steps=2", "--jobs=1"]
    command += [f"--runs={folder / 'runs'}", f"--out={folder / 'figures.json'}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "RECIPE", folder / "tiny.py")
        patch.setattr(ablations, "COMMON", (*ablations.COMMON, "train.eval_samples=8"))
        patch.setattr(ablations, "subprocess", FORKING)
        main(command)
    return folder, command


@pytest.fixture
def tiny_command(
    measured: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[str]:
    """The same command, with the tiny recipe and another file of figures."""
    folder, command = measured
    monkeypatch.setattr(recipe, "RECIPE", folder / "tiny.py")
    monkeypatch.setattr(ablations, "COMMON", (*ablations.COMMON, "train.eval_samples=8"))
    return [*command, f"--out={tmp_path / 'figures.json'}"]


def test_a_variant_is_trained_by_the_recipe_and_reported_at_its_last_evaluation(
    measured: tuple[Path, list[str]],
) -> None:
    folder, _ = measured
    row = read_metrics(folder / "runs/win-seed7/metrics.csv")[-1]
    result, _ = json.loads((folder / "figures.json").read_text())["rows"]
    assert result["variant"] == "win"
    assert row["step"] == 2
    assert result["val_loss"] == {"7": row["val_loss"]}
    assert result["bits_per_byte"] == {"7": row["bits_per_byte"]}
    config = (folder / "runs/win-seed7/config.yaml").read_text()
    assert "branches: win" in config
    assert "seed: 7" in config
    assert ablations.lines({"rows": [result]})[2].startswith(f"| win | {row['val_loss']:.3f} |  |")


def test_a_finished_run_is_not_repeated(
    measured: tuple[Path, list[str]], tiny_command: list[str]
) -> None:
    folder, _ = measured
    metrics = folder / "runs/win-seed7/metrics.csv"
    before = metrics.stat().st_mtime_ns, len(list((folder / "runs").iterdir()))
    main(tiny_command)
    assert (metrics.stat().st_mtime_ns, len(list((folder / "runs").iterdir()))) == before


def test_an_unfinished_run_has_no_result(measured: tuple[Path, list[str]], tmp_path: Path) -> None:
    rows = (measured[0] / "runs/win-seed7/metrics.csv").read_text().splitlines(keepends=True)
    for kept, finished in ((rows, True), (rows[:-1], False), ([], False)):
        (tmp_path / "metrics.csv").write_text("".join(kept))
        run = ablations.Training("win", 7, 2, "demo", (), tmp_path)
        assert (run.result() is not None) == finished
    assert ablations.Training("win", 7, 2, "demo", (), tmp_path / "nowhere").result() is None


def test_runs_of_another_length_are_refused(
    measured: tuple[Path, list[str]], tiny_command: list[str]
) -> None:
    with pytest.raises(ValueError, match=f"--runs {measured[0] / 'runs'}.* --steps"):
        main([*tiny_command, "--steps=3"])


def test_a_failed_run_is_reported_and_the_others_are_kept(
    tiny_command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    program = tmp_path / "recipe.py"
    program.write_text("raise SystemExit('no disk')\n")
    monkeypatch.setattr(ablations, "VARIANTS", {"win": ("attention.branches=win",), "nsa": ()})
    original = ablations.Training.train

    def train(self: ablations.Training, end: float) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(recipe, "RECIPE", program)
            return original(self, end)

    monkeypatch.setattr(ablations.Training, "train", train)
    with pytest.raises(SystemExit) as ended:
        main([*tiny_command, "--variants=win,nsa"])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "no disk\n\nnsa, seed 7 ended with exit code 1" in printed
    assert "| nsa | – |" in printed
    assert "| win | " in printed


def test_every_variant_is_a_valid_and_distinct_config() -> None:
    configs = {
        name: recipe_config("demo", (*ablations.COMMON, *changes))
        for name, changes in ablations.VARIANTS.items()
    }
    for config in configs.values():
        config.validate()
    models = [resolve_config(config).model for config in configs.values()]
    assert all(models.count(model) == 1 for model in models), "two variants are the same"


def result_row(name: str, losses: dict[str, float]) -> dict[str, Any]:
    return {"variant": name, "val_loss": losses, "bits_per_byte": losses, "parameters": 10}


def test_differences_to_the_first_variant_are_tested_seed_by_seed() -> None:
    rows = [
        result_row("nsa", {"1": 2.0, "2": 3.0, "3": 4.0}),
        result_row("win", {"1": 2.5, "2": 3.1, "3": 4.3, "4": 9.9}),
        result_row("sel", {"3": 5.0}),
    ]
    table = ablations.lines({"rows": rows})
    assert "minus nsa's (95% interval) | p | detectable" in table[0]
    assert table[2].split(" | ")[1:5] == ["3.000 (2.000 to 4.000)", "", "", ""]
    # 0.5, 0.1 and 0.3: mean 0.3, standard error 0.2 / √3, t = 2.598 with 2 degrees of freedom.
    assert table[3].split(" | ")[1:5] == [
        "4.950 (2.500 to 9.900)",
        "+0.300 ± 0.497",
        "0.12",
        "0.619",
    ]
    assert table[4].split(" | ")[1:5] == ["5.000", "+1.000", "–", "–"]


def test_settings_of_the_command_are_a_variant_and_reach_every_run(
    measured: tuple[Path, list[str]],
) -> None:
    folder, _ = measured
    rows = json.loads((folder / "figures.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["win", VARIANT]
    assert all(row["val_loss"] for row in rows)
    configs = [(path.read_text()) for path in sorted(folder.glob("runs/*-seed7/config.yaml"))]
    assert all("held_out: 0.1" in config for config in configs)
    assert "branches: cmp" in configs[0]
    assert "compressor: mlp" in configs[0]
    assert "branches: win" in configs[1]


def test_beyond_the_limit_no_run_starts_and_the_message_says_how_to_continue(
    tiny_command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*tiny_command, f"--runs={tmp_path}", "--limit=1"])
    message = "win, seed 7 was not started: --limit reached; the same command continues"
    assert message in capsys.readouterr().out
    assert not list(tmp_path.glob("win*"))


@pytest.mark.parametrize("words", [["1", "2", "3"], ["1,2", "3"]])
def test_seeds_are_separated_by_spaces_or_commas(words: list[str]) -> None:
    command = ["ablations", "--seeds", *words]
    groups = parser(command).parse_args(command).seeds
    assert [seed for group in groups for seed in group] == [1, 2, 3]
