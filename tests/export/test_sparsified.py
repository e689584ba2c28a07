"""A Qwen3 that became sparse, in other libraries: Trainer, TRL and PEFT.

test_export.py loads it with transformers alone.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.model.test_hf_clients import SHORT_TRAINING, peft, trl

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you too"}]


def trainer(kind: Any, settings: Any, sparse: Path, dataset: Any, **more: Any) -> Any:
    return kind(
        AutoModelForCausalLM.from_pretrained(sparse, dtype=torch.float32),
        args=settings(max_steps=6, **SHORT_TRAINING),
        train_dataset=dataset,
        **more,
    )


def falls(trained: Any) -> bool:
    trained.train()
    losses = [float(line["loss"]) for line in trained.state.log_history if "loss" in line]
    return len(losses) == 6 and losses[-1] < losses[0]


def test_it_keeps_the_sources_license_and_chat(sparse: Path) -> None:
    card = (sparse / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "qwen3" in card
    tokenizer = AutoTokenizer.from_pretrained(sparse)
    prompt = tokenizer.apply_chat_template(
        MESSAGES[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
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
    settings = partial(TrainingArguments, str(tmp_path))
    trained = trainer(Trainer, settings, sparse, dataset)
    before = {name: weight.clone() for name, weight in trained.model.named_parameters()}
    assert falls(trained)
    still = [n for n, weight in trained.model.named_parameters() if torch.equal(weight, before[n])]
    assert still == []  # φ and its keys too: the model adds the selector loss


@pytest.mark.filterwarnings("ignore:.*(gradient|activation)_checkpointing:FutureWarning")
@pytest.mark.parametrize("adapter", [False, True], ids=["all weights", "LoRA"])
def test_trl_trains_it_on_conversations(adapter: bool, sparse: Path, tmp_path: Path) -> None:
    from datasets import Dataset

    config = peft().LoraConfig(task_type="CAUSAL_LM") if adapter else None
    trained = trainer(
        trl().SFTTrainer,
        partial(trl().SFTConfig, str(tmp_path), max_length=96),
        sparse,
        Dataset.from_dict({"messages": [MESSAGES] * 16}),
        processing_class=AutoTokenizer.from_pretrained(sparse),
        peft_config=config,
    )
    before = {name: weight.clone() for name, weight in trained.model.named_parameters()}
    assert falls(trained)
    changed = {n for n, w in trained.model.named_parameters() if not torch.equal(w, before[n])}
    assert changed == ({name for name in before if "lora_" in name} if adapter else before.keys())
