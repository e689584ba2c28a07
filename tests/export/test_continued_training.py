"""Training goes on with an import, by a schedule for trained weights, and with an export."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import nsa.model.hf  # noqa: F401 (registers its classes with transformers)
from nsa.cli import main
from nsa.engine.config import TrainConfig
from tests.export.llamas import command, imported

SCRATCH = TrainConfig()


def test_an_import_continues_with_a_tenth_of_the_rate_and_of_the_steps(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = imported(llama_folder, tmp_path / "run").config
    assert config.train.learning_rate == pytest.approx(SCRATCH.learning_rate / 10)
    assert config.train.min_learning_rate == pytest.approx(SCRATCH.min_learning_rate / 10)
    assert (config.train.steps, config.train.warmup_steps) == (5_000, 200)
    output = capsys.readouterr().out
    assert "its schedule: 5,000 steps at 6e-05\n" in output
    recipe = f"python recipes/sparsify.py --set train.start_from={tmp_path / 'run'}\n"
    assert f"make it sparse: {recipe}" in output
    again = imported(tmp_path / "run", tmp_path / "again").config.train
    assert (again.steps, again.learning_rate) == (5_000, config.train.learning_rate)
    start = f"start a recipe from it: --config {tmp_path / 'again/config.yaml'}\n"
    assert start in capsys.readouterr().out


def test_a_run_that_began_densely_can_be_continued(llama_folder: Path, tmp_path: Path) -> None:
    """train.dense_steps needs new weights, so an import must not keep it."""
    imported(llama_folder, tmp_path / "run")
    file = tmp_path / "run/config.yaml"
    tree = yaml.safe_load(file.read_text())
    tree["train"] |= {"dense_steps": 100, "steps": 300, "start_from": None}
    file.write_text(yaml.safe_dump(tree))
    assert main(command(tmp_path / "run", tmp_path / "again")) == 0
    train = yaml.safe_load((tmp_path / "again/config.yaml").read_text())["train"]
    assert (train["dense_steps"], train["steps"]) == (0, 30)
