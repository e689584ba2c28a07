"""lm-evaluation-harness on an export: the tasks of the evaluation guide agree with our losses."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nsa.data.config import DataConfig
from nsa.data.dataset import open_dataset
from nsa.engine.load_run import StoredRun, load_run
from nsa.evaluate import perplexity
from nsa.evaluate.perplexity import eval_batches, open_eval_data
from nsa.export.to_hf import export
from nsa.model.loss import token_losses
from tests.data.texts import text, write_lines
from tests.docs.pages import blocks, commands
from tests.evaluate.models import write_model
from tests.ranks import ROOT

lm_eval = pytest.importorskip(
    "lm_eval", reason="lm-evaluation-harness is not installed: pip install -e '.[eval]'"
)

PAGE = ROOT / "docs/guides/evaluate.md"
SEQ_LEN = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its export."""
    folder = tmp_path_factory.mktemp("models")
    export(write_model(folder / "run", f"data.seq_len={SEQ_LEN}"), folder / "exported")
    return folder


@pytest.fixture
def opened(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoredRun:
    """The exported model, in a working folder and cache of this test."""
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports/m7c-demo").symlink_to(folder / "exported")  # as on the page
    return load_run(folder / "run", device="cpu")


def evaluate(task: str) -> dict[str, Any]:
    """Run a task of the page as the page's command does; return the results with samples."""
    from lm_eval.tasks import TaskManager

    (yaml_of_task,) = (
        block.text for block in blocks(PAGE) if block.text.startswith(f"# {task}.yaml\n")
    )
    (words,) = (
        words for block in blocks(PAGE) for words in commands(block) if words[:1] == ["lm_eval"]
    )
    flags = dict(zip(words[1::2], words[2::2], strict=True))
    assert f"{task}.yaml" in flags["--tasks"].split(",")
    return lm_eval.simple_evaluate(
        model=flags["--model"],
        model_args=flags["--model_args"],
        device=flags["--device"],
        tasks=[yaml.safe_load(yaml_of_task)],
        task_manager=TaskManager(include_defaults=False),
        batch_size=2,
        log_samples=True,
    )


def test_likelihoods_of_choices_equal_ours_and_the_likeliest_is_the_answer(
    opened: StoredRun, tmp_path: Path
) -> None:
    (lines,) = (block.text for block in blocks(PAGE) if block.language == "json")
    (tmp_path / "brackets.jsonl").write_text(lines)
    questions = [json.loads(line) for line in lines.splitlines()]
    results = evaluate("brackets")
    correct = 0
    for question, sample in zip(questions, results["samples"]["brackets"], strict=True):
        assert sample["doc"]["code"] == question["code"]
        theirs = [float(answer[0]) for answer in sample["filtered_resps"]]
        ours = [log_likelihood(opened, question["code"], end) for end in question["choices"]]
        assert theirs == pytest.approx(ours, rel=1e-5)
        correct += ours.index(max(ours)) == question["answer"]
    assert results["results"]["brackets"]["acc,none"] == pytest.approx(correct / len(questions))


@torch.no_grad()
def log_likelihood(run: StoredRun, start: str, end: str) -> float:
    ids = torch.from_numpy(run.tokenizer.encode((start + end).encode()).astype("int64"))
    labels = ids[1:].clone()
    labels[: len(start) - 1] = -100
    hidden = run.model.hidden(ids[None, :-1])[0]
    return -token_losses(hidden, run.model.embed.weight, labels).sum().item()


def test_bits_per_byte_equal_those_of_nsa_eval_on_the_same_windows(
    opened: StoredRun, tmp_path: Path
) -> None:
    """They evaluate a document after an end of text; ours follows another document."""
    first, second = text(1, SEQ_LEN)[:SEQ_LEN], text(2, 3 * SEQ_LEN)[: 3 * SEQ_LEN]
    write_lines(tmp_path / "bytes.jsonl", [second])
    results = evaluate("bytes")["results"]["bytes"]

    source = write_lines(tmp_path / "both.jsonl", [first, second])
    dataset = open_dataset(DataConfig(source=source, seq_len=SEQ_LEN))
    ours = open_eval_data(dataset, "all", 10**6, opened.tokenizer, tmp_path / "cache")
    batches = eval_batches(ours, SEQ_LEN, 2)
    losses = perplexity.evaluate(opened.model, batches, ours.count, SEQ_LEN)
    starts = torch.tensor([ours.samples.locate(sample)[1] for sample in range(ours.count)])
    assert sorted(starts.tolist()) == [0, 32, 64, 96]
    total = losses.sums.sum(1)[starts >= SEQ_LEN].sum().item()
    bits = total / math.log(2) / len(second)
    assert results["bits_per_byte,none"] == pytest.approx(bits, rel=1e-6)
    assert results["byte_perplexity,none"] == pytest.approx(2**bits, rel=1e-6)
