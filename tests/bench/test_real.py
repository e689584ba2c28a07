"""A real dense model made sparse: every stage is trained, evaluated on unseen files, compared."""

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
from tests.bench import real
from tests.bench.__main__ import main
from tests.export.llamas import add_chat_tokenizer, llama
from tests.ranks import FORKING


@pytest.mark.full
def test_each_stage_is_trained_evaluated_and_compared_with_the_dense_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(tmp_path / "llama")
    add_chat_tokenizer(tmp_path / "llama")
    installed = tmp_path / "packages"
    for number in range(40):
        text = "\n".join(f"word{number} of line {line % 7}" for line in range(60))
        (installed / f"package{number}").mkdir(parents=True)
        (installed / f"package{number}/long.py").write_text(text)
        (installed / f"package{number}/short.py").write_text("x")
    monkeypatch.setattr(real, "subprocess", FORKING)
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
        ("all, rate 0.0001, dense attention", 64),
    ]
    dense, best, converted, index, trained, read_all = (stage["losses"] for stage in stages)
    assert list(dense) == ["all", "0 to 16", "16 to 64"]
    assert dense["all"] == pytest.approx((dense["0 to 16"] + 3 * dense["16 to 64"]) / 4)
    # All blocks are selected in so short a text: only a change of the other weights shows.
    assert converted == pytest.approx(dense, abs=1e-4)
    assert best == pytest.approx(dense, abs=1e-4)
    assert index == pytest.approx(dense, abs=0.02)  # trained in bf16
    assert trained != pytest.approx(index, abs=1e-3)
    assert read_all == pytest.approx(trained, abs=1e-4)
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
