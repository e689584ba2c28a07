"""Training goes on with an import, by a schedule for trained weights, and with an export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

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


def test_transformers_trainer_trains_an_export(sparse: Path, tmp_path: Path) -> None:
    ids = torch.randint(4, 270, (16, 96), generator=torch.Generator().manual_seed(0)).tolist()
    dataset = Dataset.from_dict({"input_ids": ids, "labels": ids})
    model = AutoModelForCausalLM.from_pretrained(sparse, dtype=torch.float32)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    settings = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    settings |= {"logging_steps": 1, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    arguments = TrainingArguments(str(tmp_path), disable_tqdm=True, **settings)
    trainer = Trainer(model, arguments, train_dataset=dataset)
    trainer.train()
    losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    still = [name for name, weight in model.named_parameters() if torch.equal(weight, before[name])]
    assert still == []  # φ and its keys too: the model adds the selector loss
