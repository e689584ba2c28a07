"""`nsa eval`: the trainer's own figure, every token once, and its loss by what stands before it."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from nsa.cli import main
from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batches
from nsa.data.config import DataConfig
from nsa.data.factory import open_source
from nsa.data.token_store import TokenStore
from nsa.data.tokenizer import ByteTokenizer, train_tokenizer
from nsa.evaluate import perplexity
from nsa.evaluate.command import share_text
from nsa.evaluate.perplexity import Judged, Mean, bucket_edges, judge
from nsa.evaluate.text import Text, open_text, pieces
from nsa.model import loss
from nsa.monitor.metrics_csv import read_metrics
from tests.data.texts import split, texts, write_lines
from tests.engine.runs import TINY, alone, succeed
from tests.evaluate.models import write_model
from tests.model.models import build, tiny
from tests.report.pictures import BLUE, ORANGE, pixels

ARGUMENTS = ("--profile=demo", "--steps=2", *TINY)
LINES = texts(300, 200)
END = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, on embedded text and on a file that is streamed, and another file."""
    folder = tmp_path_factory.mktemp("runs")
    source = write_lines(folder / "lines.jsonl", LINES)
    write_lines(folder / "other.jsonl", LINES[:30])
    streamed = (f"--set=data.source={source}", "--set=data.packing=documents")
    succeed(alone("m7c.py", *ARGUMENTS, "--run-dir=nsa", folder=folder))
    succeed(alone("m7c_dense.py", *ARGUMENTS, *streamed, "--run-dir=dense", folder=folder))
    return folder


def evaluate(folder: Path, *arguments: str, code: int = 0) -> list[dict]:
    """What `nsa eval` writes for a run and others beside it."""
    out = folder / "found"
    assert main(["eval", *arguments, "--out", str(out), "--device", "cpu"]) == code
    return json.loads((out / "eval.json").read_text())["results"]


@pytest.mark.parametrize("run", ["nsa", "dense"])
def test_the_trainers_own_figures_come_out_again(
    folder: Path, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = evaluate(folder, str(folder / run))
    last = read_metrics(folder / run / "metrics.csv")[-1]
    assert found["loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(last["bits_per_byte"], rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["step"] == 2
    assert f"{found['loss']:.4f}" in capsys.readouterr().out


def test_runs_are_judged_beside_each_other_on_the_same_tokens_at_every_length(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--seq-len", "48", "192", "--stride", "48", "--tokens", "768")
    both = [str(folder / "nsa"), "--compare", str(folder / "dense")]
    found = evaluate(folder, *both, *flags)
    assert [(each["run"], each["seq_len"]) for each in found] == [
        ("nsa", 48),
        ("nsa", 192),
        ("dense", 48),
        ("dense", 192),
    ]
    assert {each["tokens"] for each in found} == {768}
    assert found[0]["over"] is None
    for number, other in ((1, 0), (2, 0), (3, 1)):
        over, beside = found[number]["over"], found[other]
        assert (over["run"], over["seq_len"]) == (beside["run"], beside["seq_len"])
        assert over["loss"] == pytest.approx(found[number]["loss"] - beside["loss"])
        assert 0 < over["standard_error"] < found[number]["standard_error"]
    said = capsys.readouterr().out
    assert "dense: sees 192 tokens at once, and saw 96 in training" in said
    assert "768 tokens in 4 samples" in said
    rows = list(csv.DictReader((folder / "found/positions.csv").open()))
    assert len(rows) == sum(len(each["positions"]) for each in found)
    assert float(rows[0]["loss"]) == found[0]["positions"][0]["loss"]
    assert pixels(folder / "found/positions.png", BLUE) > 20
    assert pixels(folder / "found/positions.png", ORANGE) > 20


def test_of_text_that_the_run_never_saw_all_documents_are_judged_as_far_as_they_go(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(folder / "other.jsonl")
    (found,) = evaluate(folder, str(folder / "nsa"), "--source", other, "--tokens", "1000000")
    there = sum(len(text) + 1 for text in LINES[:30])
    assert found["tokens"] == (there - 1) // 96 * 96
    said = capsys.readouterr().out
    assert f"{other}, split all" in said
    assert "has no more of the 1,000,000 that were asked for" in said
    evaluate(folder, str(folder / "nsa"), "--set", f"data.source={{{other}: 1}}")
    assert f"{other}, split all" in capsys.readouterr().out


def test_documents_held_out_here_that_training_has_seen_are_told_of(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for share, told in (("0.05", False), ("0.04", False), ("0.06", True)):
        both = (str(folder / "nsa"), "--compare", str(folder / "dense"))
        own = ("--source", "./lines.jsonl", "--set", f"data.held_out={share}", "--tokens", "96")
        evaluate(folder, *both, *own)
        said = capsys.readouterr().out
        assert "./lines.jsonl, split held_out" in said  # the second run's, and spelled otherwise
        assert (f"dense: data.held_out = {share}, and 0.05 in training: some" in said) == told
        assert "nsa: data.held_out" not in said


def test_a_text_is_known_by_its_place_and_by_the_folder_that_it_lies_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for one, other, shared in (
        ("a/b.txt", f"{tmp_path}/a/b.txt", True),
        ("a/b.txt", "a", True),
        ("a", "./a/c/../b.txt", True),
        ("a/b.txt", "a/b.txt.gz", False),
        ("a", "ab", False),
        ("embedded", "embedded", True),
        ("hf:a/b", "hf:a/c", False),
        ("embedded", f"{tmp_path}/embedded", False),
    ):
        assert share_text(DataConfig(source=one), DataConfig(source=other)) == shared, (one, other)
        mixture = {"synthetic": 0.5, other: 0.5}
        assert share_text(DataConfig(source=mixture), DataConfig(source=one)) == shared


def test_a_prepared_folder_is_judged_by_what_it_holds_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, prepared = str(folder / "lines.jsonl"), str(folder / "prepared")
    made = ["--tokenizer", "byte", "--held-out", "0.2", "--workers", "1"]
    assert main(["data", "prepare", "--source", source, *made, "--out", prepared]) == 0
    flags = [str(folder / "nsa"), "--source", prepared, "--tokens", "1000000"]
    (found,) = evaluate(folder, *flags)
    held_out = sum(len(text) + 1 for text in split(LINES)[1])
    assert found["tokens"] == (held_out - 1) // 96 * 96
    capsys.readouterr()
    assert main(["eval", *flags, "--split", "all"]) == 2
    assert "was divided when it was prepared" in capsys.readouterr().err


def test_runs_with_other_tokenizers_read_the_text_in_their_own_tokens(folder: Path) -> None:
    lines, other = str(folder / "lines.jsonl"), folder / "other, in words"
    source = open_source(DataConfig(source=lines), lines)
    tokenizer = train_tokenizer(source, 300, folder / "tokenizer")
    write_model(other, f"data.tokenizer={tokenizer.name}")
    both = [str(folder / "nsa"), "--compare", str(other), "--source", lines]
    first, second = evaluate(folder, *both, "--tokens", "960")
    assert second["over"] is None
    tokens = sum(len(tokenizer.encode(text)) + 1 for text in LINES)
    text_bytes = sum(map(len, LINES))
    assert first["bytes_per_token"] == pytest.approx(text_bytes / (text_bytes + len(LINES)), 0.05)
    assert second["bytes_per_token"] == pytest.approx(text_bytes / tokens, 0.05)
    bits = second["loss"] / math.log(2) / second["bytes_per_token"]
    assert second["bits_per_byte"] == pytest.approx(bits)
    rows = csv.DictReader((folder / "found/positions.csv").open())
    assert {row["run"] for row in rows} == {"nsa", "other, in words"}


def test_results_lie_in_the_runs_folder_where_no_other_is_named(folder: Path) -> None:
    assert main(["eval", str(folder / "nsa"), "--tokens", "96"]) == 0
    assert {path.name for path in (folder / "nsa/eval").iterdir()} == {
        "eval.json",
        "positions.csv",
        "positions.png",
    }


def test_results_are_written_where_nobody_reads_what_is_printed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    out = ["--out", str(tmp_path / "out"), "--tokens", "192", "--seq-len", "192"]
    with os.fdopen(writer, "wb", buffering=0) as pipe:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, write_through=True))
        assert main(["eval", str(folder / "nsa"), *out]) == 0
        monkeypatch.undo()
    assert (tmp_path / "out/eval.json").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--source", "lines.jsonl", "--set", "data.held_out=1e-9", "--split", "held_out"],
         "no document for split 'val'; raise data.held_out = 1e-09"),
        (["--source", "other.jsonl", "--seq-len", "8192"], "fewer than the 8193 of one sample"),
        (["--source", "nowhere.jsonl"], "nowhere.jsonl': no such file or folder"),
        (["--seq-len", "64", "96"], "--seq-len 64 does not divide 96"),
        (["--stride", "36"], "--stride 36 does not divide --seq-len 96"),
        (["--stride", "0"], "--stride 0: must be 1 or more"),
        (["--tokens", "95"], "--tokens 95: fewer than the 96 of one sequence"),
        (["--set", "model.layers=1"], "--set model.layers=1: only data.*"),
        (["--set", "data.tokenizer=hf:x"], "data.tokenizer=hf:x: each run reads with its own"),
        (["--device", "tpu9"], "--device tpu9: "),
        (["--device", "meta"], "--device meta: nothing is computed there; name one such as cpu"),
        (["--compare", "nowhere"], "'nowhere': there is no such folder"),
        (["--out", "lines.jsonl"], "--out lines.jsonl: no folder can be made there (File exists)"),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_one_line_and_exit_code_2(
    folder: Path,
    flags: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(perplexity, "judge", None)  # takes long: all of these are refused before
    assert main(["eval", "nsa", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def text(seq_len: int, samples: int, packing: str = "concat") -> Text:
    """Samples of a text of 61 ids, in which every tenth token or so ends a document."""
    tokens = np.random.default_rng(0).integers(0, 61, 4000)
    store = TokenStore([np.where(tokens < 6, END, tokens)], END, 1.0)
    shape = {"micro_batch": 1, "accumulation": 1, "world_size": 1, "seed": 0}
    return Text(Batches([store], seq_len=seq_len, packing=packing, **shape), samples, None)


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_lengths_and_strides_change_what_stands_before_a_token_and_not_which_are_judged(
    packing: str,
) -> None:
    found = text(64, 50, packing)
    judged = []
    for seq_len, stride in ((64, 64), (16, 16), (64, 8), (16, 4), (8, 1)):
        seen: Counter[tuple[int, int]] = Counter()
        behind = []
        for piece in pieces(found, seq_len, stride, rows=7):
            labels = piece.batch.labels.flatten()
            kept = labels != IGNORE_INDEX
            seen.update(zip(piece.sample[kept].tolist(), labels[kept].tolist(), strict=True))
            behind += piece.position[kept].tolist()
            if packing == "documents":
                starts = torch.isin(torch.arange(len(labels)), piece.batch.cu_seqlens[:-1])
                assert torch.equal(piece.position == 0, starts)
        assert max(behind) < seq_len
        if packing == "concat":  # only at the start of the text is there less
            assert sum(before < seq_len - stride for before in behind) < seq_len
        judged.append(seen)
    assert all(seen == judged[0] for seen in judged)
    ends = sum(
        int((store.read(start, start + 64) == END).sum())
        for store, start in map(found.samples.place, range(50))
    )
    assert judged[0].total() == found.tokens - (ends if packing == "documents" else 0)


@pytest.mark.parametrize("attention", ["mean", "dense"])
def test_each_loss_is_that_of_the_token_behind_its_context_alone(
    attention: str,
) -> None:
    few = text(24, 2)
    model = build(tiny(attention))
    found = judge(model, pieces(few, 12, 4, rows=5), 2, 12)
    expected = np.zeros(2)
    for sample in range(2):
        store, start = few.samples.locate(sample)
        for at in range(start, start + 24):
            begin = max(0, at - at % 4 + 4 - 12)
            context = torch.from_numpy(store.read(begin, at + 2).astype(np.int64))
            logits = model(context[None, :-1])[0, -1]
            expected[sample] += F.cross_entropy(logits, context[-1]).item()
    assert found.losses.sum(1).numpy() == pytest.approx(expected, rel=1e-9)
    assert found.tokens == 48


def test_positions_are_counted_in_buckets_that_double() -> None:
    assert bucket_edges(512) == [0, 64, 128, 256, 512]
    assert bucket_edges(500) == [0, 64, 128, 256, 500]
    assert bucket_edges(64) == [0, 64]
    assert bucket_edges(7) == [0, 7]


def test_the_loss_of_a_bucket_is_that_of_its_positions() -> None:
    few, model = text(160, 3), build(tiny())
    found = judge(model, pieces(few, 160, 160, rows=2), 3, 160)
    (whole,) = (piece.batch for piece in pieces(few, 160, 160, rows=3))
    logits = model(whole.input_ids).flatten(0, 1)
    each = F.cross_entropy(logits, whole.labels.flatten(), reduction="none")
    by_position = each.detach().view(3, 160)
    for positions, tokens, mean in found.buckets():
        assert tokens == 3 * len(positions)
        assert mean.value == pytest.approx(by_position[:, positions].mean().item(), rel=1e-9)
    assert [positions for positions, *_ in found.buckets()] == [
        range(64),
        range(64, 128),
        range(128, 160),
    ]


def test_the_standard_error_is_that_of_samples_and_of_differences_for_two_runs() -> None:
    random = np.random.default_rng(0)
    hard = random.normal(3.0, 0.5, 200)  # of each sample
    counts = torch.full((200, 1), 64.0, dtype=torch.float64)
    one = Judged(torch.from_numpy(64 * hard)[:, None], counts, [0, 64])
    other = Judged(torch.from_numpy(64 * (hard + 0.1))[:, None], counts, [0, 64])
    assert one.loss == Mean(
        pytest.approx(hard.mean()), pytest.approx(hard.std(ddof=1) / math.sqrt(200))
    )
    assert other.less(one) == Mean(pytest.approx(0.1), pytest.approx(0.0, abs=1e-9))
    alone = Judged(one.losses[:1], counts[:1], [0, 64])
    assert alone.loss.error is None


def test_logits_of_some_tokens_at_a_time_give_the_same_losses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 8, dtype=torch.float64), torch.randn(61, 8).double()
    labels = torch.randint(61, (50,)).where(torch.rand(50) > 0.2, IGNORE_INDEX)
    expected = F.cross_entropy(hidden @ weight.T, labels, reduction="none")
    largest: list[int] = []
    linear = F.linear

    def watched(*arguments: torch.Tensor) -> torch.Tensor:
        largest.append(len(arguments[0]))
        return linear(*arguments)

    monkeypatch.setattr(F, "linear", watched)
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 61 * 7)
    assert torch.allclose(loss.token_losses(hidden, weight, labels), expected, atol=1e-12)
    assert max(largest) == 7


def test_text_of_other_tokens_than_the_runs_is_refused_by_name(folder: Path) -> None:
    config = DataConfig(source=str(folder / "lines.jsonl"), seq_len=16)
    other = ByteTokenizer()
    other.fingerprint = "another"
    with pytest.raises(ValueError, match=r"the tokens of .*lines\.jsonl.* were made by"):
        open_text(config, "val", 64, other)
    assert open_text(config, "val", 64, ByteTokenizer()).count == 4
