"""Experiments on text: every model is trained, evaluated on unseen files, and compared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa.data.tokenizer import load_pretrained
from nsa.model import LanguageModel
from nsa.model.config import AttentionConfig, ModelConfig
from nsa.spec import NSASpec
from tests.bench import real, runs, text
from tests.bench.__main__ import main
from tests.engine.runs import TINY
from tests.export.llamas import add_chat_tokenizer, llama
from tests.ranks import FORKING

LENGTH = 64


def source(folder: Path) -> Path:
    """Files of different words, so that some are held out; each repeats its words."""
    folder.mkdir()
    for number in range(60):
        words = " ".join(f"word{number}x{k % 7}" for k in range(80))
        (folder / f"{number}.txt").write_text(words)
    return folder


def test_each_model_is_trained_evaluated_and_compared_with_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "subprocess", FORKING)
    monkeypatch.setattr(text, "LENGTH", LENGTH)
    monkeypatch.setattr(text, "PLACES", (0, 16, 32, 48, LENGTH))
    monkeypatch.setattr(text, "NEAR", 8)  # ends before a repeat
    tiny = [flag for flag in TINY if "seq_len" not in flag]
    settings = [*tiny, f"--set=data.seq_len={LENGTH}", "--set=model.vocab_size=300"]
    settings += ["--set=data.held_out=0.2"]
    settings += [f"--set=data.source={source(tmp_path / 'source')}"]
    command = ["text", f"--runs={tmp_path / 'runs'}"]
    command += ["--models=nsa,dense", "--seeds=3", "--steps=2", *settings]
    command += [f"--out={tmp_path / 'text.json'}"]
    main(command)
    result = json.loads((tmp_path / "text.json").read_text())
    nsa, dense = (result["losses"][name]["3"] for name in ("nsa", "dense"))
    places = ["all", "0 to 16", "16 to 32", "32 to 48", "48 to 64", "far repeats", "repeats"]
    assert list(nsa) == list(dense) == places
    assert nsa["all"] != dense["all"]
    assert nsa["repeats"] == dense["repeats"] > 0
    assert nsa["all"] == pytest.approx(sum(nsa[place] for place in places[1:5]) / 4, rel=1e-5)
    table = capsys.readouterr().out
    assert f"{dense['all']:.3f}; {dense['all'] - nsa['all']:+.3f} ± 0.000" in table
    (tmp_path / "runs/nsa-seed3/text.json").write_text(json.dumps(dense))
    main(command)  # trains and evaluates nothing again
    assert f"{dense['all']:.3f}; +0.000" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"--runs .* has different settings .* the --steps of"):
        main([*command, "--steps=3"])


def test_a_far_repeat_is_a_rare_token_whose_last_place_is_before_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ids from 10 on are rare. Places are of labels: label t is token t + 1."""
    monkeypatch.setattr(text, "PLACES", (0, 10, 20, 30, 40))
    monkeypatch.setattr(text, "RARE", 0.3)
    monkeypatch.setattr(text, "NEAR", 8)
    row = [number % 3 for number in range(41)]
    row[5], row[36] = 11, 11  # far
    row[28], row[33] = 12, 12  # near
    row[24], row[32] = 15, 15  # the first of the window's eight
    row[26], row[35] = 16, 16  # one before them
    row[39] = 13  # new
    row[2], row[29] = 14, 14  # far, but not in the last quarter
    far = text.far_repeats(torch.tensor([row]))
    assert far.nonzero().tolist() == [[0, 34], [0, 35]]


def packages(folder: Path) -> Path:
    """Installed packages with a long text each, whose words are their own."""
    for number in range(40):
        text = "\n".join(f"word{number} of line {line % 7}" for line in range(60))
        (folder / f"package{number}").mkdir(parents=True)
        (folder / f"package{number}/long.py").write_text(text)
        (folder / f"package{number}/short.py").write_text("x")
    return folder


def test_each_stage_is_trained_evaluated_and_compared_with_the_dense_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(tmp_path / "llama")
    add_chat_tokenizer(tmp_path / "llama")
    installed = str(packages(tmp_path / "packages"))
    monkeypatch.setattr(runs, "subprocess", FORKING)
    monkeypatch.setattr(
        real, "sysconfig", SimpleNamespace(get_paths=lambda: {"purelib": installed})
    )
    monkeypatch.setattr(real, "LONG", 1_000)
    monkeypatch.setattr(real, "EDGES", (0, 16, 1_000))
    command = ["real", f"--model={tmp_path / 'llama'}", f"--folder={tmp_path / 'runs'}"]
    command += ["--selector-steps=1", "--selector-rates", "1e-3", "--steps=1", "--rates", "1e-4"]
    command += ["--seq-len=32", "--sequences=1", "--length=64", "--documents=2"]
    command += ["--needles=100", "--depths=2", f"--out={tmp_path / 'real.json'}"]
    main(command)
    stages = json.loads((tmp_path / "real.json").read_text())["stages"]
    assert [(stage["stage"], stage["tokens"]) for stage in stages] == [
        ("dense", 0),
        ("best blocks", 0),
        ("converted", 0),
        ("index, rate 0.001", 32),
        ("all, rate 0.0001", 64),
    ]
    dense, best, converted, index, trained = (stage["losses"] for stage in stages)
    assert list(dense) == ["all", "0 to 16", "16 to 64"]
    assert dense["all"] == pytest.approx((dense["0 to 16"] + 3 * dense["16 to 64"]) / 4)
    # All blocks are selected in so short a text: only a change of the other weights shows.
    assert converted == pytest.approx(dense, abs=1e-4)
    assert best == pytest.approx(dense, abs=1e-4)
    assert index == pytest.approx(dense, abs=0.02)  # trained in bf16
    assert trained != pytest.approx(index, abs=1e-3)
    assert stages[2]["needles"] == stages[0]["needles"] == {"100": "0/2"}
    assert f"{trained['all'] - dense['all']:+.4f}" in capsys.readouterr().out
    known = tmp_path / "runs/start/real-64-2-100-2.json"
    kept = json.loads(known.read_text())
    kept["needles"]["100"] = "1/2"
    known.write_text(json.dumps(kept))
    main(command)  # trains and evaluates nothing again
    assert re.search(r"\| converted .*\| 1/2 \(", capsys.readouterr().out)
    with pytest.raises(ValueError, match=r"--documents 50: only \d+ held-out files have 64 tokens"):
        main([*command, "--documents=50"])


def test_a_needle_stands_between_lines_at_its_depth_and_is_asked_in_the_chat_template(
    tmp_path: Path,
) -> None:
    add_chat_tokenizer(tmp_path)
    tokenizer = load_pretrained(str(tmp_path))
    lines = [f"line {number:02}" for number in range(40)]
    haystack = tokenizer("\n".join(lines), add_special_tokens=False).input_ids
    prompt, answer = real.needle(tokenizer, haystack, 168, 0.5, 1)
    shown, code = tokenizer.decode(prompt), tokenizer.decode(answer).strip()
    before, _, after = shown.partition(f"# The secret code of the city of Nairobi is {code}.\n")
    assert before.endswith("line 08\nline 09\n")
    assert after.startswith("line 11\n")
    question = "What is the secret code of the city of Nairobi?<|im_end|>\n<|im_start|>assistant\n"
    assert after.endswith(f"line 20\n\n\n{question}The secret code of the city of Nairobi is")


def test_recall_is_the_attention_that_selected_blocks_hold_in_all_layers() -> None:
    torch.manual_seed(0)
    spec = NSASpec(block_len=8, block_stride=8, select_len=8, select_top=4, local_blocks=1)
    attention = AttentionConfig(branches="sel", selector_loss=1.0, spec=spec)
    sizes = {"width": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "mlp_width": 32}
    model = LanguageModel(ModelConfig(layers=2, vocab_size=50, **sizes, attention=attention))
    row = torch.randint(50, (65,))
    figures = real.document(model.eval(), row)
    # Equal attention to all blocks: of 4 to 7 candidates, those not forced, 2 are selected.
    assert 2 / 6 < figures["recall"] < figures["best"] < 2 / 3
    # 2 of the 5 to 8 blocks so far are always selected.
    assert figures["held"] == pytest.approx(1 - 0.7 * (1 - figures["recall"]), abs=0.05)
    assert not model.training
    assert list(figures["losses"]) == ["all", "0 to 64"]
    assert figures["losses"]["all"] == pytest.approx(figures["losses"]["0 to 64"])
    real.select_best_blocks(model)
    figures = real.document(model, row)
    assert figures["recall"] == pytest.approx(figures["best"])
