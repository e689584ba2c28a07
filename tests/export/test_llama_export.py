"""`nsa export --attention dense`: a dense run as a plain Llama, for transformers alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from nsa.cli import main
from nsa.engine.load_run import load_run
from nsa.export.to_hf import dense_config, dense_family
from nsa.model import AttentionConfig, ModelConfig
from tests.engine.runs import load_profile
from tests.evaluate.models import write_model
from tests.export.llamas import imported, logits, tokens


def exported(run: Path, to: Path, *flags: str) -> LlamaForCausalLM:
    assert main(["export", str(run), "--to", str(to), "--attention=dense", *flags]) == 0
    model, report = LlamaForCausalLM.from_pretrained(to, output_loading_info=True)
    assert not any(report.values()), report  # no missing, unexpected or mismatched weight
    assert not [*to.glob("*.py"), *to.glob("*.yaml")]
    assert "trust_remote_code" not in (to / "README.md").read_text()
    return model.eval()


def test_a_dense_run_has_the_same_logits_as_a_llama(tmp_path: Path) -> None:
    write_model(tmp_path / "dense", "model.attention.kind=dense", "model.tied_head=false")
    model = exported(tmp_path / "dense", tmp_path / "hf", "--dtype=fp32")
    run = load_run(tmp_path / "dense", device="cpu", dtype=torch.float32)
    expected = logits(run.model, tokens(96) % 256)
    assert (logits(model, tokens(96) % 256) - expected).norm() < 1e-5 * expected.norm()
    assert "auto_map" not in json.loads((tmp_path / "hf/config.json").read_text())
    assert "native-sparse-attention" not in (tmp_path / "hf/README.md").read_text()
    text = AutoTokenizer.from_pretrained(tmp_path / "hf")("def f", return_tensors="pt")
    assert text.input_ids.tolist() == [list(b"def f")]
    model.generate(**text, max_new_tokens=2)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (
            {"attention": AttentionConfig()},
            r"branches = 'cmp\+sel\+win': a dense model has one set",
        ),
        ({"qkv_bias": True, "qk_norm": True}, "no dense family has qkv_bias and qk_norm; omit"),
        ({"no_rope_every": 4, "qk_norm": True}, "no dense family has qk_norm and no_rope_every"),
        ({"value_dim": 32}, "value_dim = 32: dense families have values of head_dim = 64"),
    ],
)
def test_what_no_dense_family_has_is_refused_by_its_setting(
    changes: dict[str, Any], refusal: str
) -> None:
    dense = ModelConfig(attention=AttentionConfig("dense"))
    assert dense_family(dense) == "llama"
    with pytest.raises(ValueError, match=f"--attention dense: .*{refusal}"):
        dense_family(replace(dense, **changes))


def test_a_sparse_run_is_exported_as_the_dense_model_that_reads_all_its_keys(
    tmp_path: Path,
) -> None:
    """Logits are those of dense attention, and no other code is needed."""
    spec = ("block_len=8", "block_stride=8", "select_len=8", "select_top=6")
    settings = [f"model.attention.spec.{setting}" for setting in spec]
    settings += ["model.attention.branches=sel", "model.attention.compressor=pool"]
    write_model(tmp_path / "run", *settings, "model.heads=4", "data.seq_len=256")
    model = exported(tmp_path / "run", tmp_path / "hf", "--dtype=fp32")
    run = load_run(tmp_path / "run", device="cpu", dtype=torch.float32)
    ids = tokens(250) % 256
    sparse = logits(run.model, ids)
    run.model.set_dense(True)
    expected = logits(run.model, ids)
    assert (logits(model, ids) - expected).norm() < 1e-5 * expected.norm()
    assert (sparse - expected).norm() > 1e-4 * expected.norm()
    card = (tmp_path / "hf/README.md").read_text()
    assert "dense causal attention, trained with sparse attention, which the figures below" in card


def test_heads_that_do_not_divide_the_width_make_a_mistral(tmp_path: Path) -> None:
    """LlamaConfig refuses such a shape, which the demo has."""
    demo = load_profile("m7c_dense", "demo").model
    config = dense_config(demo)
    assert (config.model_type, config.sliding_window) == ("mistral", None)
    assert dense_config(replace(demo, heads=4)).model_type == "llama"
    config.save_pretrained(tmp_path / "saved")
    assert AutoConfig.from_pretrained(tmp_path / "saved").sliding_window is None
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(config).eval()
    original.save_pretrained(tmp_path / "original")
    imported(tmp_path / "original", tmp_path / "run")
    arguments = ["--to", str(tmp_path / "hf"), "--attention=dense"]
    assert main(["export", str(tmp_path / "run"), *arguments]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert torch.equal(logits(model, tokens(100)), logits(original, tokens(100)))
