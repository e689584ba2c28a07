"""Hugging Face model with clients written elsewhere: PEFT, torch.compile, the Auto classes."""

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from nsa.model.hf import NSAForCausalLM, NSAModel
from nsa.model.hf_config import NSAConfig
from tests.model.models import build, tiny, tokens
from tests.model.test_hf import MASK, greedy, reload, wrapped

# The config.json of an export before NSAModel.
OLD_EXPORT: dict[str, Any] = {
    **{"model_type": "nsa", "architectures": ["NSAForCausalLM"], "transformers_version": "5.23.0"},
    **{"vocab_size": 61, "layers": 2, "width": 24, "heads": 4, "kv_heads": 2, "head_dim": 6},
    **{"value_dim": 4, "mlp_width": 40, "norm_eps": 2e-05, "init_std": 0.3, "rope_theta": 5000.0},
    **{"bos_token_id": 5, "eos_token_id": 5, "pad_token_id": 6, "max_position_embeddings": 96},
    **{"tie_word_embeddings": True, "dtype": "float32"},
    "attention": {
        **{"kind": "nsa", "branches": "cmp+sel+win", "compressor": "mlp", "backend": "auto"},
        **{"compressor_hidden": None, "shared_kv": False},
        "spec": {
            **{"block_len": 8, "block_stride": 4, "select_len": 8, "select_top": 3},
            **{"init_blocks": 1, "local_blocks": 2, "window": 8},
        },
    },
    "auto_map": {
        "AutoConfig": "configuration_nsa.NSAConfig",
        "AutoModelForCausalLM": "modeling_nsa.NSAForCausalLM",
    },
}


def peft() -> Any:
    return pytest.importorskip("peft", reason="needs PEFT: pip install -e '.[eval]'")


@pytest.mark.parametrize(
    ("method", "targets"),
    [("LoraConfig", {"q", "v"}), ("IA3Config", {"k", "v", "down"}), ("OSFConfig", None)],
)
def test_peft_adapts_the_same_projections_as_in_a_llama(
    method: str, targets: set[str] | None
) -> None:
    model, ids = wrapped(dtype=torch.float32), tokens(24)
    before = model(ids).logits
    adapted = peft().get_peft_model(model, getattr(peft(), method)(task_type="CAUSAL_LM"))
    adapted_names = adapted.peft_config["default"].target_modules
    assert adapted_names == (targets or {"q", "k", "v", "o", "gate", "up", "down"})
    torch.testing.assert_close(adapted(ids).logits, before)  # adapters start without effect
    adapted(ids, labels=ids).loss.backward()
    trained = {n.split(".")[-1] for n, p in adapted.named_parameters() if p.requires_grad}
    assert trained
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_takes_weights_of_the_other_half_precision(dtype: torch.dtype) -> None:
    model, ids = wrapped(dtype=dtype), tokens(24)
    other = torch.bfloat16 if dtype is torch.float16 else torch.float16
    with torch.autocast("cpu", other):
        model(ids, labels=ids).loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


def test_peft_saves_an_embedding_that_an_adapter_changes(tmp_path: Path) -> None:
    adapter = peft().LoraConfig(task_type="CAUSAL_LM", target_modules=["embed"])
    wrapped()
    adapted = peft().get_peft_model(wrapped(dtype=torch.float32), adapter)
    assert peft().utils.constants.EMBEDDING_LAYER_NAMES.count("embed") == 1, "of two models"
    with pytest.warns(UserWarning, match="embedding"):
        adapted.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert any(name.endswith("embed.base_layer.weight") for name in stored)


def test_embeddings_give_what_their_ids_give() -> None:
    model, ids = wrapped(), tokens(24, batch=3)
    embeds = model.get_input_embeddings()(ids)
    expected = model(ids, attention_mask=MASK).logits
    assert torch.equal(model(inputs_embeds=embeds, attention_mask=MASK).logits, expected)
    text = greedy(model, ids, MASK)[:, 24:]
    assert torch.equal(greedy(model, None, MASK, inputs_embeds=embeds), text)
    model(inputs_embeds=embeds.detach().requires_grad_()).logits.sum().backward()
    cache = model(ids[:, :22], MASK[:, :22], use_cache=True).past_key_values
    given: Any = {"inputs_embeds": embeds[:, 22:], "attention_mask": MASK, "labels": ids[:, 22:]}
    rest = model(**given, past_key_values=cache)
    torch.testing.assert_close(rest.logits, expected[:, 22:])
    torch.testing.assert_close(rest.loss, F.cross_entropy(expected[:, 22].float(), ids[:, 23]))
    for wrong in ({}, {"input_ids": ids, "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="input_ids and inputs_embeds: pass one of them"):
            model(**wrong)
    for wrong in ({"input_ids": ids[0]}, {"input_ids": ids[:, :0]}, {"inputs_embeds": embeds[0]}):
        with pytest.raises(
            ValueError, match=r"input_ids or inputs_embeds has shape .* \[B, T, 24\]"
        ):
            model(**wrong)


def test_auto_model_loads_what_a_causal_model_saved(tmp_path: Path) -> None:
    causal, ids = wrapped(), tokens(24, batch=3)
    causal.save_pretrained(tmp_path)
    model, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is type(causal.base_model) is NSAModel
    assert not any(info.values())
    states = causal(ids, attention_mask=MASK, output_hidden_states=True).hidden_states
    output = model(ids, attention_mask=MASK, output_hidden_states=True)
    assert torch.equal(output.last_hidden_state, states[-1])
    assert all(torch.equal(a, b) for a, b in zip(output.hidden_states, states, strict=True))
    model.save_pretrained(tmp_path / "base")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.equal(again(ids).logits, causal(ids).logits)


def test_copies_of_a_model_are_independent() -> None:
    model, ids, stored = wrapped(), tokens(24), io.BytesIO()
    expected = model(ids).logits
    torch.save(model, stored)
    copies = [copy.deepcopy(model), torch.load(io.BytesIO(stored.getvalue()), weights_only=False)]
    for other in copies:
        assert torch.equal(other(ids).logits, expected)
        other.resize_token_embeddings(70)
        other.model.blocks[0].mlp = torch.nn.Linear(24, 24).double()
        assert not torch.equal(other(ids).logits[..., :61], expected)
    assert torch.equal(model(ids).logits, expected)
    replica = model.model._replicate_for_data_parallel()  # torch then fills in its modules
    replica.embed = torch.nn.Embedding(61, 24)
    assert replica.core.embed is replica.embed
    assert model.model.core.embed is model.model.embed is not replica.embed


@pytest.mark.full
def test_padded_batches_break_a_compiled_graph_in_one_place() -> None:
    torch._dynamo.reset()
    counters.clear()
    model: Any = NSAForCausalLM(NSAConfig.of(tiny(layers=1)))
    compiled = torch.compile(model, backend="eager")
    graphs = []
    for length in (24, 30, 36):
        ids, mask = tokens(length, batch=3), torch.ones(3, length, dtype=torch.long)
        mask[0, : length // 2] = mask[1, :3] = 0
        output = compiled(ids, attention_mask=mask, labels=ids)
        expected = model(ids, attention_mask=mask, labels=ids)
        torch.testing.assert_close(output.loss, expected.loss)
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(counters["graph_break"]) == 1, dict(counters["graph_break"])
    assert graphs[1] == graphs[2]  # the second length compiles for any length
    assert graphs[-1] <= 6


def test_an_old_export_loads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OLD_EXPORT))
    config = AutoConfig.from_pretrained(tmp_path)
    core = build(config.model_config(), torch.float32)
    weights = {f"model.{name}": weight for name, weight in core.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert (core.config.width, core.config.layers, core.config.norm_eps) == (24, 2, 2e-5)
    assert (core.config.mlp_width, core.config.kv_heads, config.initializer_range) == (40, 2, 0.3)
    model = reload(tmp_path)
    assert torch.equal(model(tokens(24)).logits, core(tokens(24)))
    model.save_pretrained(tmp_path / "new")
    saved = (tmp_path / "new" / "config.json").read_text()
    assert '"hidden_size": 24' in saved
    assert '"width"' not in saved


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_servers_that_replace_attention_are_refused(server: str) -> None:
    """They would keep their own cache of keys and values, which nothing would read."""
    config = NSAConfig(layers=1, width=24, heads=2, kv_heads=1, mlp_width=16, vocab_size=61)
    config._attn_implementation_internal = server
    for kind in (AutoModel, AutoModelForCausalLM):
        with pytest.raises(ValueError, match="no sparse attention; give it a dense export"):
            kind.from_config(config)
