"""A Qwen3 that became sparse, in transformers: chat and Trainer.

test_export.py loads it without this package.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_it_keeps_the_sources_license_and_chat(sparse: Path) -> None:
    card = (sparse / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "qwen3" in card
    tokenizer = AutoTokenizer.from_pretrained(sparse)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    model = AutoModelForCausalLM.from_pretrained(sparse)
    answer = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert answer.shape[1] > prompt["input_ids"].shape[1]
    assert model.generation_config.eos_token_id == [1, 3]


def test_the_trainer_trains_it(sparse: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

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
