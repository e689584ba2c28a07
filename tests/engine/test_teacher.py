"""train.teacher: real DeepSpeed on two ranks, teacher.csv and refusals."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch
from nsa.engine.config import RunConfig
from nsa.engine.micro_batch import model_of
from nsa.engine.teacher import Teacher, check_tokenizer, find_teacher, load_teacher
from tests.engine.runs import (
    TINY,
    cut_back,
    ds_config,
    losses,
    on_one_rank,
    on_two_ranks,
    succeed,
    weights,
)
from tests.model.models import build, packed, tiny, tokens

STEPS = ["--profile=demo", "--steps=4", "--set=data.seq_len=128", "--set=monitor.log_every=1"]
STEPS += ["--set=train.eval_every=2", "--set=data.packing=documents"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    command = [*TINY, *STEPS, "--set=train.learning_rate=1e-2", "--run-dir=dense"]
    succeed(on_one_rank("m7c_dense.py", *command, folder=folder))
    return folder / "dense"


def train(folder: Path, run: str, zero: str, *flags: str) -> dict[int, float]:
    new = [] if "--resume" in flags else [*TINY, *STEPS]
    named = [f"--run-dir={run}", ds_config(zero)]
    succeed(on_two_ranks("m7c.py", *new, *named, *flags, folder=folder))
    return losses(folder / run)


def table(run: Path) -> list[dict[str, float]]:
    with (run / "teacher.csv").open() as file:
        return [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    "zero",
    [
        "zero2_pcie",
        *(pytest.param(f"zero{x}", marks=pytest.mark.full) for x in ("0_debug", "1_pcie", "3")),
    ],
)
def test_a_run_learns_from_its_teacher_and_resumes(zero: str, dense: Path, tmp_path: Path) -> None:
    expected = train(tmp_path, "run", zero, f"--set=train.teacher={dense}")
    cut_back(tmp_path / "run", 2, tmp_path / "cut")
    assert train(tmp_path, "cut", zero, "--resume") == expected
    rows = table(tmp_path / "run")
    assert table(tmp_path / "cut") == rows, "the row of step 4 is replaced"
    assert {row["step"] for row in rows} == {2, 4}
    assert [row["first"] for row in rows if row["step"] == 4] == [0, 64]
    labels = sum(row["tokens"] for row in rows if row["step"] == 4)
    assert labels > 4 * 128, "half of the validation samples would be those of one rank"
    mean_kl = {
        step: sum(row["kl"] * row["tokens"] for row in rows if row["step"] == step)
        / sum(row["tokens"] for row in rows if row["step"] == step)
        for step in (2, 4)
    }
    assert mean_kl[4] < mean_kl[2]


def test_a_teachers_documents_do_not_see_each_other() -> None:
    teacher, ids = Teacher(build(tiny("dense")), RunConfig()), tokens(30)
    together, *alone = (
        teacher.arguments(Batch(part, part, offsets))["teacher"][0]
        for part, offsets in ((ids, packed(11, 19)), (ids[:, :11], None), (ids[:, 11:], None))
    )
    torch.testing.assert_close(together, torch.cat(alone))
    assert not any(weight.requires_grad for weight in teacher.model.parameters())


def test_a_model_that_is_its_own_teacher_does_not_differ_from_it() -> None:
    teacher, ids = Teacher(build(tiny("dense")), RunConfig()), tokens(30)
    batch = Batch(ids, ids)
    divergence = teacher.model(ids, labels=ids, divergence=True, **teacher.arguments(batch))
    (row,) = teacher.rows(teacher.by_position(divergence, batch))
    assert row["loss"] == row["teacher_loss"]
    assert row["kl"] == pytest.approx(0, abs=1e-6)
    assert row["same_top1"] == 1


def test_a_row_has_the_means_of_the_labels_at_its_positions() -> None:
    config = RunConfig()
    config.data.seq_len = 256
    teacher, ids = Teacher(build(tiny("dense")), config), tokens(200)
    labels = ids.clone()
    labels[:, :4] = labels[:, 64:128] = IGNORE_INDEX
    counted = torch.arange(200.0) * (labels[0] != IGNORE_INDEX)  # the model's is 0 elsewhere
    divergence = counted[:, None] * torch.tensor([1, 2, 3, 4])
    sums = teacher.by_position(divergence, Batch(ids, labels))
    assert sums.dtype == torch.float64
    first, last = (4 + 63) / 2, (128 + 199) / 2
    rows = teacher.rows(sums)
    assert [[*row.values()] for row in rows] == [
        [0, 63, 60, *(pytest.approx(n * first) for n in (1, 2, 3, 4))],
        [128, 255, 72, *(pytest.approx(n * last) for n in (1, 2, 3, 4))],
    ]


def test_a_teacher_that_is_missing_or_reads_other_tokens_is_refused(dense: Path) -> None:
    config = RunConfig()
    config.train.teacher = "no/such/run"
    with pytest.raises(ValueError, match=r"; or set train\.teacher=null$"):
        find_teacher(config)
    config.train.teacher = str(dense)
    for config.model.vocab_size in (256, 384):
        with pytest.raises(ValueError, match="has a vocabulary of 320 and this run one of "):
            find_teacher(config)
    config.model.vocab_size = 320
    stored = find_teacher(config)
    assert stored is not None
    assert model_of(config).teacher == stored.config.model, "a plan counts the teacher's size"
    assert stored.tokenizer is not None
    check_tokenizer(stored, config, stored.tokenizer.fingerprint)
    config.train.precision = "fp32"  # of training, not of the teacher's
    loaded = load_teacher(stored, config, torch.device("cpu")).model
    assert torch.equal(loaded.embed.weight, weights(dense, 4)["embed.weight"]), "in float32"
    assert not hasattr(stored, "model"), "it would keep the weights alive"
    for unknown in (None, replace(stored, tokenizer=None)):
        check_tokenizer(unknown, config, "another")
    with pytest.raises(ValueError, match=r"was trained with the tokenizer 'byte'"):
        check_tokenizer(stored, config, "another")
