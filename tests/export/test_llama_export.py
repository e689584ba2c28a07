"""`nsa export --attention dense`: a dense run as a plain Llama, for transformers alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from nsa.cli import main
from nsa.engine.load_run import load_run
from nsa.engine.plan_command import load_profile
from nsa.export.to_llama import check_llama
from tests.engine.runs import TINY, on_one_rank, succeed
from tests.export.llamas import FAMILIES, imported, llama, logits, tokens
from tests.ranks import ROOT


def exported(run: Path, to: Path, *flags: str) -> LlamaForCausalLM:
    assert main(["export", str(run), "--to", str(to), "--attention=dense", *flags]) == 0
    model, report = LlamaForCausalLM.from_pretrained(to, output_loading_info=True)
    assert not any(report.values()), report  # no missing, unexpected or mismatched weight
    return model.eval()


def test_a_dense_run_has_the_same_logits_as_a_llama(tmp_path: Path) -> None:
    arguments = [*TINY, "--steps=1", "--run-dir=dense", "--set=model.tied_head=false"]
    succeed(on_one_rank("m7c_dense.py", *arguments, folder=tmp_path))
    model = exported(tmp_path / "dense", tmp_path / "hf", "--dtype=fp32")
    run = load_run(tmp_path / "dense", device="cpu", dtype=torch.float32)
    expected = logits(run.model, tokens(96) % 256)
    assert (logits(model, tokens(96) % 256) - expected).norm() < 1e-5 * expected.norm()
    assert not [*(tmp_path / "hf").glob("*.py"), *(tmp_path / "hf").glob("*.yaml")]
    assert "auto_map" not in json.loads((tmp_path / "hf/config.json").read_text())
    card = (tmp_path / "hf/README.md").read_text()
    assert "trust_remote_code" not in card
    assert "native-sparse-attention" not in card
    text = AutoTokenizer.from_pretrained(tmp_path / "hf")("def f", return_tensors="pt")
    assert text.input_ids.tolist() == [list(b"def f")]
    model.generate(**text, max_new_tokens=2)


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name][0] == "llama"])
def test_a_llama_comes_back_as_it_was_imported(family: str, tmp_path: Path) -> None:
    original = llama(tmp_path / "llama", **FAMILIES[family][1])
    imported(tmp_path / "llama", tmp_path / "run", "--attention=dense")
    model = exported(tmp_path / "run", tmp_path / "hf")
    assert torch.equal(logits(model, tokens(100)), logits(original, tokens(100)))


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (["--attention=nsa"], "model.attention.kind = 'nsa': a Llama has only 'dense'; omit"),
        (["--set=model.no_rope_every=2"], "model.no_rope_every = 2: a Llama has only 0; omit"),
    ],
)
def test_what_a_llama_cannot_be_is_refused_by_its_setting(
    settings: list[str], refusal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(tmp_path / "llama")
    dense = [] if "--attention=nsa" in settings else ["--attention=dense"]
    imported(tmp_path / "llama", tmp_path / "run", *dense, *settings)
    assert (
        main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "hf"), "--attention=dense"])
        == 2
    )
    assert refusal in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_a_shape_that_llamas_config_refuses_is_named_first() -> None:
    demo = load_profile(ROOT / "recipes/m7c_dense.py", "demo").model
    with pytest.raises(ValueError, match=r"model\.width = 256: LlamaConfig requires a multiple"):
        check_llama(demo)
    check_llama(replace(demo, heads=4))
