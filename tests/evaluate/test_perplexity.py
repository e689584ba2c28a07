"""`nsa eval`: equals the trainer's figures; each token once; losses by position in the context."""

import io
import json
import math
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from nsa.cli import main
from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Samples
from nsa.data.cache import TokenCache
from nsa.data.config import DataConfig
from nsa.data.dataset import open_dataset
from nsa.data.tokenizer import ByteTokenizer
from nsa.engine.load_run import StoredRun, load_run
from nsa.evaluate import perplexity
from nsa.evaluate.command import SPLITS, require_tokenizer, sources_overlap
from nsa.evaluate.perplexity import (
    EvalData,
    Losses,
    Mean,
    bucket_edges,
    eval_batches,
    open_eval_data,
)
from nsa.evaluate.results import Result, _panel, lines, write
from nsa.model import loss
from tests.data.texts import (
    MemoryStore,
    names_of_counted,
    split,
    texts,
    train_tokenizer,
    write_lines,
)
from tests.engine.runs import TINY, on_one_rank, read_metrics, succeed
from tests.evaluate.models import write_model
from tests.model.models import build, tiny
from tests.report.pictures import BLUE, ORANGE, pixels

ARGUMENTS = ("--profile=demo", "--steps=2", *TINY)
LINES = texts(300, 200)
END = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, on embedded data and on a streamed file, and another file."""
    folder = tmp_path_factory.mktemp("runs")
    source = write_lines(folder / "lines.jsonl", LINES)
    write_lines(folder / "other.jsonl", LINES[:12])
    streamed = (f"--set=data.source={source}", "--set=data.packing=documents")
    succeed(on_one_rank("m7c.py", *ARGUMENTS, "--run-dir=nsa", folder=folder))
    succeed(on_one_rank("m7c_dense.py", *ARGUMENTS, *streamed, "--run-dir=dense", folder=folder))
    return folder


def evaluate(folder: Path, *arguments: str) -> list[dict]:
    """Run `nsa eval`; return the results in eval.json."""
    out = folder / "results"
    with mock.patch("nsa.evaluate.results.draw"):  # which takes half a second
        assert main(["eval", *arguments, "--out", str(out), "--device", "cpu"]) == 0
    return json.loads((out / "eval.json").read_text())["results"]


@pytest.mark.parametrize("run", ["nsa", "dense"])
def test_results_equal_the_trainers_own_figures(
    folder: Path,
    run: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nsa.data.cache.Writer", None)  # the run's cache has all tokens
    (result,) = evaluate(folder, str(folder / run))
    last = read_metrics(folder / run)[-1]
    assert result["loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(last["bits_per_byte"], rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["step"] == 2
    assert f"{result['loss']:.4f}" in capsys.readouterr().out


def test_runs_and_lengths_are_compared_on_the_same_tokens(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--seq-len", "192", "48", "--tokens", "959")  # of 192 and fewer
    both = [str(folder / "nsa"), "--compare", str(folder / "dense")]
    with mock.patch("nsa.evaluate.perplexity.eval_batches", wraps=eval_batches) as batched:
        results = evaluate(folder, *both, *flags)
    tokens_of_batches = {call.args[1] * call.args[2] for call in batched.call_args_list}
    assert len(tokens_of_batches) == 1, "a longer context takes no more memory"
    assert [(result["run"], result["seq_len"]) for result in results] == [
        ("nsa", 48),
        ("nsa", 192),
        ("dense", 48),
        ("dense", 192),
    ]
    assert {each["tokens"] for each in results} == {768}
    assert results[0]["over"] is None
    for number, other in ((1, 0), (2, 0), (3, 1)):
        over, beside = results[number]["over"], results[other]
        assert (over["run"], over["seq_len"]) == (beside["run"], beside["seq_len"])
        assert over["loss"] == pytest.approx(results[number]["loss"] - beside["loss"])
        assert 0 < over["standard_error"] < results[number]["standard_error"]
    output = capsys.readouterr().out
    assert "dense: context of 192 tokens, in training 96" in output
    assert "768 tokens in 4 samples" in output
    assert "loss by position" in output


def test_all_documents_of_unseen_data_are_evaluated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(folder / "other.jsonl")
    (result,) = evaluate(folder, str(folder / "nsa"), "--source", other, "--tokens", "1000000")
    total = sum(len(text) + 1 for text in LINES[:12])
    assert result["tokens"] == (total - 1) // 96 * 96
    output = capsys.readouterr().out
    assert f"{other}, split all" in output
    assert "has fewer than the 1,000,000 requested" in output
    every = ("--set", "data.held_out=0.5", "--tokens", "1000000", "--source", other)
    parts = [evaluate(folder, str(folder / "nsa"), "--split", s, *every) for s in SPLITS]
    held_out, train, both = (part[0]["tokens"] for part in parts)
    expected = [sum(len(text) + 1 for text in part) for part in split(LINES[:12], 0.5)]
    assert [train, held_out] == [(tokens - 1) // 96 * 96 for tokens in expected]
    assert both == result["tokens"]
    capsys.readouterr()
    evaluate(folder, str(folder / "nsa"), "--set", f"data.source={{{other}: 1}}", "--tokens", "96")
    assert f"{other}, split all" in capsys.readouterr().out


def test_the_default_split_of_a_dataset_that_a_run_read_is_what_is_held_out(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run's, by another name, which is printable."""
    monkeypatch.chdir(folder)
    Path("li\x1bnes.jsonl").symlink_to("lines.jsonl")
    both = (str(folder / "nsa"), "--compare", str(folder / "dense"))
    evaluate(folder, *both, "--source", "./li\x1bnes.jsonl", "--seq-len", "192")
    output = capsys.readouterr().out
    assert "./li\\x1bnes.jsonl, split held_out" in output
    assert "768 tokens in 4 samples" in output, "as many tokens as training evaluates"


def test_sources_are_compared_by_resolved_path_and_by_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for one, other, shared in (
        ("~/b.txt", "b.txt", True),
        ("a/b.txt", f"{tmp_path}/a/b.txt", True),
        ("a/b.txt", "a", True),
        ("a", "./a/c/../b.txt", True),
        ("a/b.txt", "a/b.txt.gz", False),
        ("a", "ab", False),
        ("embedded", "embedded", True),
        ("hf:a/b", "hf:a/c", False),
        ("embedded", f"{tmp_path}/embedded", False),
    ):
        assert sources_overlap(DataConfig(source=one), DataConfig(source=other)) == shared, (
            one,
            other,
        )
        mixture = {"synthetic": 0.5, other: 0.5}
        assert sources_overlap(DataConfig(source=mixture), DataConfig(source=one)) == shared


def test_the_held_out_split_of_prepared_data_is_evaluated(
    folder: Path, refusal: Callable[..., str]
) -> None:
    source, prepared = str(folder / "lines.jsonl"), str(folder / "prepared")
    flags = ["--tokenizer", "byte", "--held-out", "0.05"]
    assert main(["data", "prepare", "--source", source, *flags, "--out", prepared]) == 0
    flags = [str(folder / "nsa"), "--source", prepared, "--tokens", "1000000"]
    (result,) = evaluate(folder, *flags)
    held_out = sum(len(text) + 1 for text in split(LINES, 0.05)[1])
    assert result["tokens"] == (held_out - 1) // 96 * 96
    mixture = ("--set", f"data.source={{embedded: 0.5, {prepared}: 0.5}}", "--split", "all")
    assert "prepared' was split when it was prepared" in refusal("eval", flags[0], *mixture)


def test_each_run_reads_the_data_with_its_own_tokenizer(folder: Path) -> None:
    lines, other = str(folder / "lines.jsonl"), folder / "other, in words"
    tokenizer = train_tokenizer(LINES, 300, folder / "tokenizer")
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
    assert (first["run"], second["run"]) == ("nsa", "other, in words")


def test_results_are_written_though_stdout_is_closed(
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
    ("flags", "message"),
    [
        (["--source", "synthetic", "--set", "data.held_out=1e-9", "--split", "held_out"],
         "no document for split 'val'; raise data.held_out = 1e-09"),
        (["--source", "other.jsonl", "--seq-len", "8192"], "fewer than the 8193 of one sample"),
        (["--source", "nowhere.jsonl"], "nowhere.jsonl': no such file or folder"),
        (["--seq-len", "64", "96"], "--seq-len 64 does not divide 96"),
        (["--seq-len", "64", "0"], "--seq-len 0: must be 1 or more"),
        (["--seq-len", "192", "48", "--tokens", "191"], "--tokens 191: fewer than the 192 of one"),
        (["--set", "data.seq_len=64", "--set", "model.layers=1"],
         "--set model.layers=1: only data.*"),
        (["--set", "data.tokenizer=hf:x"], "data.tokenizer=hf:x: each run uses its tokenizer"),
        (["--device", "tpu9"], "--device tpu9: "),
        (["--compare", "nsa", "~/nowhere"], "'HOME/nowhere': there is no such folder"),
        (["--out=~/lines.jsonl"], "--out HOME/lines.jsonl: the folder cannot be created (File"),
    ],
)  # fmt: skip
def test_wrong_flags_and_data_are_one_line_and_exit_code_2(
    folder: Path,
    flags: list[str],
    message: str,
    refusal: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(perplexity, "evaluate", None)  # slow: all are refused before
    assert message.replace("HOME", str(folder)) in refusal("eval", "nsa", *flags)


def test_a_run_whose_tokenizer_is_missing_or_too_large_is_refused_by_name(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    small = write_model(tmp_path / "small", "model.vocab_size=258")
    assert (
        "nsa: small: model.vocab_size = 258 is too small for the 259 ids of its tokenizer 'byte'"
    ) in refusal("eval", small)
    exact = load_run(write_model(tmp_path / "exact", "model.vocab_size=259"), device="cpu")
    assert require_tokenizer("exact", exact) is exact.tokenizer
    other = write_model(tmp_path / "other", "data.tokenizer=hf:/nowhere")
    with pytest.warns(UserWarning, match="no tokenizer"):
        assert "nsa: other: its tokenizer is missing" in refusal("eval", other)


def eval_data(seq_len: int, samples: int, packing: str = "concat") -> EvalData:
    """Samples of 61 ids; about every tenth token ends a document."""
    tokens = np.random.default_rng(0).integers(0, 61, 4000)
    store = MemoryStore(np.where(tokens < 6, END, tokens), END)
    return EvalData(Samples([store], seq_len=seq_len, seed=0, packing=packing), samples, None)


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_lengths_change_the_context_but_not_the_evaluated_tokens(packing: str) -> None:
    data = eval_data(64, 50, packing)
    evaluated = []
    for seq_len in (64, 16, 8):
        seen: Counter[tuple[int, int]] = Counter()
        context = []
        for batch, sample, position in eval_batches(data, seq_len, rows=7):
            labels = batch.labels.flatten()
            kept = labels != IGNORE_INDEX
            seen.update(zip(sample[kept].tolist(), labels[kept].tolist(), strict=True))
            context += position[kept].tolist()
            if packing == "documents":
                starts = torch.isin(torch.arange(len(labels)), batch.cu_seqlens[:-1])
                assert torch.equal(position == 0, starts)
        assert max(context) < seq_len
        evaluated.append(seen)
    assert all(seen == evaluated[0] for seen in evaluated)
    ends = sum(
        int((store.read(start, start + 64) == END).sum())
        for store, start in map(data.samples.locate, range(50))
    )
    assert evaluated[0].total() == data.tokens - (ends if packing == "documents" else 0)


@pytest.mark.parametrize("attention", ["mean", "dense"])
def test_each_loss_depends_on_the_tokens_context_alone(attention: str) -> None:
    few = eval_data(12, 2)
    model = build(tiny(attention))
    losses = perplexity.evaluate(model, eval_batches(few, 6, rows=3), 2, 6)
    expected = np.zeros(2)
    for sample in range(2):
        store, start = few.samples.locate(sample)
        for at in range(start, start + 12):
            begin = at - at % 6
            context = torch.from_numpy(store.read(begin, at + 2).astype(np.int64))
            logits = model(context[None, :-1])[0, -1]
            expected[sample] += F.cross_entropy(logits, context[-1]).item()
    assert losses.sums.sum(1).numpy() == pytest.approx(expected, rel=1e-9)
    assert losses.tokens == 24


def test_position_buckets_double() -> None:
    assert bucket_edges(512) == [0, 64, 128, 256, 512]
    assert bucket_edges(500) == [0, 64, 128, 256, 500]
    assert bucket_edges(64) == [0, 64]
    assert bucket_edges(7) == [0, 7]


def test_a_buckets_loss_is_the_mean_over_its_positions() -> None:
    few, model = eval_data(160, 3), build(tiny())
    losses = perplexity.evaluate(model, eval_batches(few, 160, rows=2), 3, 160)
    ((batch, _, _),) = eval_batches(few, 160, rows=3)
    logits = model(batch.input_ids).flatten(0, 1)
    each = F.cross_entropy(logits, batch.labels.flatten(), reduction="none")
    by_position = each.detach().view(3, 160)
    for positions, tokens, mean in losses.buckets():
        assert tokens == 3 * len(positions)
        assert mean.value == pytest.approx(by_position[:, positions].mean().item(), rel=1e-9)
    assert [positions for positions, *_ in losses.buckets()] == [
        range(64),
        range(64, 128),
        range(128, 160),
    ]


def test_standard_errors_are_over_samples_and_over_paired_differences() -> None:
    random = np.random.default_rng(0)
    hard = random.normal(3.0, 0.5, 200)  # of each sample
    counts = torch.full((200, 1), 64.0, dtype=torch.float64)
    one = Losses(torch.from_numpy(64 * hard)[:, None], counts, [0, 64])
    other = Losses(torch.from_numpy(64 * (hard + 0.1))[:, None], counts, [0, 64])
    assert one.mean == Mean(
        pytest.approx(hard.mean()), pytest.approx(hard.std(ddof=1) / math.sqrt(200))
    )
    assert other.minus(one) == Mean(pytest.approx(0.1), pytest.approx(0.0, abs=1e-9))
    alone = Losses(one.sums[:1], counts[:1], [0, 64])
    assert alone.mean.error is None


def test_losses_in_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(loss, "CHUNK_LOGITS_CPU", 61 * 7)
    assert torch.allclose(loss.token_losses(hidden, weight, labels), expected, atol=1e-12)
    assert max(largest) == 7


def test_data_of_another_tokenizer_is_refused(folder: Path) -> None:
    dataset = open_dataset(DataConfig(source=str(folder / "lines.jsonl"), seq_len=16))
    other = ByteTokenizer()
    other.fingerprint = "another"
    close = TokenCache.close
    with mock.patch.object(TokenCache, "close", autospec=True, side_effect=close) as closed:
        with pytest.raises(ValueError, match=r"lines\.jsonl was prepared with the tokenizer"):
            open_eval_data(dataset, "val", 64, other, folder / "data-cache")
        data = open_eval_data(dataset, "val", 64, ByteTokenizer(), folder / "data-cache")
    assert data.count == 4
    assert closed.call_count == 2, "a writer would go on"


ROW = {
    *("run", "place", "step", "trained_seq_len", "seq_len", "tokens", "samples"),
    *("loss", "standard_error", "perplexity", "bits_per_byte", "bytes_per_token"),
    *("over", "positions"),
}


def test_json_is_eval_json_alone_on_stdout_with_stable_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "lines.jsonl", texts(300, 200))
    models = [str(write_model(tmp_path / name)) for name in ("one", "other")]
    flags = ["--compare", models[1], "--source", source, "--seq-len=64", "--tokens=640", "--json"]
    assert main(["eval", models[0], *flags]) == 0
    output = capsys.readouterr()
    tree = json.loads(output.out)
    folder = tmp_path / "one/eval"  # of the first run, without --out
    assert tree == json.loads((folder / "eval.json").read_text())
    assert {"eval.json", "positions.png"} == {path.name for path in folder.iterdir()}
    assert "640 tokens in 10 samples" in output.err
    assert tree.keys() == {"text", "results"}
    assert tree["text"] == {"source": source, "split": "all", "packing": "concat"}
    first, second = tree["results"]
    assert first.keys() == second.keys() == ROW
    assert (first["run"], first["seq_len"], first["tokens"]) == ("one", 64, 640)
    assert (first["step"], first["over"]) == (None, None)
    assert (first["place"], first["trained_seq_len"], first["samples"]) == (models[0], 96, 10)
    assert {path.name for path in tmp_path.iterdir()} == {"lines.jsonl", "one", "other"}
    assert second["over"].keys() == {"run", "seq_len", "loss", "standard_error"}
    assert second["over"]["run"] == "one"
    assert {key for bucket in first["positions"] for key in bucket} == {
        *("first", "last", "tokens", "loss", "standard_error")
    }


@mock.patch("nsa.evaluate.results.draw", mock.Mock())
def test_documents_are_counted_once_for_all_runs_on_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "lines.jsonl", texts(300, 200))
    runs = [write_model(tmp_path / name, f"data.source={source}") for name in ("one", "other")]
    counted = names_of_counted(monkeypatch)
    models: list[weakref.ref[Any]] = []

    def load(*arguments: Any, **options: Any) -> StoredRun:
        assert not [model for model in models if model() is not None], "one model at a time"
        assert options["device"] == torch.device("cpu")
        run = load_run(*arguments, **options)
        models.append(weakref.ref(run.model))
        return run

    monkeypatch.setattr("nsa.engine.load_run.load_run", load)
    flags = ["--tokens=192", "--seq-len", "96", "48", "--device=cpu"]
    assert main(["eval", str(runs[0]), "--compare", str(runs[1]), *flags]) == 0
    assert "split held_out" in capsys.readouterr().out
    assert counted == [source]
    assert len(models) == 2, "each is loaded once, for all lengths"


def result(run: str, seq_len: int, losses: list[list[float]], data: Any) -> Result:
    """A result with a row of losses for each sample, of 20 tokens in one or two buckets."""
    means = torch.tensor(losses, dtype=torch.float64)
    edges = [0, 64, seq_len] if len(losses[0]) == 2 else [0, seq_len]
    counts = torch.full_like(means, 20 / len(losses[0]))
    config = SimpleNamespace(data=SimpleNamespace(seq_len=128))
    step = 1_200 if run == "a" else None
    stored: Any = SimpleNamespace(folder=Path("runs") / run, step=step, config=config)
    return Result(run, stored, seq_len, data, Losses(means * counts, counts, edges))


def rows() -> list[dict[str, Any]]:
    data: Any = SimpleNamespace(samples=SimpleNamespace(bytes_per_token=2.0))
    results = [
        result("a", 128, [[4.0, 2.0], [2.0, 0.0]], data),
        result("a", 64, [[5.0], [3.0]], data),
        result("b", 128, [[4.0, 3.0], [2.0, 2.0]], data),
    ]
    return [each.row(results) for each in results]


def test_each_figure_is_in_its_column() -> None:
    assert [" ".join(line.split()) for line in lines(rows())] == [
        "run step seq-len tokens loss ± perplexity bits/byte loss minus that of",
        "a 1,200 128 40 2.0000 1.0000 7.389 1.4427 -",
        "a 1,200 64 40 4.0000 1.0000 54.598 2.8854 a, 128: +2.0000 ± 0.0000",
        "b - 128 40 2.7500 0.7500 15.643 1.9837 a, 128: +0.7500 ± 0.2500",
        "",
        "loss by position a, 128 a, 64 b, 128",
        "1 to 64 3.000 ± 1.0000 4.000 ± 1.0000 3.000 ± 1.0000",
        "65 to 128 1.000 ± 1.0000 - 2.500 ± 0.5000",
    ]


def test_the_plot_has_the_middle_of_each_bucket_of_positions(tmp_path: Path) -> None:
    files = write(rows(), {"source": "text"}, tmp_path)
    assert [file.name for file in files] == ["eval.json", "positions.png"]
    assert all(pixels(files[1], colour) > 20 for colour in (BLUE, ORANGE))
    panel = _panel(rows())
    assert panel.marked
    assert panel.x_doubles
    assert panel.curves["b, 128"] == (pytest.approx([8.0, math.sqrt(65 * 128)]), [3.0, 2.5])
    assert panel.errors["b, 128"] == [1.0, 0.5]


def test_a_loss_without_end_or_error_is_a_dash() -> None:
    data: Any = SimpleNamespace(samples=SimpleNamespace(bytes_per_token=2.0))
    diverged = result("a", 64, [[math.nan]], data)
    row = diverged.row([diverged])
    assert (row["loss"], row["standard_error"], row["perplexity"]) == (None, None, None)
    assert lines([row])[1].split()[4:8] == ["-"] * 4
    assert _panel([row]).errors == {"a, 64": [0.0]}, "of a single sample"
    assert (perplexity.perplexity(701.0), perplexity.perplexity(0.5)) == (math.inf, math.exp(0.5))


def test_a_sample_or_a_range_of_positions_without_tokens_does_not_count() -> None:
    sums = torch.tensor([2.0, 4.0, 0.0], dtype=torch.float64)
    counts = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    assert Mean.of(sums, counts) == Mean(3.0, 1.0)
    none = torch.zeros_like(sums)  # every document is short
    losses = Losses(torch.stack((sums, none), 1), torch.stack((counts, none), 1), [0, 64, 128])
    assert losses.buckets() == [(range(64), 2, Mean(3.0, 1.0))]
