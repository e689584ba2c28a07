"""Recall: tasks have one right answer, and every model is evaluated alike."""

import json
import statistics
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nsa.constants import IGNORE_INDEX
from tests.bench import recall as bench
from tests.bench.__main__ import main
from tests.bench.recall import FIRST_FACT, KEYS, VALUES, check_answers, needle, recall


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def facts_of(sequence: Tensor) -> dict[int, tuple[int, int]]:
    """Return for each key of a sequence its value's token and its fact's position."""
    facts = {}
    for position, token in enumerate(sequence.tolist()):
        if token >= FIRST_FACT:
            key, value = divmod(token - FIRST_FACT, VALUES)
            assert key not in facts, "a key has two facts"
            facts[key] = (KEYS + value, position)
    return facts


def test_every_label_is_the_value_of_the_fact_with_the_questions_key() -> None:
    for batch in (recall(rng(), 16, 64, 8), needle(rng(), 16, 65, 4, 0.5)):
        rows = zip(batch.input_ids, batch.labels, batch.distance, strict=True)
        for ids, labels, distance in rows:
            facts = facts_of(ids)
            questions = (labels != IGNORE_INDEX).nonzero()[:, 0].tolist()
            assert questions
            for position in questions:
                value, fact = facts[int(ids[position])]
                assert labels[position] == value
                assert distance[position] == position - fact > 0
        shown = (batch.input_ids >= KEYS) & (batch.input_ids < KEYS + VALUES)
        assert not shown.any(), "an answer is shown"


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_the_needle_is_at_its_depth_among_other_facts(depth: float) -> None:
    batch = needle(rng(), 200, 41, 12, depth)
    assert (batch.labels[:, :-1] == IGNORE_INDEX).all()
    for ids, distance in zip(batch.input_ids, batch.distance, strict=True):
        facts = facts_of(ids)
        assert len(facts) == 12, "a fact was overwritten"
        assert facts[int(ids[-1])][1] == round(depth * 39) == 40 - int(distance[-1])


def test_an_answer_is_correct_if_the_model_predicts_its_label() -> None:
    batch = recall(rng(), 1, 32, 8)
    answers = batch.labels.clamp(min=0)

    def predict(_: Tensor) -> Tensor:
        return nn.functional.one_hot(answers, bench.VOCABULARY).float()

    assert check_answers(predict, batch)[0].all()
    answers[0, 16] += 1  # the first answer
    correct, distance = check_answers(predict, batch)
    assert correct.tolist() == [False] + [True] * 15
    assert distance.equal(batch.distance[0, 16:])


def test_every_model_is_evaluated_with_every_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "BATCH", 128)
    monkeypatch.setattr(bench, "SEQUENCES", 4)
    models = ["win", "dense", "index"]
    main(["recall", "--seq-len=64", "--steps=4", "--seeds", "4", "5",
          f"--models={','.join(models)}", "--compressor=pool",
          f"--out={tmp_path / 'deep/er'}"])  # fmt: skip
    result = json.loads((tmp_path / "deep/er/tasks.json").read_text())
    assert [(row["seed"], row["model"]) for row in result["rows"]] == [
        (seed, model) for seed in (4, 5) for model in models
    ]
    for row in result["rows"]:
        assert [cell["facts"] for cell in row["by_facts"]] == [2, 4, 8, 16]
        assert [cell["seq_len"] for cell in row["needle"]] == [32, 64]
    dense, indexed = (row["parameters"] for row in result["rows"][1:3])
    assert indexed == dense + 2 * (2 * 64 * 64 + 2 * (32 * 32 + 4 * 32 + 32))
    printed = capsys.readouterr().out
    far = [row["by_facts"][3]["far"] for row in result["rows"] if row["model"] == "win"]
    (line,) = (line for line in printed.splitlines() if line.startswith("| win |"))
    assert line.split("|")[5].startswith(f" {statistics.fmean(far):.1%} ± ")
    assert line.split("|")[5].endswith(f", least {min(far):.1%} ")
    assert f"Random blocks would include {result['random_selection']:.1%} of 16 facts" in printed


def test_dense_steps_are_those_of_a_dense_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BATCH", 128)
    task = bench.Task(64)
    dense, half = (bench.train(name, task, 4, 1)[1] for name in ("dense", "half dense index"))
    assert half[:2] == dense[:2]
    assert half[2] != dense[2]


def test_random_selection_is_how_often_random_blocks_include_the_fact() -> None:
    task, generator = bench.Task(2_048, pattern="recipe"), rng(bench.SEED)
    batch = recall(generator, bench.SEQUENCES, 2_048, 16)
    rows, queries = (batch.distance > task.reach).nonzero(as_tuple=True)
    included = []
    for row, query in zip(rows.tolist()[::7], queries.tolist()[::7], strict=True):
        own, fact = query // 64, (query - int(batch.distance[row, query])) // 64
        forced = {0, own - 1, own}
        free = [block for block in range(own + 1) if block not in forced]
        drawn = torch.randperm(len(free), generator=generator)[: task.spec.select_top - 3].tolist()
        included.append(fact in forced | {free[index] for index in drawn})
    assert bench.random_selection(task) == pytest.approx(statistics.fmean(included), abs=0.02)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--jobs", "0"], "--jobs 0: must be 1 or more"),
        (["--seq-len", "48"], "--seq-len 48: take a multiple of 32, 64 or more"),
        (["--seq-len=1024", "--pattern=recipe"], "windows of 512 .* take 2046 or more"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        main(["recall", *flags, "--out", str(tmp_path)])
